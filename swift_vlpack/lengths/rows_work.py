"""Do the tasks of a worker process: compute keys of rows, measure rows, encode them both ways, or again in full."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import DataError, VLPackError
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, DIFFERS, IN_FULL, KEY, SIZE
from swift_vlpack.lengths.rank_rows import Chunk, Measured, Positions, RankRows, kinds_of
from swift_vlpack.reasons import REASONS, Reason
from swift_vlpack.rows.contents import contents_of, size_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.faults import timeout_of
from swift_vlpack.rows.media import has_surplus_tags, image_urls, names_of_files
from swift_vlpack.rows.samples import SampleError
from swift_vlpack.rows.sizes import RowSize
from swift_vlpack.rows.source import Row
from swift_vlpack.rows.urls import Urls
from swift_vlpack.rows.watch import ReadStuck, watched
from swift_vlpack.words import counted

_KNOWN_BY_HEADERS = (Reason.OVER_MAX_LENGTH, Reason.URL_UNREACHABLE)
"""Reasons that need no full encoding, which would fail in the same way."""
SEEN_IN_HEADERS = (Reason.OVER_MAX_LENGTH, Reason.ASPECT_RATIO)
"""Reasons for which a row with good image headers cannot fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """The two encoders of a source's rows, and the settings of the pass."""

    by_header: RowEncoder | None
    """Encodes without decoding images; None if headers must not be trusted."""
    in_full: RowEncoder
    urls: Urls | None = None
    """Fetches the images of a chunk in parallel, for both encoders; None if URLs are not fetched ahead."""
    is_strict: bool = False
    """True if the first row that cannot be encoded ends the run."""
    num_processes: int = 1
    """Processes of each rank."""


class TaskKind(Enum):
    """Name the work to do with the rows of a task."""

    KEYS = auto()
    MEASURE = auto()
    COMPARE = auto()
    AGAIN = auto()


class Task(NamedTuple):
    """Some rows of this rank, and the work to do with them."""

    kind: TaskKind
    positions: Positions


class RowKeys(NamedTuple):
    """The keys of some rows."""

    positions: Positions
    keys: NDArray[np.void]
    has_surplus_tags: NDArray[np.bool_]
    names_url: NDArray[np.bool_]


class RowsWork:
    """Do tasks. Worker processes are forked with this object, so rows, templates and cache are never pickled."""

    def __init__(self, rows: RankRows, cache: LengthCache, encoders: Encoders) -> None:
        self.encoders = encoders
        self._rows = rows
        self._cache = cache
        self._position: int | None = None  # the row that this process works on
        self._thread = 0  # id of the thread that does the work
        self._abandoned: dict[int, str] = {}  # rows whose reads never ended, with the error

    def __call__(self, task: Task) -> Any:
        """Return the result of a task: `RowKeys` or a `Chunk`.

        If reading a row never ends, the task is done again without that row.
        """
        while True:
            try:
                return watched(partial(self._do, task), lambda: self._position)
            except ReadStuck as error:  # noqa: PERF203 - once in a while
                self._abandoned[error.where] = str(error)

    def read_again(self) -> None:
        """Read rows again whose reads were abandoned."""
        self._abandoned.clear()

    def distrust_headers(self) -> None:
        """Encode every row in full from now on."""
        self.encoders = replace(self.encoders, by_header=None)

    def _do(self, task: Task) -> Any:
        self._position, self._thread = None, threading.get_ident()
        work = {
            TaskKind.KEYS: self._keys,
            TaskKind.MEASURE: self._measured,
            TaskKind.COMPARE: self._compared,
            TaskKind.AGAIN: self._again,
        }
        return work[task.kind](task.positions)

    def _is_readable(self, position: int) -> bool:
        """Record that work on a row begins. Returns False if reading this row was abandoned before."""
        if threading.get_ident() != self._thread:
            # An abandoned read came back after all. Another thread has taken over the task, so end this one.
            raise VLPackError("abandoned")
        self._position = position
        return position not in self._abandoned

    def _keys(self, positions: Positions) -> RowKeys:
        found = RowKeys(positions, np.zeros(len(positions), KEY), *np.zeros((2, len(positions)), bool))
        for at, (position, row) in enumerate(zip(positions.tolist(), self._rows.at(positions), strict=True)):
            names = tuple(names_of_files(row))
            found.names_url[at] = any(name.lstrip().startswith("http") for name in names)
            found.has_surplus_tags[at] = has_surplus_tags(row)
            if self._is_readable(position):
                found.keys[at] = self._cache.key(row, names)
        return found

    def _measured(self, positions: Positions) -> Chunk:
        """Measure rows by their headers, and encode in full those whose headers give no size."""
        measured, by_header = [], self.encoders.by_header
        rows = self._rows_with_urls(positions, whole=by_header is None)
        for position, row in zip(positions.tolist(), rows, strict=True):
            one = None if by_header is None else self._encoded(by_header, row, position, BY_HEADER)
            if one is None or not self._is_final(one.error):
                one = self._encoded(self.encoders.in_full, row, position, IN_FULL)
            measured.append(one)
        return Chunk.of(self._rows, positions, measured, kinds=tuple(one.kinds for one in measured))

    def _is_final(self, error: SampleError | None) -> bool:
        """Tell whether a result from headers stands. Under `is_strict` no error stands: the full encoding raises it."""
        return error is None or (not self.encoders.is_strict and error.reason in _KNOWN_BY_HEADERS)

    def _compared(self, positions: Positions) -> Chunk:
        """Encode rows both ways, up to the first row whose sizes differ."""
        measured: list[Measured] = []
        for position, row in zip(positions.tolist(), self._rows_with_urls(positions, whole=True), strict=True):
            one, difference = self._both_ways(row, position)
            measured.append(one)
            if difference is not None:
                return Chunk.of(self._rows, positions, measured, difference=difference)
        return Chunk.of(self._rows, positions, measured)

    def _both_ways(self, row: Row, position: int) -> tuple[Measured, str | None]:
        """Return what to take for a row, and the difference in words if its sizes differ."""
        assert self.encoders.by_header is not None
        full = self._encoded(self.encoders.in_full, row, position, IN_FULL)
        quick = self._encoded(self.encoders.by_header, row, position, AGREED)
        if quick.error is not None and not quick.error.is_lasting:
            return full, None  # a failure that may pass proves nothing about headers
        if full.error is not None and quick.error is None and full.error.reason not in SEEN_IN_HEADERS:
            # Broken pixels after a good header are no difference: the row is left out when its pack is loaded.
            quick.size["proof"] = BY_HEADER
        elif not are_equal(quick.size, full.size) or quick.parts != full.parts:
            full.size["proof"] = DIFFERS
            by_headers = quick.error.detail if quick.error is not None else in_words(quick.size)
            name = self._rows.sample_id(position)
            return full, f"{name} has {in_words(full.size)}, from its header {by_headers}"
        return quick, None

    def _again(self, positions: Positions) -> Chunk:
        """Encode remembered rows in full, because some changes are in what headers pass by."""
        rows = zip(positions.tolist(), self._rows.at(positions), strict=True)
        # With the proof of a comparison: a row that fails does not end the run here, even under `is_strict`.
        measured = [self._encoded(self.encoders.in_full, row, position, AGREED) for position, row in rows]
        return Chunk.of(self._rows, positions, measured)

    def _rows_with_urls(self, positions: Positions, *, whole: bool) -> list[Row]:
        """Read rows, and fetch the images that they name by URL: whole files if `whole`, else only their headers."""
        rows = self._rows.at(positions)
        if (urls := self.encoders.urls) is not None:
            # Drop the images of the last chunk, otherwise all images of the source would end up in memory.
            urls.forget()
            urls.read((url for row in rows for url in image_urls(row)), whole=whole)
        return rows

    def _encoded(self, encoder: RowEncoder, row: Row, position: int, proof: int) -> Measured:
        size = np.zeros((), SIZE)
        size["proof"] = proof
        is_strict = self.encoders.is_strict and proof == IN_FULL
        try:
            if not self._is_readable(position):
                raise self._timeout(row, position, is_strict=is_strict)
            encoded = encoder.sample(row, self._rows.sample_id(position), strict=is_strict, is_watched=True)
        except SampleError as error:
            size["reason"] = REASONS.index(error.reason)
            return Measured(size, error, is_saved=error.is_lasting)
        for name, number in size_of(encoded)._asdict().items():
            size[name] = number
        size["aspect"] = contents_of(encoded).aspect
        kinds = kinds_of(row, int(size["length"]), encoded.get("header_kinds", ()))
        parts = encoder.part_sizes(encoded)
        return Measured(size, None, kinds, parts, is_saved=not parts or _have_parts(encoder, size))

    def _timeout(self, row: Row, position: int, *, is_strict: bool) -> VLPackError:
        fault, sample_id = timeout_of(self._abandoned[position], row), self._rows.sample_id(position)
        if is_strict:
            return DataError(f"{sample_id}: {fault.reason}: {fault.error}")
        return SampleError(sample_id, fault.reason, fault.error, False, fault.files)


def _have_parts(encoder: RowEncoder, size: Any) -> bool:
    """Tell whether a start that finds this size in the cache also looks for parts."""
    divider = encoder.divider
    return divider is not None and bool(divider.have_parts(size["length"].astype(np.int64)))


def are_equal(one: Any, other: Any) -> bool:
    """Tell whether two sizes are equal, however they were found."""
    return all(one[name] == other[name] for name in RowSize._fields)


def in_words(size: Any) -> str:
    """Write a size, or the reason why there is none."""
    if size["reason"]:
        return REASONS[size["reason"]]
    images, patches = counted(int(size["images"]), "image"), counted(int(size["patches"]), "patch", "patches")
    tokens, supervised = counted(int(size["length"]), "token"), counted(int(size["supervised"]), "supervised token")
    return f"{tokens}, {images}, {patches}, {supervised}"
