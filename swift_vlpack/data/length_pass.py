"""The length pass over a share of a source's rows: in processes of its own, remembered as they are measured.

`look_up` finds what is remembered, `draw` and `compare` encode rows both by header and in full, which is how trust in
headers is earned, `measure` gives every other row its size, and `distrust` starts over without headers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from swift_vlpack.core.errors import VLPackError
from swift_vlpack.core.shuffle import permutation
from swift_vlpack.core.words import counted
from swift_vlpack.data.fusion import Row, RowSource, encode_row, with_system
from swift_vlpack.data.length_cache import AGREED, BY_HEADER, DIFFERS, IN_FULL, KEY, SIZE, LengthCache, Sizes
from swift_vlpack.data.lengths import LengthIndex, RowSize, aspect_of, size_of
from swift_vlpack.data.reasons import REASONS, is_of_pixels, media_paths
from swift_vlpack.data.samples import SampleError

logger = logging.getLogger(__name__)

NUM_SHOWN = 20
"""Failing rows that the log names; the count has them all."""
_CHUNK_BY_HEADER, _CHUNK_IN_FULL = 128, 8  # rows, which may hold the bytes of their images
_NUM_AHEAD = 4  # chunks a process has waiting
_SECONDS_BETWEEN_LOOKS = 2.0

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became of some rows of the share."""

    positions: Positions
    sizes: Sizes
    is_new: NDArray[np.bool_]
    """Which of them are to be remembered."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Rows that cannot be encoded, by index, in words."""
    difference: str | None = None
    """The first row of which headers and full encoding say different things, in words."""


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
        num_processes: int = 1,
        strict: bool = False,
        is_shown: bool = True,
    ) -> None:
        """`by_header` and `in_full` are templates; the first one encodes without pixels."""
        self.source = source
        self.indices = indices
        self.sizes = np.zeros(len(indices), SIZE)
        self.failures: dict[int, str] = {}
        self._is_known = np.zeros(len(indices), dtype=bool)
        self._keys = np.zeros(len(indices), KEY)
        self._cache = cache
        self._by_header = by_header
        self._in_full = in_full
        self._num_processes = num_processes
        self._strict = strict
        self._is_shown = is_shown

    def look_up(self) -> str | None:
        """Take over what is remembered; why headers are not to be trusted, if that is."""
        with self._bar("Looking up lengths", len(self.indices)) as bar:
            for positions, keys in self._in_chunks(self._keys_of, np.arange(len(self.indices)), _CHUNK_BY_HEADER, bar):
                self._keys[positions] = keys
        known = self._cache.load()
        self._is_known, self.sizes = known.of(self._keys)
        if self._strict:
            self._is_known &= self.sizes["reason"] == 0  # tried again, to stop the run
        if known.num_differing:
            return f"they were found to differ at an earlier start, which {self._cache.path} remembers"
        return None

    def draw(self, num_rows: int) -> Positions:
        """Some rows whose sizes are not known yet, always the same ones of them."""
        unknown = np.flatnonzero(~self._is_known)
        return unknown[permutation(len(unknown), "lengths", self.source.name)[:num_rows]]

    def compare(self, positions: Positions) -> str | None:
        """Encode rows both ways, but for those that were found equal before; the first difference, if there is one."""
        todo = positions[~(self._is_known[positions] & (self.sizes["proof"][positions] >= AGREED))]
        return self._run(self._compared, todo, _CHUNK_IN_FULL, "Checking lengths")

    def measure(self) -> Sizes:
        """The sizes of all rows of the share."""
        size = _CHUNK_IN_FULL if self._by_header is None else _CHUNK_BY_HEADER
        self._run(self._measured, np.flatnonzero(~self._is_known), size, "Lengths")
        return self.sizes

    def distrust(self) -> None:
        """Forget what headers said, and encode in full from now on."""
        self._by_header = None
        self._is_known &= self.sizes["proof"] != BY_HEADER

    def _run(self, work: Callable[[Positions], Chunk], positions: Positions, size: int, text: str) -> str | None:
        with self._bar(text, len(positions)) as bar:
            for chunk in self._in_chunks(work, positions, size, bar):
                self._cache.append(self._keys[chunk.positions[chunk.is_new]], chunk.sizes[chunk.is_new])
                self.sizes[chunk.positions] = chunk.sizes
                self._is_known[chunk.positions] = True
                self.failures |= chunk.failures
                if chunk.difference is not None:
                    return chunk.difference
        return None

    def _in_chunks(
        self, work: Callable[[Positions], Any], positions: Positions, size: int, bar: tqdm[Any]
    ) -> Iterator[Any]:
        chunks = [positions[start : start + size] for start in range(0, len(positions), size)]
        num_processes = min(self._num_processes, len(chunks))
        for done in map(work, chunks) if num_processes < 2 else _in_processes(work, iter(chunks), num_processes):
            yield done
            bar.update(min(size, bar.total - bar.n))

    def _bar(self, text: str, num_rows: int) -> tqdm[Any]:
        text = f"{text} of {self.source.name}"
        return tqdm(
            desc=text, total=num_rows, unit="row", dynamic_ncols=True, disable=not (self._is_shown and num_rows)
        )

    def _rows(self, positions: Positions) -> list[Row]:
        rows = rows_at(self.source.rows, self.indices[positions].tolist())
        return [with_system(row, self.source.system) for row in rows]

    # -- what a process does ------------------------------------------------------------------------------------------

    def _keys_of(self, positions: Positions) -> tuple[Positions, NDArray[np.void]]:
        return positions, self._cache.keys(self._rows(positions))

    def _measured(self, positions: Positions) -> Chunk:
        """By header where that can be, else in full: an image or video whose header says nothing."""
        sizes, is_new, failures = _new(positions)
        for at, (position, row) in enumerate(zip(positions.tolist(), self._rows(positions), strict=True)):
            size, error = None, None
            if self._by_header is not None:
                size, error = self._size(self._by_header, row, position, BY_HEADER)
            if size is None or (error is not None and error.reason != "over_max_length"):
                size, error = self._size(self._in_full, row, position, IN_FULL)
            self._note(position, error, failures, is_new, at)
            sizes[at] = size
        return Chunk(positions, sizes, is_new, failures)

    def _compared(self, positions: Positions) -> Chunk:
        """A row whose header is good and whose pixels are not is no difference: it is left out with its pack."""
        sizes, is_new, failures = _new(positions)
        for at, (position, row) in enumerate(zip(positions.tolist(), self._rows(positions), strict=True)):
            full, error = self._size(self._in_full, row, position, IN_FULL)
            quick, quick_error = self._size(self._by_header, row, position, AGREED)
            if quick_error is not None and not quick_error.is_lasting:
                quick, quick_error = full, error
            elif error is not None and quick_error is None and is_of_pixels(error.reason):
                quick["proof"] = BY_HEADER
            elif not _are_equal(quick, full):
                full["proof"] = DIFFERS
                self._note(position, error, failures, is_new, at)
                sizes[at] = full
                said = quick_error.detail if quick_error is not None else _shown(quick)
                name = self.source.sample_id(int(self.indices[position]))
                seen = slice(at + 1)
                difference = f"{name} has {_shown(full)}, from its header {said}"
                return Chunk(positions[seen], sizes[seen], is_new[seen], failures, difference)
            self._note(position, quick_error, failures, is_new, at)
            sizes[at] = quick
        return Chunk(positions, sizes, is_new, failures)

    def _size(self, template: Any, row: Row, position: int, proof: int) -> tuple[Any, SampleError | None]:
        size = np.zeros((), SIZE)
        size["proof"] = proof
        sample_id = self.source.sample_id(int(self.indices[position]))
        try:
            encoded = encode_row(template, row, sample_id, strict=self._strict)
        except SampleError as error:
            size["reason"] = REASONS.index(error.reason)
            return size, error
        for name, number in size_of(encoded)._asdict().items():
            size[name] = number
        size["aspect"] = aspect_of(encoded)
        return size, None

    def _note(
        self, position: int, error: SampleError | None, failures: dict[int, str], is_new: NDArray[np.bool_], at: int
    ) -> None:
        if error is not None:
            failures[int(self.indices[position])] = error.detail
            is_new[at] = error.is_lasting


def _new(positions: Positions) -> tuple[Sizes, NDArray[np.bool_], dict[int, str]]:
    return np.zeros(len(positions), SIZE), np.ones(len(positions), dtype=bool), {}


def _in_processes(work: Callable[[Positions], Any], chunks: Iterator[Positions], num_processes: int) -> Iterator[Any]:
    """Fork: rows, template and what is known are there at once, and nothing of it has to be pickled."""
    global _work
    _work = work
    executor = ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("fork"), initializer=_start, initargs=(os.getpid(),)
    )
    waiting: deque[Future[Any]] = deque()
    try:
        for chunk in chunks:
            waiting.append(executor.submit(_do, chunk))
            if len(waiting) > _NUM_AHEAD * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise VLPackError(
            "a process of the length pass was killed, perhaps for want of memory. What was measured is remembered: "
            "start again, with a lower dataset_num_proc if it happens again"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
        _work = None


_work: Callable[[Positions], Any] | None = None  # of this process, inherited by those it forks


def _do(positions: Positions) -> Any:
    assert _work is not None
    return _work(positions)


def _start(parent: int) -> None:
    """One thread a process; and an end when the process that forked this one has been killed."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def rows_at(rows: Any, indices: list[int]) -> list[Row]:
    """Rows by index; at once where the data set can."""
    if not hasattr(rows, "column_names"):
        return [rows[index] for index in indices]
    columns = rows[indices]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def row_sizes(sizes: Sizes) -> LengthIndex:
    """As the plan wants them."""
    columns = np.stack([sizes[name].astype(np.int64) for name in RowSize._fields])
    return LengthIndex(columns, {int(at): REASONS[sizes["reason"][at]] for at in np.flatnonzero(sizes["reason"])})


def log_failures(source: RowSource, sizes: LengthIndex, details: Mapping[int, str]) -> None:
    """Name the first rows that cannot be encoded, with `details` where they were tried now, and count all by reason."""
    if not sizes.failures:
        return
    for index in sorted(sizes.failures)[:NUM_SHOWN]:
        said = details.get(index) or f"remembered (files: {', '.join(media_paths(source.rows[index])) or '-'})"
        logger.warning("%s: left out: %s: %s", source.sample_id(index), sizes.failures[index], said)
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
