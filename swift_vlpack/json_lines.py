"""Read and append files of JSON lines, which several processes write, and a killed process may leave unfinished."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # this system has no such locks; runs on it share no disk, which locks are for
    fcntl = None  # type: ignore[assignment]


_NO_ROW = "there is no row in it"


def read(path: Path, start: int = 0) -> Iterator[Any]:
    """Yield the values of a file from the byte `start` on; nothing if the file cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        yield from parsed(file)


def parsed(lines: Iterable[bytes]) -> Iterator[Any]:
    """Yield the values of lines. Skips lines that are damaged, or that a killed process left unfinished."""
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)


def broken_line(path: Path) -> tuple[int, str] | None:
    """Find the first line of a data file that is no row. Returns (its number from 1, what is wrong), or None."""
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(1 << 16).lstrip()[:1] == b"[":  # one list of all rows
            return _broken_list(path)
        file.seek(0)
        num_rows = 0
        for number, line in enumerate(file, start=1):
            num_rows += bool(line.strip())
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:  # not JSON, or not UTF-8
                return number, f"not JSON ({getattr(error, 'msg', error)})"
            if not isinstance(row, dict):
                return number, f"a row must be an object, got {line.decode().strip()[:40]}"
    return None if num_rows else (1, _NO_ROW)


def _broken_list(path: Path) -> tuple[int, str] | None:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        return getattr(error, "lineno", 1), f"not JSON ({getattr(error, 'msg', error)})"
    return None if rows else (1, _NO_ROW)


def with_numbers(value: Any) -> Any:
    """Replace infinities and NaN by None, because JSON cannot hold them.

    >>> with_numbers({"loss": [2.5, float("inf")]})
    {'loss': [2.5, None]}
    """
    if isinstance(value, dict):
        return {name: with_numbers(inside) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_numbers(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, values: Iterable[Any], *, ensure_ascii: bool = True) -> None:
    """Append values, all or none of them. Raises `OSError`."""
    text = "".join(json.dumps(value, ensure_ascii=ensure_ascii) + "\n" for value in values)
    lines = text.encode(errors="backslashreplace")  # a file name may have a lone surrogate, which UTF-8 cannot encode
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write unbuffered, so that all lines go in one system call, which other processes cannot interrupt.
    with path.open("ab+", buffering=0) as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: rely on the single write
                fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        # A killed process may have left half a line. Begin a new line then, or our first line would be a part of it.
        _write(file, lines if _ends_a_line(file, end) else b"\n" + lines, end)


def _ends_a_line(file: BinaryIO, end: int) -> bool:
    if end == 0:
        return True
    file.seek(end - 1)
    return file.read(1) == b"\n"


def _write(file: BinaryIO, content: bytes, end: int) -> None:
    """Write everything or restore the file: a full disk may take only a part of the content."""
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
