"""Hold the rows of a data set, name them, and say in which line of a file a person finds them.

A *row* is a line of data, as ms-swift's loader returns it: messages, images, videos. A `RowSource` holds the rows of
one data set. A row keeps its number in the file, even if the loader deleted rows before it:

>>> source = RowSource(name="captions", rows=[{"messages": []}, {"messages": []}], row_numbers=[0, 7], origin="my/set")
>>> str(source.sample_id(1)), source.where(1)
('captions:7', 'my/set row 8')

A row then goes through these modules, in this order:

- `fusion.py` mixes sources into epochs; `streams.py` reads sources that have no length.
- `encoder.py` encodes a row with ms-swift's template. The result is a *sample*: tokens, labels, pixels.
- `families.py` says what the tensors and tokens of each model family mean; with it, `contents.py` counts the images of
  a sample and finds their tokens.
- `cutting.py` cuts a row that is longer than a pack into parts, each of which is a sample.
- `faults.py` says why a row cannot be used, with a reason of `reasons.py`; `left_out.py` lists every such row.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.units import Prefixes
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.shared import SharedPrefixes
from swift_vlpack.rows.sizes import LengthIndex
from swift_vlpack.words import counted

Row = dict[str, Any]

_NUM_ROWS_OF_READ = 128
_TOLD = "_vlpack_epoch"  # the attribute of a data set with the epoch that it was told last
_NUM_FILES_REMEMBERED = 16  # files whose line numbers are kept in memory, 8 bytes a row
COLUMN_OF_ORIGIN = "dataset"
"""The column in which ms-swift writes the path of a row's file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource:
    """One loaded data set: its rows, their names, and how often they are trained."""

    name: str
    rows: Sequence[Row]
    ratio: float = 1.0
    """Share of the rows that an epoch has; above 1, rows repeat. Under `ratio_by: tokens`, a weight (`plan/mix.py`)."""
    sample_limit: int | None = None
    """Use at most this many rows, the same ones in every epoch."""
    system: str | None = None
    """System prompt for rows that have none."""
    max_pixels: int | None = None
    """Pixel limit of this source's images, in place of the template's."""
    seed: int | None = None
    """Seed of this source's draws, in place of the run's."""
    row_numbers: Sequence[int] | NDArray[np.int64] | None = None
    """Number of each row; None if row i has the number i."""
    is_numbered: bool = True
    """True if rows are numbered as in the file; False if only by their place among the loaded rows."""
    lengths: Sequence[int] | NDArray[np.int64] | None = None
    """Tokens of each row if they are known, images expanded. Rows with a method `length(index)` need no list."""
    sizes: LengthIndex | None = None
    """Size of each row; None until a length pass has run."""
    num_lost: int | None = 0
    """How many rows of the file the loader deleted; None if that is not known."""
    lost_rows: Mapping[int, str] = field(default_factory=dict)
    """The numbers of the deleted rows and why each was deleted, as far as they are known."""
    cached_lengths: NDArray[np.int64] | None = None
    """The lengths that a cached data set has for its rows; they are compared with the measured ones."""
    origin: str | None = None
    """Full path of the local file or folder, or the name on the hub; None for rows that a program made."""
    prefixes: SharedPrefixes | None = None
    """The beginnings that rows share; None unless `packing_share=media`."""
    places: NDArray[np.int64] | None = None
    """Place of each row among the rows of all sources, in the order of an un-packed run (packing_batch=samples)."""

    def __post_init__(self) -> None:
        if self.sample_limit is not None and self.sample_limit < 1:
            raise ConfigError(f"source {self.name!r}: sample_limit must be at least 1, got {self.sample_limit}")
        if self.sizes is not None and len(self.sizes) != len(self.rows):
            raise DataError(f"source {self.name!r}: {len(self.sizes)} lengths for {len(self.rows)} rows")
        if self.prefixes is not None and len(self.prefixes) != len(self.rows):
            raise DataError(f"source {self.name!r}: {len(self.prefixes)} prefixes for {len(self.rows)} rows")

    def __repr__(self) -> str:
        limit = "" if self.sample_limit is None else f", at most {self.sample_limit} of them"
        return f"<RowSource {self.name}: {counted(len(self.rows), 'row')}{limit}, ratio {self.ratio:g}>"

    @property
    def changes(self) -> bool:
        """Tell whether the rows are others in every epoch."""
        return hasattr(self.rows, "set_epoch")

    @property
    def declared_lengths(self) -> list[int] | None:
        """Return the tokens of each row, without encoding it; None if they are not known."""
        length = getattr(self.rows, "length", None)
        if self.lengths is None and callable(length):
            return [int(length(index)) for index in range(len(self.rows))]
        if self.lengths is not None and len(self.lengths) != len(self.rows):
            raise DataError(f"source {self.name!r}: {len(self.lengths)} lengths for {len(self.rows)} rows")
        return None if self.lengths is None else list(map(int, self.lengths))

    @property
    def num_used(self) -> int:
        """Return the number of rows from which epochs draw."""
        return len(self.rows) if self.sample_limit is None else min(self.sample_limit, len(self.rows))

    def row(self, index: int) -> Row:
        """Return a copy of a row with the source's system prompt, unless the row has its own."""
        return with_system(self.rows[index], self.system)

    def sample_id(self, index: int) -> SampleId:
        """Return the id of a row, which is the same whichever rows the loader deleted."""
        return SampleId(self.name, self.row_number(index), not self.is_numbered)

    def row_number(self, index: int) -> int:
        """Return the number of a row, from 0: in its file or, if the source is not numbered, among the loaded rows."""
        return index if self.row_numbers is None else int(self.row_numbers[index])

    def where(self, index: int) -> str:
        """Return where a person finds a row: `file:line`, or the file or data set and the row in it."""
        return place(self.origin or self.name, self.row_number(index), is_loaded=not self.is_numbered)


def set_epoch(rows: Any, epoch: int) -> None:
    """Tell a data set that changes which epoch to draw, unless it was told last: to draw and shuffle takes time."""
    if hasattr(rows, "set_epoch"):
        known = getattr(rows, "__dict__", {})  # kept with the rows, as all packs around them need to know
        if known.get(_TOLD) != epoch:
            rows.set_epoch(epoch)
            known[_TOLD] = epoch


def with_system(row: Row, system: str | None) -> Row:
    """Return a copy of a row that begins with this system prompt, unless the row has its own."""
    # Always copy, because ms-swift may return a row that it shares or caches.
    row = dict(row)
    messages = row.get("messages")
    if system is None or not isinstance(messages, (list, tuple)) or not messages:
        return row
    if not isinstance(messages[0], Mapping) or messages[0].get("role") != "system":
        row["messages"] = [{"role": "system", "content": system}, *messages]
    return row


def rows_at(rows: Any, indices: list[int]) -> list[Row]:
    """Read rows by index."""
    if not hasattr(rows, "column_names"):
        return [rows[index] for index in indices]
    # Read all rows of a `datasets` table at once, as columns: a read for each row is much slower. A slice of neighbours
    # takes 8 us a row, a list of indices 22 us.
    start, stop = (indices[0], indices[-1] + 1) if indices else (0, 0)
    columns = rows[start:stop] if indices == list(range(start, stop)) else rows[indices]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def rows_in_turn(rows: Any, indices: list[int]) -> Iterator[Row]:
    """Yield rows by index. A few are read at a time, because rows may hold images."""
    for start in range(0, len(indices), _NUM_ROWS_OF_READ):
        yield from rows_at(rows, indices[start : start + _NUM_ROWS_OF_READ])


def prefixes_of(sources: Sequence[RowSource]) -> tuple[Prefixes | None, ...]:
    """Return the prefixes that rows share, by source, as a plan takes them."""
    return tuple(None if source.prefixes is None else source.prefixes.of_rows for source in sources)


# -- compare rows by their content ------------------------------------------------------------------------------------


def row_bytes(row: Mapping[str, Any], *, as_encoded: bool = False) -> bytes:
    """Return bytes that are equal for equal rows; bytes in a row (images) are replaced by their digests.

    Without `as_encoded`, for checkpoints: rows with the same data are equal. The order of keys does not count, the
    column in which ms-swift names the file is ignored, and of an object only its class counts.

    With `as_encoded`, for the cache of lengths: rows that a template cannot tell apart are equal. The order of keys
    inside a column counts, because a template writes a tool's schema in that order. The order of columns does not
    count, nor does a column without a value, which a loader adds because another row has it. Raises `TypeError` for an
    object, whose content is not known.

    >>> row_bytes({"b": 1, "a": b"", "dataset": "x.jsonl"})
    b'{"a": "e3b0c44298fc1c14", "b": 1}'
    >>> row_bytes({"b": {"z": 1, "y": None}, "a": 2, "c": None, "dataset": "x.jsonl"}, as_encoded=True)
    b'{"a": 2, "b": {"z": 1, "y": null}, "dataset": "x.jsonl"}'
    """
    if as_encoded:
        given = {name: row[name] for name in sorted(row) if row[name] is not None}
        return json.dumps(given, default=_digest_of_bytes).encode()
    content = {name: value for name, value in row.items() if name != COLUMN_OF_ORIGIN}
    return json.dumps(content, sort_keys=True, default=_digest_or_class).encode()


def _digest_of_bytes(value: Any) -> str:
    # Use a faster digest than for checkpoints: a length pass digests every row, a checkpoint 10,000 at most.
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    raise TypeError(f"{type(value).__name__} has no content")


def _digest_or_class(value: Any) -> str:
    is_content = isinstance(value, (bytes, bytearray, memoryview))
    return hashlib.sha256(value).hexdigest()[:16] if is_content else type(value).__name__


# -- find the line of a row: editors open `photos.jsonl:17` ------------------------------------------------------------


def place(origin: str, row: int, *, is_loaded: bool = False) -> str:
    """Return `file:line` of a row of a `.jsonl`, `.txt` or `.csv` file; otherwise the origin and the row in it.

    `row` counts from 0, as ids do; the lines and rows in the result count from 1. Blank lines of a `.jsonl` or `.csv`
    file are no rows, and the first line of a `.csv` file names its columns. In a `.csv` file with a line break inside
    of quotes, no line is looked for.
    With `is_loaded`, `row` counts the rows that the loader returned, and no line is looked for.
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
    # The time is part of the key of the cache, so that a file that is edited during a run is read again.
    lines, at = _lines(path, path.stat().st_mtime_ns), row + (suffix == ".csv")
    return lines[at] if at < len(lines) else None


@lru_cache(_NUM_FILES_REMEMBERED)
def _lines(path: Path, changed: int) -> array[int]:
    """Return the numbers of the lines that are not blank; none of a `.csv` file with a line break inside of quotes."""
    is_csv, numbers = path.suffix.lower() == ".csv", array("q")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if is_csv and line.count(b'"') % 2:
                return array("q")
            if line.strip(b"\r\n" if is_csv else None):
                numbers.append(number)
    return numbers
