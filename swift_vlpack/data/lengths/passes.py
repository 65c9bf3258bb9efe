"""The length pass over a share of a source's rows: in processes of its own, remembered as they are measured.

`look_up` finds what is remembered, `measure` gives every other row its size from its header and has some rows encoded
in full beside it, which is how trust in headers is earned, `compare` does so with given rows, and `distrust` starts
over without headers.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from swift_vlpack.core.account.reasons import REASONS, Reason, about
from swift_vlpack.core.errors import DataError, VLPackError
from swift_vlpack.core.shuffle import permutation
from swift_vlpack.core.words import counted
from swift_vlpack.data.lengths import forked, trust
from swift_vlpack.data.lengths.cache import (
    AGREED,
    BY_HEADER,
    DIFFERS,
    IN_FULL,
    KEY,
    NO_KEY,
    SIZE,
    VOUCHED,
    LengthCache,
    Sizes,
)
from swift_vlpack.data.lengths.pass_bar import stage
from swift_vlpack.data.lengths.sizes import LengthIndex, RowSize, size_of
from swift_vlpack.data.lengths.trust import Trust, kinds_of
from swift_vlpack.data.rows.contents import contents_of
from swift_vlpack.data.rows.faults import Fault, timeout_of
from swift_vlpack.data.rows.fusion import Row, RowSource, encode_row, with_system
from swift_vlpack.data.rows.media import image_urls
from swift_vlpack.data.rows.samples import SampleError, SampleId
from swift_vlpack.data.rows.urls import Urls
from swift_vlpack.data.rows.watch import Waits, watched

logger = logging.getLogger(__name__)

NUM_SHOWN = 20
"""Failing rows that the log names; the count has them all."""
SHARE_COMPARED = 1 / 64
"""Of the pixels of all images, so many may be decoded to compare more than the first row of every kind."""
_CHUNK_BY_HEADER, _CHUNK_IN_FULL = 128, 8  # rows, which may hold the bytes of their images
_LEAST_BY_HEADER = 16  # rows of a chunk, where several processes share few rows
_NUM_KEYS_WORTH_A_PROCESS = 2000
_PIXELS_OF_PATCH = 14 * 14
_SAID_BY_HEADERS = (Reason.OVER_MAX_LENGTH, Reason.URL_UNREACHABLE)  # no need to encode in full to know
_NUM_SPARE = 8  # rows of each kind

Positions = NDArray[np.int64]
Task = tuple[str, Positions]
"""A method, and the rows it is for."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the header of a row says beside its size."""

    kinds: tuple[str, ...] = ()
    pixels: int = 0
    """Of all its images, as they are in their files."""
    is_silent: bool = False
    """Whether it says nothing and never will, so that the row had to be encoded in full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became of some rows of the share."""

    positions: Positions
    sizes: Sizes
    is_new: NDArray[np.bool_]
    """Which of them are to be remembered."""
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """What is wrong with rows that cannot be encoded, by index."""
    difference: str | None = None
    """The first row of which headers and full encoding say different things, in words."""
    seen: tuple[Seen, ...] | None = None
    """Of rows that were measured; None of rows that were compared."""


class _Checks:
    """Which rows to encode both ways: the first of every kind, and of others as many as there are pixels to spend."""

    def __init__(self, drawn: Positions, known: Counter[str]) -> None:
        self._drawn = set(drawn.tolist())
        self._first_drawn = int(drawn[0]) if len(drawn) else -1
        self._num_tried = known
        self._num_pixels = self._num_compared = 0
        self._spare: dict[str, list[tuple[int, Seen]]] = {}
        self.kinds: dict[int, tuple[str, ...]] = {}
        """Of the rows that were chosen."""

    def chosen(self, chunk: Chunk) -> list[int]:
        """Those of the rows that were just measured."""
        assert chunk.seen is not None
        self._num_pixels += sum(seen.pixels for seen in chunk.seen)
        is_quick = np.isin(chunk.sizes["proof"], (BY_HEADER, VOUCHED)).tolist()
        rows = zip(chunk.positions.tolist(), chunk.seen, is_quick, strict=True)
        chosen = []
        for position, seen, by_header in rows:
            if not by_header and not (seen.is_silent and position in self._drawn):
                continue
            if self._takes(position, seen):
                chosen.append(position)
            elif by_header:
                self._keep(position, seen)
        return chosen

    def _keep(self, position: int, seen: Seen) -> None:
        """For the case that those which were chosen turn out to be broken."""
        for kind in seen.kinds:
            spare = self._spare.setdefault(kind, [])
            if len(spare) < _NUM_SPARE:
                spare.append((position, seen))

    def _takes(self, position: int, seen: Seen) -> bool:
        least = min((self._num_tried[kind] for kind in seen.kinds), default=trust.NUM_PER_KIND)
        is_wanted = least < trust.NUM_PER_KIND
        is_due = position == self._first_drawn or (is_wanted and least == 0)
        is_paid = self._num_compared + seen.pixels <= SHARE_COMPARED * self._num_pixels
        if not is_due and not (is_paid and (is_wanted or position in self._drawn)):
            return False
        self._num_compared += seen.pixels
        self._num_tried.update(seen.kinds)
        self.kinds[position] = seen.kinds
        return True

    def instead_of(self, position: int) -> list[int]:
        """The row cannot be encoded in full, so another one of each of its kinds has to be, if there is one."""
        kinds = self.kinds.get(position, ())
        self._num_tried.subtract(kinds)
        chosen = []
        for kind in kinds:
            while self._num_tried[kind] < 1 and self._spare.get(kind):
                other, seen = self._spare[kind].pop(0)
                if other not in self.kinds and self._takes(other, seen):
                    chosen.append(other)
        return chosen


class _Waiting:
    """Rows that were measured, till those of them that are compared were found equal: only then they are remembered."""

    def __init__(self) -> None:
        self._entries: list[tuple[list[Chunk], set[int]]] = []

    def measured(self, chunk: Chunk, chosen: list[int]) -> list[Chunk]:
        """A chunk of which some rows are to be compared; what can be remembered now."""
        self._entries.append(([chunk], set(chosen)))
        return self._ready()

    def compared(self, chunk: Chunk, instead: list[int]) -> list[Chunk]:
        """Rows that were found equal, or for which others are compared instead; what can be remembered now."""
        positions = set(chunk.positions.tolist())
        for chunks, missing in self._entries:
            if missing & positions:
                chunks.append(chunk)  # behind what it is of: of two records the later one counts
                missing -= positions
                missing |= set(instead)
        return self._ready()

    def all(self) -> list[Chunk]:
        """Everything that waits."""
        return [chunk for chunks, _ in self._entries for chunk in chunks]

    def _ready(self) -> list[Chunk]:
        ready = [chunk for chunks, missing in self._entries if not missing for chunk in chunks]
        self._entries = [entry for entry in self._entries if entry[1]]
        return ready


class LengthPass:
    """The sizes of some rows of a source, as they become known."""

    def __init__(  # noqa: PLR0913 - what is measured, how, where it is remembered
        self,
        source: RowSource,
        indices: NDArray[np.int64],
        cache: LengthCache,
        *,
        by_header: Any,
        in_full: Any,
        known_kinds: Trust | None = None,
        urls: Urls | None = None,
        num_processes: int = 1,
        strict: bool = False,
        is_shown: bool = True,
    ) -> None:
        """`by_header` and `in_full` are templates; the first one encodes without pixels. Both read from `urls`."""
        self.source = source
        self.indices = indices
        self.sizes = np.zeros(len(indices), SIZE)
        self.faults: dict[int, Fault] = {}
        self._at: Any = None  # the row that this process is at, in the thread that does the work
        self._thread = 0
        self._waiting: dict[int, str] = {}  # rows whose reads were given up
        self._is_known = np.zeros(len(indices), dtype=bool)
        self._keys = np.zeros(len(indices), KEY)
        self._cache = cache
        self._by_header = by_header
        self._in_full = in_full
        self._trust = known_kinds or Trust()
        self._urls = urls
        self._num_processes = num_processes
        self._strict = strict
        self._is_shown = is_shown

    def look_up(self) -> str | None:
        """Take over what is remembered; why headers are not to be trusted, if that is."""
        everything = np.arange(len(self.indices))
        num_processes = min(self._num_processes, -(-len(everything) // _NUM_KEYS_WORTH_A_PROCESS))
        with self._bar("Looking up lengths", len(everything)) as bar:
            for positions, keys in self._done(_tasks("_keys_of", everything, _CHUNK_BY_HEADER), num_processes):
                self._keys[positions] = keys
                bar.update(len(positions))
        known = self._cache.load()
        self._is_known, self.sizes = known.of(self._keys)
        if self._trust.is_revoked:
            self._is_known &= self.sizes["proof"] != VOUCHED
        if self._strict:
            self._is_known &= self.sizes["reason"] == 0  # tried again, to stop the run
        self._recall()
        if known.num_differing:
            return f"they were found to differ at an earlier start, which {self._cache.path} remembers"
        return None

    def draw(self, num_rows: int) -> Positions:
        """Some rows whose sizes are not known yet, always the same ones of them."""
        unknown = np.flatnonzero(~self._is_known)
        return unknown[permutation(len(unknown), "lengths", self.source.name)[:num_rows]]

    def measure(self, num_tried: int = 0) -> str | None:
        """Measure all rows not known yet, and compare some of them; the first difference, if there is one.

        Compared are the first row of every kind that is not trusted yet, and, as far as their pixels are a small share
        of all, the next ones of it and `num_tried` rows drawn by a seed, of which the first one in any case.
        """
        checks = _Checks(self.draw(num_tried), self._trust.remembered())
        unknown = np.flatnonzero(~self._is_known)
        tasks = _tasks("_measured", unknown, self._chunk_size(len(unknown)))
        waiting = _Waiting()
        with self._bar("Lengths", len(unknown)) as bar:
            for chunk in self._done(tasks, min(self._num_processes, len(tasks))):
                self._take(chunk)
                if chunk.difference is not None:
                    self._distrusted(chunk, waiting.all())
                    return chunk.difference
                if chunk.seen is None:
                    instead = self._believe(chunk, checks)
                    tasks.extendleft(self._checking(instead))
                    self._remember(waiting.compared(chunk, instead))
                else:
                    chosen = checks.chosen(chunk) if self._by_header is not None else []
                    tasks.extendleft(self._checking(chosen))
                    self._remember(waiting.measured(chunk, chosen))
                    bar.update(len(chunk.positions))
                    self._show_unreachable(bar)
        return None

    def _show_unreachable(self, bar: tqdm[Any]) -> None:
        num_unreachable = int((self.sizes["reason"] == REASONS.index(Reason.URL_UNREACHABLE)).sum())
        if num_unreachable:
            bar.set_postfix_str(f"{num_unreachable} with URLs that cannot be reached", refresh=False)

    def compare(self, positions: Positions) -> str | None:
        """Encode rows both ways, but for those that were found equal before; the first difference, if there is one."""
        todo = positions[~(self._is_known[positions] & (self.sizes["proof"][positions] >= AGREED))]
        tasks = deque(self._checking(todo.tolist()))
        with self._bar("Checking lengths", len(todo)) as bar:
            for chunk in self._done(tasks, min(self._num_processes, len(tasks))):
                self._take(chunk)
                if chunk.difference is not None:
                    self._distrusted(chunk, [])
                    return chunk.difference
                self._remember([chunk])
                bar.update(len(chunk.positions))
        return None

    def distrust(self) -> None:
        """Forget what headers said, and encode in full from now on."""
        self._by_header = None
        self._is_known &= ~np.isin(self.sizes["proof"], (BY_HEADER, VOUCHED))

    def _chunk_size(self, num_rows: int) -> int:
        if self._by_header is None:
            return _CHUNK_IN_FULL
        share = -(-num_rows // (2 * self._num_processes)) if self._num_processes > 1 else num_rows
        return min(_CHUNK_BY_HEADER, max(_LEAST_BY_HEADER, share))

    def _checking(self, positions: list[int]) -> list[Task]:
        """Tasks that compare these rows: each of its own, where other processes can take them."""
        size = len(positions) if self._num_processes < 2 else 1
        return list(_tasks("_compared", np.array(positions, dtype=np.int64), max(1, size)))

    def _take(self, chunk: Chunk) -> None:
        if chunk.seen is not None:
            vouched = np.array([self._trust.is_remembered(seen.kinds) for seen in chunk.seen], dtype=bool)
            chunk.sizes["proof"][vouched & (chunk.sizes["proof"] == BY_HEADER)] = VOUCHED
        self.sizes[chunk.positions] = chunk.sizes
        self._is_known[chunk.positions] = True
        self.faults |= chunk.faults

    def _believe(self, chunk: Chunk, checks: _Checks) -> list[int]:
        """Trust the kinds of rows that were found equal; other rows to compare in place of broken ones."""
        instead: list[int] = []
        for position, proof in zip(chunk.positions.tolist(), chunk.sizes["proof"].tolist(), strict=True):
            if proof == AGREED:
                self._trust.add(checks.kinds[position])
            else:
                instead += checks.instead_of(position)
        return instead

    def _remember(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._cache.append(self._keys[chunk.positions[chunk.is_new]], chunk.sizes[chunk.is_new])
            self._tell(chunk)
        self._trust.save()

    def _distrusted(self, chunk: Chunk, waiting: list[Chunk]) -> None:
        """Remember that headers differ, and of the rows at hand only those that were encoded in full."""
        self._trust.revoke(str(chunk.difference))
        self._remember([chunk])
        for other in waiting:
            other.is_new[np.isin(other.sizes["proof"], (BY_HEADER, VOUCHED))] = False
        self._remember(waiting)

    def _done(self, tasks: deque[Task], num_processes: int) -> Iterator[Any]:
        return forked.done(self._do, tasks, num_processes)

    def _do(self, task: Task) -> Any:
        """A row that waits for a disk for ever is noted, and the others of its task are done anew without it."""
        while True:
            try:
                return watched(partial(self._begun, task), lambda: self._at)
            except Waits as error:  # noqa: PERF203 - once in a while
                self._waiting[error.where] = str(error)

    def _begun(self, task: Task) -> Any:
        self._at, self._thread = None, threading.get_ident()
        name, positions = task
        return getattr(self, name)(positions)

    def _goes_on(self, position: int) -> bool:
        """Note where this process is; False for a row that is known to wait for ever."""
        if threading.get_ident() != self._thread:
            raise VLPackError("left behind")  # its read came back after all; nobody wants to know
        self._at = position
        return position not in self._waiting

    def _tell(self, chunk: Chunk) -> None:
        """Remember the words with the sizes."""
        new = [at for at in chunk.positions[chunk.is_new].tolist() if int(self.indices[at]) in chunk.faults]
        self._cache.tell(self._keys[new], [chunk.faults[int(self.indices[at])] for at in new])

    def _recall(self) -> None:
        """What was said at an earlier start of the rows that failed then."""
        failed = np.flatnonzero(self._is_known & (self.sizes["reason"] > 0))
        told = self._cache.told() if len(failed) else {}
        for position in failed.tolist():
            if (fault := told.get(self._keys[position].tobytes())) is not None:
                self.faults[int(self.indices[position])] = fault

    def _bar(self, text: str, num_rows: int) -> AbstractContextManager[tqdm[Any]]:
        return stage(f"{text} of {self.source.name}", num_rows, is_shown=self._is_shown)

    def _rows(self, positions: Positions) -> list[Row]:
        rows = rows_at(self.source.rows, self.indices[positions].tolist())
        return [with_system(row, self.source.system) for row in rows]

    def _rows_with_urls(self, positions: Positions, *, whole: bool) -> list[Row]:
        """The rows, and what their images' URLs answer, which is asked for in threads."""
        rows = self._rows(positions)
        if self._urls is not None:
            self._urls.forget()
            self._urls.read((url for row in rows for url in image_urls(row)), whole=whole)
        return rows

    # -- what a process does ------------------------------------------------------------------------------------------

    def _keys_of(self, positions: Positions) -> tuple[Positions, NDArray[np.void]]:
        rows = zip(positions.tolist(), self._rows(positions), strict=True)
        return positions, np.array([self._cache.key(row) if self._goes_on(at) else NO_KEY for at, row in rows], KEY)

    def _measured(self, positions: Positions) -> Chunk:
        """By header where that can be, else in full: an image or video whose header says nothing."""
        sizes, is_new, faults = _new(positions)
        seen = []
        rows = self._rows_with_urls(positions, whole=self._by_header is None)
        for at, (position, row) in enumerate(zip(positions.tolist(), rows, strict=True)):
            size, error, of_header = None, None, Seen()
            if self._by_header is not None:
                size, error, of_header = self._size(self._by_header, row, position, BY_HEADER)
            if size is None or (error is not None and (self._strict or error.reason not in _SAID_BY_HEADERS)):
                is_silent = error is not None and error.is_lasting
                size, error, _ = self._size(self._in_full, row, position, IN_FULL)
                of_header = Seen(is_silent=is_silent and error is None)
            self._note(position, error, faults, is_new, at)
            sizes[at] = size
            seen.append(of_header)
        return Chunk(positions, sizes, is_new, faults, seen=tuple(seen))

    def _compared(self, positions: Positions) -> Chunk:
        """A row whose header is good and whose pixels are not is no difference: it is left out with its pack."""
        sizes, is_new, faults = _new(positions)
        rows = self._rows_with_urls(positions, whole=True)
        for at, (position, row) in enumerate(zip(positions.tolist(), rows, strict=True)):
            full, error, _ = self._size(self._in_full, row, position, IN_FULL)
            quick, quick_error, _ = self._size(self._by_header, row, position, AGREED)
            if quick_error is not None and not quick_error.is_lasting:
                quick, quick_error = full, error
            elif error is not None and quick_error is None and about(error.reason).is_of_pixels:
                quick["proof"] = BY_HEADER
            elif not _are_equal(quick, full):
                full["proof"] = DIFFERS
                self._note(position, error, faults, is_new, at)
                sizes[at] = full
                said = quick_error.detail if quick_error is not None else _shown(quick)
                name = self.source.sample_id(int(self.indices[position]))
                compared = slice(at + 1)
                difference = f"{name} has {_shown(full)}, from its header {said}"
                return Chunk(positions[compared], sizes[compared], is_new[compared], faults, difference)
            self._note(position, quick_error, faults, is_new, at)
            sizes[at] = quick
        return Chunk(positions, sizes, is_new, faults)

    def _size(self, template: Any, row: Row, position: int, proof: int) -> tuple[Any, SampleError | None, Seen]:
        size = np.zeros((), SIZE)
        size["proof"] = proof
        sample_id = self.source.sample_id(int(self.indices[position]))
        is_strict = self._strict and proof == IN_FULL
        try:
            if not self._goes_on(position):
                raise self._timeout(row, sample_id, is_strict)
            encoded = encode_row(template, row, sample_id, strict=is_strict, is_watched=True)
        except SampleError as error:
            size["reason"] = REASONS.index(error.reason)
            return size, error, Seen()
        for name, number in size_of(encoded)._asdict().items():
            size[name] = number
        size["aspect"] = contents_of(encoded).aspect
        kinds = kinds_of(row, int(size["length"]), encoded.get("header_kinds", ()))
        # Of a video only the frames that are sampled are counted, as they are resized; all of it is decoded.
        pixels = max(encoded.get("header_pixels", 0), int(size["patches"]) * _PIXELS_OF_PATCH)
        return size, None, Seen(kinds, pixels)

    def _timeout(self, row: Row, sample_id: SampleId, is_strict: bool) -> VLPackError:
        fault = timeout_of(self._waiting[self._at], row)
        if is_strict:
            return DataError(f"{sample_id}: {fault.reason}: {fault.error}")
        return SampleError(sample_id, fault.reason, fault.error, False, fault.files)

    def _note(
        self, position: int, error: SampleError | None, faults: dict[int, Fault], is_new: NDArray[np.bool_], at: int
    ) -> None:
        if error is not None:
            faults[int(self.indices[position])] = error.fault
            is_new[at] = error.is_lasting


def _new(positions: Positions) -> tuple[Sizes, NDArray[np.bool_], dict[int, Fault]]:
    return np.zeros(len(positions), SIZE), np.ones(len(positions), dtype=bool), {}


def _tasks(name: str, positions: Positions, size: int) -> deque[Task]:
    return deque((name, positions[start : start + size]) for start in range(0, len(positions), size))


def rows_at(rows: Any, indices: list[int]) -> list[Row]:
    """Rows by index; at once where the data set can."""
    if not hasattr(rows, "column_names"):
        return [rows[index] for index in indices]
    columns = rows[indices]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def row_sizes(sizes: Sizes, faults: Mapping[int, Fault] | None = None) -> LengthIndex:
    """As the plan wants them, with what was said of those that have none."""
    columns = np.stack([sizes[name].astype(np.int64) for name in RowSize._fields])
    failures = {int(at): REASONS[sizes["reason"][at]] for at in np.flatnonzero(sizes["reason"])}
    said = {at: fault for at, fault in (faults or {}).items() if failures.get(at) == fault.reason}
    return LengthIndex(columns, failures, said)


def log_failures(source: RowSource, sizes: LengthIndex) -> None:
    """Name the first rows that cannot be encoded, and count all by reason."""
    if not sizes.failures:
        return
    for index in sorted(sizes.failures)[:NUM_SHOWN]:
        fault = sizes.fault(index)
        logger.warning("%s: left out: %s: %s", source.sample_id(index), fault.reason, fault.error)
    counts = Counter(sizes.failures.values())
    logger.warning(
        "source %s: %d of %d rows cannot be encoded: %s",
        source.name, len(sizes.failures), len(sizes), ", ".join(f"{reason} {num}" for reason, num in counts.items()),
    )  # fmt: skip


def _are_equal(one: Any, other: Any) -> bool:
    return all(one[name] == other[name] for name in RowSize._fields)


def _shown(size: Any) -> str:
    if size["reason"]:
        return REASONS[size["reason"]]
    images, patches = counted(int(size["images"]), "image"), counted(int(size["patches"]), "patch", "patches")
    tokens, supervised = counted(int(size["length"]), "token"), counted(int(size["supervised"]), "supervised token")
    return f"{tokens}, {images}, {patches}, {supervised}"
