"""The length pass over one source: chunks of rows, in processes of their own, remembered as they are measured.

`Measurer.measure` gives the sizes of rows, from memory where they are known; `Measurer.compare` encodes rows both by
header and in full, which is how trust in headers is earned. `in_chunks` runs either over many rows.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from swift_vlpack.data.fusion import Row, RowSource, encode_row, with_system
from swift_vlpack.data.length_cache import AGREED, BY_HEADER, IN_FULL, NO_KEY, SIZE, KnownSizes, LengthCache, Sizes
from swift_vlpack.data.lengths import RowSizes, aspect_of, size_of
from swift_vlpack.data.reasons import REASONS
from swift_vlpack.data.samples import SampleError

logger = logging.getLogger(__name__)

NUM_SHOWN = 20
"""Failing rows that the log names; the count has them all."""
_CHUNK_BY_HEADER, _CHUNK_IN_FULL = 128, 8
_SECONDS_BETWEEN_LOOKS = 2.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became of some rows."""

    indices: NDArray[np.int64]
    sizes: Sizes
    keys: NDArray[np.void]
    is_new: NDArray[np.bool_]
    """Which of them were not in memory."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Rows that cannot be encoded, in words; only those that were tried now."""
    difference: str | None = None
    """The first row of which headers and full encoding say different things, in words."""


@dataclass(frozen=True)
class Measurer:
    """All that a process needs to measure rows of a source."""

    source: RowSource
    by_header: Any
    """Encodes rows without pixels; None where that cannot be."""
    in_full: Any
    cache: LengthCache
    known: KnownSizes
    strict: bool = False

    def measure(self, indices: NDArray[np.int64]) -> Chunk:
        """The sizes of rows: from memory, else by header, or in full where there is nothing else."""
        rows, keys = self._rows(indices)
        is_known, sizes = self.known.of(keys)
        if self.by_header is None:
            is_known &= sizes["proof"] != BY_HEADER
        if self.strict:
            is_known &= sizes["reason"] == 0  # tried again, to stop the run
        failures = []
        for at in np.flatnonzero(~is_known).tolist():
            quick = self.by_header if self.by_header is not None and not rows[at].get("videos") else None
            sizes[at], error = self._size(quick or self.in_full, rows[at], int(indices[at]))
            sizes[at]["proof"] = IN_FULL if quick is None else BY_HEADER
            if error is not None:
                failures.append((int(indices[at]), f"{error.reason}: {error.detail}"))
                keys[at] = keys[at] if error.is_lasting else NO_KEY
        return Chunk(indices, sizes, keys, ~is_known, failures)

    def compare(self, indices: NDArray[np.int64]) -> Chunk:
        """Encode rows both ways, but for those of which it is known that both agree.

        A row whose header is good and whose pixels are not is no difference: it is left out when its pack is loaded.
        """
        rows, keys = self._rows(indices)
        is_known, sizes = self.known.of(keys)
        is_known &= (sizes["proof"] == AGREED) & ~(self.strict & (sizes["reason"] > 0))
        for at in np.flatnonzero(~is_known).tolist():
            if rows[at].get("videos"):
                is_known[at] = True  # measured in full anyway
                continue
            sizes[at], quick_error = self._size(self.by_header, rows[at], int(indices[at]))
            full, full_error = self._size(self.in_full, rows[at], int(indices[at]))
            if not (full_error and not quick_error) and not _are_equal(sizes[at], full):
                quick = f"{quick_error.reason}: {quick_error.detail}" if quick_error else _shown(sizes[at])
                said = f"{self.source.sample_id(int(indices[at]))}: {quick} by header, {_shown(full)} in full"
                return Chunk(indices, sizes, keys, np.zeros(len(indices), bool), [], said)
            sizes[at]["proof"] = AGREED
            if quick_error is not None and not quick_error.is_lasting:
                keys[at] = NO_KEY
        return Chunk(indices, sizes, keys, ~is_known)

    def _rows(self, indices: NDArray[np.int64]) -> tuple[list[Row], NDArray[np.void]]:
        rows = [with_system(row, self.source.system) for row in rows_at(self.source.rows, indices.tolist())]
        return rows, self.cache.keys(rows)

    def _size(self, template: Any, row: Row, index: int) -> tuple[Any, SampleError | None]:
        size = np.zeros((), SIZE)
        try:
            encoded = encode_row(template, row, self.source.sample_id(index), strict=self.strict)
        except SampleError as error:
            size["reason"] = REASONS.index(error.reason)
            return size, error
        size["length"], size["images"], size["patches"] = size_of(encoded)
        size["aspect"] = aspect_of(encoded)
        return size, None


def in_chunks(
    work: Callable[[NDArray[np.int64]], Chunk], indices: NDArray[np.int64], num_processes: int, bar: tqdm[Any]
) -> Iterator[Chunk]:
    """Run a method of a `Measurer` over many rows; what is new is remembered chunk by chunk."""
    measurer: Measurer = work.__self__  # type: ignore[attr-defined]
    is_slow = measurer.by_header is None or work == measurer.compare
    size = _CHUNK_IN_FULL if is_slow else _CHUNK_BY_HEADER
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    for chunk in (
        map(work, chunks) if num_processes < 2 or len(chunks) < 2 else _in_processes(work, chunks, num_processes)
    ):
        measurer.cache.append(chunk.keys[chunk.is_new], chunk.sizes[chunk.is_new])
        bar.update(len(chunk.indices))
        yield chunk


def _in_processes(
    work: Callable[[NDArray[np.int64]], Chunk], chunks: Sequence[NDArray[np.int64]], num_processes: int
) -> Iterator[Chunk]:
    """Fork: rows, template and what is known are there at once, and nothing of it has to be pickled."""
    global _work
    _work = work
    executor = ProcessPoolExecutor(
        min(num_processes, len(chunks)),
        multiprocessing.get_context("fork"),
        initializer=_start,
        initargs=(os.getpid(),),
    )
    try:
        yield from executor.map(_do, chunks)
    finally:
        executor.shutdown(cancel_futures=True)
        _work = None


_work: Callable[[NDArray[np.int64]], Chunk] | None = None  # of this process, inherited by those it forks


def _do(indices: NDArray[np.int64]) -> Chunk:
    assert _work is not None
    return _work(indices)


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


def row_sizes(sizes: Sizes) -> RowSizes:
    """As the plan wants them."""
    columns = np.stack([sizes[name].astype(np.int64) for name in ("length", "images", "patches")])
    return RowSizes(columns, {int(at): REASONS[sizes["reason"][at]] for at in np.flatnonzero(sizes["reason"])})


def log_failures(source: RowSource, failures: Sequence[tuple[int, str]]) -> None:
    """Name the first rows that cannot be encoded, count all."""
    for index, detail in failures[:NUM_SHOWN]:
        logger.warning("%s: left out: %s", source.sample_id(index), detail)
    if len(failures) > NUM_SHOWN:
        logger.warning("source %s: %d rows cannot be encoded, %d of them named", source.name, len(failures), NUM_SHOWN)


def _are_equal(one: Any, other: Any) -> bool:
    return all(one[name] == other[name] for name in ("length", "images", "patches"))


def _shown(size: Any) -> str:
    if size["reason"]:
        return REASONS[size["reason"]]
    return f"{size['length']} tokens, {size['images']} images, {size['patches']} patches"
