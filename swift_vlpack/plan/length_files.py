"""Read lengths from a file: a JSON list, JSON lines, or a numpy array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import DataError

_KNOWN = "a JSON list, JSON lines (a number, or an object with length or lengths), or a .npy array"


class Lengths(NamedTuple):
    """One entry per row; images and patches where every row of the file gives them."""

    tokens: list[Any] | NDArray[Any]
    images: list[Any] | None = None
    patches: list[Any] | None = None


def read_lengths(path: Path) -> Lengths:
    """Read a length file, or raise one clear error that names the file and the line."""
    if not path.is_file():
        raise DataError(f"{path}: {'a directory' if path.is_dir() else 'no such file'}; expected {_KNOWN}")
    if path.suffix == ".npy":
        return Lengths(_numpy(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); expected {_KNOWN}") from None
    rows = _json_list(text, path) if text.lstrip().startswith("[") else _json_lines(text, path)
    if not rows:
        raise DataError(f"{path}: no lengths in it; expected {_KNOWN}")
    return Lengths(
        [_length(row, f"{path}: row {number}") for number, row in enumerate(rows, start=1)],
        _counts(rows, "images"),
        _counts(rows, "patches"),
    )


def _numpy(path: Path) -> NDArray[Any]:
    try:
        # Without pickles, which can run code: a file of numbers from somebody else is only read.
        numbers = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a numpy array ({error})") from None
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or not len(numbers):
        raise DataError(f"{path}: expected a flat array with at least one length")
    return numbers


def _json_list(text: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _json_lines(text, path)  # lines of which the first is a list
        raise DataError(f"{path}: line {error.lineno}: not JSON ({error.msg}); expected {_KNOWN}") from None
    return list(rows)


def _json_lines(text: str, path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: line {number}: not JSON ({error.msg}); expected {_KNOWN}") from None
    return rows


def _length(row: Any, where: str) -> Any:
    if isinstance(row, dict):
        row = row.get("length", row.get("lengths"))
        if row is None:
            raise DataError(f"{where}: the object has neither length nor lengths")
    if isinstance(row, list):  # ms-swift's `lengths` column: the parts of one row
        if not row or not all(isinstance(part, int) for part in row):
            raise DataError(f"{where}: lengths must be a list of integers, got {row!r}")
        return sum(row)
    if isinstance(row, bool) or not isinstance(row, int):
        raise DataError(f"{where}: length must be an integer, got {row!r} ({type(row).__name__})")
    if row < 1:
        raise DataError(f"{where}: length must be at least 1, got {row}")
    return row


def _counts(rows: list[Any], name: str) -> list[Any] | None:
    # Half of a column would shift the numbers of all rows behind the first gap.
    if all(isinstance(row, dict) and isinstance(row.get(name), int) for row in rows):
        return [row[name] for row in rows]
    return None
