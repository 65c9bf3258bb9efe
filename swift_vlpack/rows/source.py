"""A row of data: which source it is from, what it is called, and where a person finds it.

A *row* is a line of data, as ms-swift's loader gives it: messages, images, videos. A `RowSource` holds the rows of one
data set. A row keeps the number it has in its file, also where the loader deleted others before it:

>>> source = RowSource(name="captions", rows=[{"messages": []}, {"messages": []}], row_numbers=[0, 7], origin="my/set")
>>> str(source.sample_id(1)), source.where(1)
('captions:7', 'my/set row 8')

What happens to a row from here on, in the order in which it happens:

- `fusion.py` mixes sources into epochs; `streams.py` takes rows that come without a length.
- `encoder.py` encodes a row with the host's template. The result is a *sample*: tokens, labels, pixels.
- `families.py` says what a model family's tensors and tokens mean; `contents.py` finds the images of a sample by it.
- `cutting.py` cuts a row that is longer than a pack into parts, each of which is a sample.
- `faults.py` says why a row cannot be used, by a word of `reasons.py`; `left_out.py` lists every such row.
"""

from __future__ import annotations

import csv
import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.parts import Part
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.words import counted

Row = dict[str, Any]

_NUM_FILES_REMEMBERED = 64
_TAG = "dataset"  # the column in which ms-swift names the file of a row


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource:
    """One data set of the mix, loaded: its rows, what they are called, and how they take part."""

    name: str
    rows: Sequence[Row]
    ratio: float = 1.0
    sample_limit: int | None = None
    """Use at most this many rows, the same ones in every epoch."""
    system: str | None = None
    """System prompt for the rows that bring none."""
    max_pixels: int | None = None
    """Pixel limit of this source's images, in place of the template's."""
    seed: int | None = None
    """Seed of this source's draws, in place of the run's."""
    row_numbers: Sequence[int] | NDArray[np.int64] | None = None
    """Number of each row in its file; None if all rows of the file are there."""
    is_numbered: bool = True
    """Whether `row_numbers` are of the file; otherwise a row's number is its place among the loaded rows."""
    sizes: LengthIndex | None = None
    """Size of each row; None until a length pass has run."""
    remember_size: Callable[[Row, RowSize, float, Sequence[Part]], None] | None = None
    """Save the true size, aspect and parts of a row for the next run; None if nobody keeps lengths."""
    num_lost: int | None = 0
    """How many rows of the file the loader deleted; None if that is not known."""
    lost_rows: Sequence[int] = ()
    """The numbers of the deleted rows, as far as they are known."""
    origin: str | None = None
    """Full path of the local file or folder, or the name on the hub; None for rows that a program made."""

    def __post_init__(self) -> None:
        if self.sample_limit is not None and self.sample_limit < 1:
            raise ConfigError(f"source {self.name!r}: sample_limit must be at least 1, got {self.sample_limit}")
        if self.sizes is not None and len(self.sizes) != len(self.rows):
            raise DataError(f"source {self.name!r}: {len(self.sizes)} lengths for {len(self.rows)} rows")

    def __repr__(self) -> str:
        limit = "" if self.sample_limit is None else f", at most {self.sample_limit} of them"
        return f"<RowSource {self.name}: {counted(len(self.rows), 'row')}{limit}, ratio {self.ratio:g}>"

    @property
    def num_used(self) -> int:
        """Number of rows that take part."""
        return len(self.rows) if self.sample_limit is None else min(self.sample_limit, len(self.rows))

    def row(self, index: int) -> Row:
        """Return a row as the template gets it: with the source's system prompt, unless it brings one."""
        return with_system(self.rows[index], self.system)

    def sample_id(self, index: int) -> SampleId:
        """Return the name of a row, which stays right when the loader deleted other rows."""
        return SampleId(self.name, self.row_number(index), not self.is_numbered)

    def row_number(self, index: int) -> int:
        """Return the number of a row, from 0: in its file or, if the source is not numbered, among the loaded rows."""
        return index if self.row_numbers is None else int(self.row_numbers[index])

    def where(self, index: int) -> str:
        """Return the place to look at for a row: `file:line`, or the file or data set and the row in it."""
        return place(self.origin or self.name, self.row_number(index), is_loaded=not self.is_numbered)


def with_system(row: Row, system: str | None) -> Row:
    """Return a copy of a row that begins with this system prompt, unless the row brings one."""
    # Always a copy, because ms-swift may hand out a row that it shares or caches.
    row = dict(row)
    messages = row.get("messages")
    if system is None or not isinstance(messages, (list, tuple)) or not messages:
        return row
    if not isinstance(messages[0], Mapping) or messages[0].get("role") != "system":
        row["messages"] = [{"role": "system", "content": system}, *messages]
    return row


# -- what is in a row, as bytes ---------------------------------------------------------------------------------------


def row_bytes(row: Mapping[str, Any], *, as_encoded: bool = False) -> bytes:
    """Return the content of a row as bytes that can be compared; images in it are replaced by their digests.

    Without `as_encoded`, rows that hold the same data are equal, which is what a checkpoint asks. The order of keys
    does not count, ms-swift's column with the file's name is left out, and an object counts by its class alone.

    With `as_encoded`, rows that a template cannot tell apart are equal, which is what the key of a length asks. The
    order inside of a column counts, because a template writes a tool's schema in that order. The order of columns does
    not, nor does a column without a value, which a loader adds because another row has it. Raises `TypeError` for an
    object, because nothing tells what is in it.

    >>> row_bytes({"b": 1, "a": b"", "dataset": "x.jsonl"})
    b'{"a": "e3b0c44298fc1c14", "b": 1}'
    >>> row_bytes({"b": {"z": 1, "y": None}, "a": 2, "c": None, "dataset": "x.jsonl"}, as_encoded=True)
    b'{"a": 2, "b": {"z": 1, "y": null}, "dataset": "x.jsonl"}'
    """
    if as_encoded:
        given = {name: row[name] for name in sorted(row) if row[name] is not None}
        return json.dumps(given, default=_digest_of_bytes).encode()
    content = {name: value for name, value in row.items() if name != _TAG}
    return json.dumps(content, sort_keys=True, default=_digest_or_class).encode()


def _digest_of_bytes(value: Any) -> str:
    # Not the digest of checkpoints but a faster one: a length pass digests every row, a checkpoint 10,000 at most.
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    raise TypeError(f"{type(value).__name__} has no content")


def _digest_or_class(value: Any) -> str:
    is_content = isinstance(value, (bytes, bytearray, memoryview))
    return hashlib.sha256(value).hexdigest()[:16] if is_content else type(value).__name__


# -- where a row stands in its file: `photos.jsonl:17` is what an editor opens -----------------------------------------


def place(origin: str, row: int, *, is_loaded: bool = False) -> str:
    """Return `file:line` of a row if the file is one of lines; otherwise the file or data set, and the row in it.

    `row` counts from 0, as ids do; lines and rows that people read count from 1. Blank lines of a `.jsonl` or `.csv`
    file are no rows, the first line of a `.csv` file names its columns, and a quoted field may span several lines.
    With `is_loaded`, `row` counts the rows that the loader returned.
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
    # Part of the cache's key, so that a file that is edited while a run lasts is read again.
    changed = path.stat().st_mtime_ns
    if suffix == ".jsonl":
        return _after_blanks(_blank_lines(path, changed), row + 1)
    try:
        starts = _csv_starts(path, changed)
    except csv.Error:  # a field longer than the reader takes, as images in base64 are
        return None
    return starts[row + 1] if row + 1 < len(starts) else None


def _after_blanks(blanks: array[int], line: int) -> int:
    """Return the line in which the `line`-th line that is not blank stands; `blanks` are the blank lines, sorted.

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
