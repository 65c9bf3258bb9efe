"""Where a row stands in its file: `photos.jsonl:17` is what an editor opens."""

from __future__ import annotations

import csv
from array import array
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path

_NUM_FILES_REMEMBERED = 64


def place(origin: str, row: int, *, is_loaded: bool = False) -> str:
    """`file:line` of a row where the file is one of lines; otherwise the file or data set and the row.

    `row` counts from 0, as ids do; lines and rows that people read count from 1.
    Blank lines of a `.jsonl` or `.csv` file are no rows, the first line of a `.csv` file has the names of its columns,
    and a quoted field may go over several lines. `is_loaded`: the number is the row's place in what the loader made.
    """
    if is_loaded:
        return f"{origin} loaded row {row + 1}"
    line = _line(Path(origin), row)
    return f"{origin} row {row + 1}" if line is None else f"{origin}:{line}"


def _line(path: Path, row: int) -> int | None:
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".txt", ".csv") or not path.is_file():
        return None
    if suffix == ".txt":  # a blank line is a row too
        return row + 1
    # Part of the key of what is remembered: a file that is edited while a run lasts is read again.
    changed = path.stat().st_mtime_ns
    if suffix == ".jsonl":
        return _after_blanks(_blank_lines(path, changed), row + 1)
    try:
        starts = _csv_starts(path, changed)
    except csv.Error:  # a field longer than the reader takes, as images in base64 are
        return None
    return starts[row + 1] if row + 1 < len(starts) else None


def _after_blanks(blanks: array[int], line: int) -> int:
    """The line where the `line`-th one that is not blank stands.

    >>> _after_blanks(array("q", [2, 3]), 2)
    4
    """
    found, num_blanks = line, 0
    # Each blank line before it moves the line on by one, which may put further blank lines before it.
    while (now := bisect_right(blanks, found)) != num_blanks:
        found, num_blanks = line + now, now
    return found


@lru_cache(_NUM_FILES_REMEMBERED)
def _blank_lines(path: Path, changed: int) -> array[int]:
    with path.open("rb") as file:
        return array("q", (number for number, line in enumerate(file, start=1) if line.isspace()))


@lru_cache(_NUM_FILES_REMEMBERED)
def _csv_starts(path: Path, changed: int) -> array[int]:
    starts, before = array("q"), 0
    # Undecodable bytes do not move lines; whoever loads the file complains of them.
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        for fields in reader:
            if fields:
                starts.append(before + 1)
            before = reader.line_num
    return starts
