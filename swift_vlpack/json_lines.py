"""Files of JSON, one value a line, that several processes append to and that a killed one leaves half written."""

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
except ImportError:  # no such locks on this system, which has no shared disk either
    fcntl = None  # type: ignore[assignment]


_NO_ROW = "there is no row in it"


def read(path: Path, start: int = 0) -> Iterator[Any]:
    """Yield the values of a file from the byte `start` on; nothing if the file cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        yield from parsed(file)


def parsed(lines: Iterable[bytes]) -> Iterator[Any]:
    """The values of lines; one that is damaged, or that a killed process left unfinished, is passed over."""
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)


def broken_line(path: Path) -> tuple[int, str] | None:
    """Find the first line that is no row. Returns its number, from 1, and what is wrong; None if all are rows."""
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(1 << 16).lstrip()[:1] == b"[":  # one list of all rows
            return _broken_list(path)
        file.seek(0)
        num_rows = 0
        for number, line in enumerate(file, start=1):
            num_rows += bool(line.strip())
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:  # no JSON, or no UTF-8
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
    """The same with None in place of what is infinite or no number, which JSON cannot say.

    >>> with_numbers({"loss": [2.5, float("inf")]})
    {'loss': [2.5, None]}
    """
    if isinstance(value, dict):
        return {name: with_numbers(inside) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_numbers(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, values: Iterable[Any], *, ensure_ascii: bool = True) -> None:
    """Write values behind what is there, all or none of them; raises `OSError`."""
    text = "".join(json.dumps(value, ensure_ascii=ensure_ascii) + "\n" for value in values)
    lines = text.encode(errors="backslashreplace")  # as JSON writes half a character, from the name of a file
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered, so that what is written is one call of the system and not what a buffer makes of it.
    with path.open("ab+", buffering=0) as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks; appending is one write nearly always
                fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        # A killed process leaves half a line, which would swallow the first of ours.
        _write(file, lines if _ends_a_line(file, end) else b"\n" + lines, end)


def _ends_a_line(file: BinaryIO, end: int) -> bool:
    if end == 0:
        return True
    file.seek(end - 1)
    return file.read(1) == b"\n"


def _write(file: BinaryIO, content: bytes, end: int) -> None:
    """All of it, or leave the file as it was: a disk that is full takes a part."""
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
