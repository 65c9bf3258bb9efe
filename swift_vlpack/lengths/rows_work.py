"""What one process does with some rows: give them keys, measure them, or compare both ways of encoding them."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import DataError, VLPackError
from swift_vlpack.lengths.environment import noted_reads
from swift_vlpack.lengths.inputs import Encoders, Known
from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, DIFFERS, IN_FULL, KEY, NO_KEY, SIZE, Keys, Stamps
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows, Seen
from swift_vlpack.lengths.trust import kinds_of
from swift_vlpack.reasons import REASONS, Reason, about
from swift_vlpack.rows.contents import contents_of, size_of
from swift_vlpack.rows.cutting import part_sizes
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.faults import timeout_of
from swift_vlpack.rows.media import has_surplus_tags, image_urls
from swift_vlpack.rows.samples import SampleError
from swift_vlpack.rows.sizes import RowSize
from swift_vlpack.rows.source import Row
from swift_vlpack.rows.watch import Waits, watched
from swift_vlpack.words import counted

_PIXELS_OF_PATCH = 14 * 14  # the smallest patch there is, so that no video is taken for cheaper than it is
_SAID_BY_HEADERS = (Reason.OVER_MAX_LENGTH, Reason.URL_UNREACHABLE)  # no need to encode in full to know


class Aim(Enum):
    """What is to be done with rows; the value is the method of `RowsWork` that does it."""

    KEYS = "_keys"
    MEASURE = "_measured"
    COMPARE = "_compared"


class Task(NamedTuple):
    """Some rows, and what is to be done with them."""

    aim: Aim
    positions: Positions


class RowsWork:
    """Does tasks. Forked processes have it as it is: rows, templates and what is known need not be pickled."""

    def __init__(self, rows: RankRows, known: Known, encoders: Encoders) -> None:
        self._rows = rows
        self._known = known
        self.encoders = encoders
        self._at: int | None = None  # the row that this process is at, in the thread that does the work
        self._thread = 0
        self._given_up: dict[int, str] = {}  # rows whose reads waited for too long

    def without_headers(self) -> RowsWork:
        """The same, but for headers; what was given up stays given up."""
        # A copy of the one, so that what it knows of reads that were given up goes on being known.
        other = copy.copy(self)
        other.encoders = replace(self.encoders, by_header=None)
        return other

    def __call__(self, task: Task) -> Any:
        """Do a task. A row that waits for a disk for ever is noted, and the others are done anew without it."""
        with noted_reads() as reads:
            while True:
                try:
                    done = watched(partial(self._begun, task), lambda: self._at)
                    return replace(done, reads=reads) if isinstance(done, Chunk) else done
                except Waits as error:  # noqa: PERF203 - once in a while
                    self._given_up[error.where] = str(error)

    def _begun(self, task: Task) -> Any:
        self._at, self._thread = None, threading.get_ident()
        return getattr(self, task.aim.value)(task.positions)

    def _goes_on(self, position: int) -> bool:
        """Note where this process is; False for a row that is known to wait for ever."""
        if threading.get_ident() != self._thread:
            raise VLPackError("left behind")  # its read came back after all; nobody wants to know
        self._at = position
        return position not in self._given_up

    def _keys(self, positions: Positions) -> tuple[Positions, Keys, Stamps, NDArray[np.bool_]]:
        rows, cache = list(zip(positions.tolist(), self._rows.at(positions), strict=True)), self._known.cache
        found = [cache.key_and_stamp(row) if self._goes_on(position) else (NO_KEY, 0) for position, row in rows]
        keys, stamps = zip(*found, strict=True) if found else ((), ())
        surplus = np.array([has_surplus_tags(row) for _, row in rows], dtype=bool)
        return positions, np.array(list(keys), KEY), np.array(stamps, np.uint32), surplus

    def _measured(self, positions: Positions) -> Chunk:
        """By header where that can be, else in full: an image or video whose header says nothing."""
        chunk, seen = Chunk.empty(positions), []
        by_header, in_full = self.encoders.by_header, self.encoders.in_full
        rows = self._rows_and_urls(positions, whole=by_header is None)
        for at, (position, row) in enumerate(zip(positions.tolist(), rows, strict=True)):
            size, error, of_header = None, None, Seen()
            if by_header is not None:
                size, error, of_header = self._size(by_header, row, position, BY_HEADER)
            if size is None or (error is not None and not self._is_final(error)):
                is_silent = error is not None and error.is_lasting
                size, error, in_all = self._size(in_full, row, position, IN_FULL)
                of_header = Seen(is_silent=is_silent and error is None, parts=in_all.parts)
            chunk.put(at, size, error, self._rows.index(position), of_header.parts)
            seen.append(of_header)
        return replace(chunk, seen=tuple(seen))

    def _is_final(self, error: SampleError) -> bool:
        """Whether full encoding need not be asked; under `strict` it is, to end the run in its own words."""
        return not self.encoders.is_strict and error.reason in _SAID_BY_HEADERS

    def _compared(self, positions: Positions) -> Chunk:
        """A row whose header is good and whose pixels are not is no difference: it is left out with its pack."""
        by_header, in_full = self.encoders.by_header, self.encoders.in_full
        assert by_header is not None
        chunk, rows = Chunk.empty(positions), self._rows_and_urls(positions, whole=True)
        for at, (position, row) in enumerate(zip(positions.tolist(), rows, strict=True)):
            full, error, of_full = self._size(in_full, row, position, IN_FULL)
            quick, quick_error, of_quick = self._size(by_header, row, position, AGREED)
            index = self._rows.index(position)
            # A failure that may pass proves nothing about headers: the full encoding counts.
            if quick_error is not None and not quick_error.is_lasting:
                quick, quick_error = full, error
            elif error is not None and quick_error is None and about(error.reason).is_of_pixels:
                quick["proof"] = BY_HEADER
            elif not _are_equal(quick, full) or of_quick.parts != of_full.parts:
                full["proof"] = DIFFERS
                chunk.put(at, full, error, index, of_full.parts)
                said = quick_error.detail if quick_error is not None else _shown(quick)
                name = self._rows.sample_id(position)
                return chunk.up_to(at, f"{name} has {_shown(full)}, from its header {said}")
            chunk.put(at, quick, quick_error, index, of_full.parts or of_quick.parts)
        return chunk

    def _rows_and_urls(self, positions: Positions, *, whole: bool) -> list[Row]:
        """The rows; what their images' URLs answer is asked for in threads, to be there when they are encoded."""
        rows = self._rows.at(positions)
        if (urls := self._known.urls) is not None:
            # What the chunk before asked for; a pass would hold all images of a source.
            urls.forget()
            urls.read((url for row in rows for url in image_urls(row)), whole=whole)
        return rows

    def _size(self, encoder: RowEncoder, row: Row, position: int, proof: int) -> tuple[Any, SampleError | None, Seen]:
        size = np.zeros((), SIZE)
        size["proof"] = proof
        is_strict = self.encoders.is_strict and proof == IN_FULL
        try:
            if not self._goes_on(position):
                raise self._timeout(row, position, is_strict=is_strict)
            encoded = encoder.sample(row, self._rows.sample_id(position), strict=is_strict, is_watched=True)
        except SampleError as error:
            size["reason"] = REASONS.index(error.reason)
            return size, error, Seen()
        for name, number in size_of(encoded)._asdict().items():
            size[name] = number
        size["aspect"] = contents_of(encoded).aspect
        kinds = kinds_of(row, int(size["length"]), encoded.get("header_kinds", ()))
        # Of a video only the frames that are sampled are counted, as they are resized; all of it is decoded.
        pixels = max(encoded.get("header_pixels", 0), int(size["patches"]) * _PIXELS_OF_PATCH)
        return size, None, Seen(kinds, pixels, parts=part_sizes(encoded, encoder.cutter))

    def _timeout(self, row: Row, position: int, *, is_strict: bool) -> VLPackError:
        fault, sample_id = timeout_of(self._given_up[position], row), self._rows.sample_id(position)
        if is_strict:
            return DataError(f"{sample_id}: {fault.reason}: {fault.error}")
        return SampleError(sample_id, fault.reason, fault.error, False, fault.files)


def _are_equal(one: Any, other: Any) -> bool:
    return all(one[name] == other[name] for name in RowSize._fields)


def _shown(size: Any) -> str:
    if size["reason"]:
        return REASONS[size["reason"]]
    images, patches = counted(int(size["images"]), "image"), counted(int(size["patches"]), "patch", "patches")
    tokens, supervised = counted(int(size["length"]), "token"), counted(int(size["supervised"]), "supervised token")
    return f"{tokens}, {images}, {patches}, {supervised}"
