"""Measure every row of a source: from the cache, from image headers if these prove right, else by encoding it in full.

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> from types import SimpleNamespace
>>> from swift_vlpack.lengths.cache import LengthCache
>>> from swift_vlpack.rows.encoder import RowEncoder
>>> template = SimpleNamespace(encode=lambda row, return_length: {"input_ids": row["caption"].split()})
>>> encoder = RowEncoder(template)  # for ms-swift, `host/length_pass.py` makes two: one reads headers, one decodes
>>> source = RowSource(name="captions", rows=[{"caption": "a cat on a mat"}, {"caption": "a dog"}])
>>> with TemporaryDirectory() as folder:
...     cache = LengthCache(Path(folder, "captions.lengths"), context="settings")
...     measure(source, cache, Encoders(by_header=encoder, in_full=encoder)).lengths.tolist()
[5, 2]

*What is believed was checked*: a row was encoded in full, or its size came from its header while every comparison of
its source agreed. Four steps see to it, and `measure` does them in this order, on all ranks at once:

1. *Look up.* A size is remembered under one key: the row, the state of its files, and all settings that it depends on
   (`cache.py`, `context.py`). So a change that the key sees is a row without a size.
2. *Look again.* Of each source, a few remembered rows are measured once more. If one has another size now, something
   changed that the key does not see: all that is remembered of the source is dropped, with a warning.
3. *Measure and compare.* To decode all images takes hours, to read a header takes a millisecond. So rows without a size
   are measured by their headers; some of every kind and drawn ones are encoded in full as well (`trust.py`), and at
   last those at both ends in size.
4. *Believe or encode.* If all of these agree, the sizes from headers are saved as checked. After a single difference,
   every row of the source is encoded in full, now and at later starts, and each of these starts says so.

A kill loses little: sizes from headers are also saved as they come, as *unchecked*. The next start takes them as its
own, which means that it compares some of them before it believes any. And should a row be unlike all that were
compared, its true length decides when its pack is loaded (`feed/reader.py`).

Each rank measures its share of the rows (`rank_rows.py`) in several processes (`rows_work.py`, `forked.py`), and all
ranks get the same sizes (`measured_sizes.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from tqdm import tqdm

from swift_vlpack.comm import ALONE, Comm
from swift_vlpack.lengths import forked
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.length_file import BY_HEADER, Sizes, has_media
from swift_vlpack.lengths.measured_sizes import Findings, MeasuredSizes, joined
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.lengths.rows_work import SEEN_IN_HEADERS, Encoders, RowsWork, Task, TaskKind, are_equal, in_words
from swift_vlpack.lengths.trust import Checks, extremes, num_to_draw, without_headers
from swift_vlpack.plan.parts import CutRows
from swift_vlpack.reasons import REASONS, Reason
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.watch import restore_limit

logger = logging.getLogger(__name__)

_CHUNK_BY_HEADER = 128
"""Most rows of a task, because a task may hold the bytes of its images. A row takes 0.3 to 0.8 ms by its header, so
results come at least every tenth of a second."""
_CHUNK_IN_FULL = 8
"""Rows of a task that are encoded in full. An image takes 10 ms and more, so larger tasks would lose more work when the
run is killed, and leave processes idle at the end."""
_NUM_KEYS_WORTH_A_PROCESS = 2000
"""Number of rows for which one more process is started to compute their keys. A key takes 0.02 ms for a text and 0.03
to 0.05 ms for an image; to start and end a process takes about 50 ms."""


def measure(
    source: RowSource,
    cache: LengthCache,
    encoders: Encoders,
    comm: Comm = ALONE,
    progress: Progress | None = None,
) -> LengthIndex:
    """Return the size of every row of a source, or the reason why it cannot be encoded.

    All ranks call this function and get the same result. Without `progress`, no bar is shown.
    """
    mine = _RankPass(source, cache, encoders, comm, progress)
    difference = _first(comm.results_of_all(mine.look_up))
    is_trusted = difference is None
    if (change := _first(comm.results_of_all(lambda: mine.look_again(is_trusted=is_trusted)))) is not None:
        if comm.rank == 0:
            logger.warning(
                "source %s: remembered lengths are wrong, so all of its rows are measured again: %s",
                source.name,
                change,
            )
        comm.results_of_all(mine.sizes.forget)
        difference = None
    if difference is None:
        num_drawn, num_decoded = num_to_draw(len(source.rows), comm.num_ranks)
        difference = _first(comm.results_of_all(lambda: mine.measure(num_drawn, num_decoded)))
    if difference is None:
        sizes = joined(comm.results_of_all(lambda: mine.sizes.sizes))
        # Find these rows in the whole source, not in each rank's share, and compare those of this rank.
        ends, silent = extremes(sizes), without_headers(sizes)
        difference = _first(comm.results_of_all(lambda: mine.compare(ends, silent)))
    if difference is None:
        comm.results_of_all(mine.sizes.believe_headers)
    else:
        if comm.rank == 0:
            logger.warning(
                "source %s: lengths are not taken from image headers, every row is encoded: %s", source.name, difference
            )
        mine.distrust_headers()
        comm.results_of_all(mine.measure)
    comm.results_of_all(mine.sizes.forget_unchecked)
    sizes = joined(comm.results_of_all(lambda: mine.sizes.sizes))
    findings = comm.results_of_all(mine.sizes.findings)
    return _index_of(sizes, findings, difference, is_cut=encoders.in_full.divider is not None)


class _RankPass:
    """Do the steps for one rank's rows: `look_up`, `look_again`, `measure`, `compare`.

    Each returns the first difference that it finds, in words; None if there is none.
    """

    def __init__(
        self, source: RowSource, cache: LengthCache, encoders: Encoders, comm: Comm, progress: Progress | None
    ) -> None:
        rows = RankRows.of(source, comm)
        self.sizes = MeasuredSizes(rows, cache)
        self._rows = rows
        self._name = source.name
        self._work = RowsWork(rows, cache, encoders)
        self._progress = progress or Progress()
        self._changed = np.zeros(0, np.int64)  # rows whose remembered size was wrong

    @property
    def _encoders(self) -> Encoders:
        return self._work.encoders

    def look_up(self) -> str | None:
        """Compute the keys of all rows, and look up what the cache has for them."""
        everything = np.arange(len(self._rows))
        tasks = _tasks(TaskKind.KEYS, everything, _CHUNK_BY_HEADER)
        with self._bar("Looking up lengths", len(self._rows)) as bar:
            for chunk in self._results(tasks, _worth(len(everything), _NUM_KEYS_WORTH_A_PROCESS)):
                self.sizes.take_keys(chunk)
                bar.update(len(chunk.positions))
        differs = self.sizes.look_up(is_strict=self._encoders.is_strict, divider=self._encoders.in_full.divider)
        if differs or self._encoders.by_header is None:
            self.sizes.forget_headers()
        return "an earlier start found that they differ, as its file of lengths records" if differs else None

    def look_again(self, *, is_trusted: bool) -> str | None:
        """Measure a few remembered rows, some in full and, if headers of the source are trusted, some by these."""
        in_full, by_header = self.sizes.to_look_at_again()
        if not is_trusted or self._encoders.by_header is None:
            in_full, by_header = np.union1d(in_full, by_header), by_header[:0]
        found = self._measured_again(in_full, by_header)
        changed = {at: now for at, now in found.items() if not are_equal(self.sizes.sizes[at], now)}
        # Measure these once more: a row that has another size each time (its template draws) tells of no change.
        some = np.array(list(changed), np.int64)
        once_more = self._measured_again(np.intersect1d(in_full, some), np.intersect1d(by_header, some))
        self._changed = np.array([at for at, now in once_more.items() if are_equal(changed[at], now)], np.int64)
        if not len(self._changed):
            return None
        first = int(self._changed[0])
        now, known = in_words(changed[first]), in_words(self.sizes.sizes[first])
        return f"{self._rows.sample_id(first)} has {now}, remembered are {known}"

    def _measured_again(self, in_full: Positions, by_header: Positions) -> dict[int, Any]:
        """Return the sizes of rows, without rows that may be encoded at another time."""
        found = {}
        tasks = _tasks(TaskKind.AGAIN, in_full, 1) + _tasks(TaskKind.MEASURE, by_header, 1)
        for chunk in self._results(tasks):
            [position], [size], [is_lasting] = chunk.positions.tolist(), chunk.sizes, chunk.is_saved
            if is_lasting and REASONS[size["reason"]] in ("", *SEEN_IN_HEADERS):
                found[position] = size
        return found

    def measure(self, num_drawn: int = 0, num_decoded: int = 0) -> str | None:
        """Measure all rows that the cache does not have, and compare some as the pass goes on.

        Of the drawn rows with media only the first `num_decoded` are compared.
        """
        unknown, in_turn = self.sizes.to_measure(), self.sizes.drawn(num_drawn)
        # Headers may have been wrong where a remembered size was.
        drawn, decoded = (np.union1d(some, self._changed) for some in (in_turn, in_turn[:num_decoded]))
        if self._encoders.by_header is None:
            drawn = decoded = drawn[:0]  # every row is encoded in full
        checks = Checks(drawn, decoded)
        # Drawn rows that a killed start has measured come first.
        unchecked = self.sizes.unchecked(drawn)
        is_cheap = ~has_media(self.sizes.sizes[unchecked])
        tasks = self._comparing(unchecked[is_cheap | np.isin(unchecked, decoded)].tolist())
        size = _CHUNK_IN_FULL if self._encoders.by_header is None else _CHUNK_BY_HEADER
        tasks += _tasks(TaskKind.MEASURE, unknown, size)
        with self._bar("Lengths", len(unknown)) as bar:
            for chunk in self._results(tasks):
                self.sizes.take(chunk)
                if chunk.difference is not None:
                    return str(chunk.difference)
                if chunk.kinds is None:
                    checks.take(chunk)
                else:
                    tasks.extendleft(self._comparing(checks.choose(chunk)))
                    bar.update(len(chunk.positions))
                    _show_unreachable(bar, self.sizes.num_failed(Reason.URL_UNREACHABLE))
                for positions in checks.done():
                    self.sizes.save_unchecked(positions)
        return None

    def compare(self, ends: Positions, silent: Positions) -> str | None:
        """Encode rows both ways: extremes that were not compared before, and one of which the header gave no size.

        Both are indices in the source.
        """
        if self._encoders.by_header is None:
            return None
        here, of_ends = (np.flatnonzero(np.isin(self._rows.indices, some)) for some in (silent, ends))
        todo = np.union1d(self.sizes.unproven(of_ends), here)
        with self._bar("Checking lengths", len(todo)) as bar:
            for chunk in self._results(self._comparing(todo.tolist())):
                self.sizes.take(chunk)
                if chunk.difference is not None:
                    return str(chunk.difference)
                bar.update(len(chunk.positions))
        return None

    def distrust_headers(self) -> None:
        """Drop the sizes that came from headers, and encode every row in full from now on."""
        self.sizes.forget_headers()
        self._work.distrust_headers()

    def _results(self, tasks: deque[Task], num_processes: int | None = None) -> Iterator[Any]:
        """Yield the results of tasks, also of those that the caller adds meanwhile.

        Rows that could not be read in time are read once more at the end.
        """
        most = self._encoders.num_processes
        most = most if num_processes is None else min(num_processes, most)
        for is_first in (True, False):
            late: deque[Task] = deque()
            for chunk in forked.results(self._work, tasks, min(most, len(tasks))):
                found = _not_in_time(chunk) if isinstance(chunk, Chunk) else None
                if found and is_first:
                    late += found
                elif not (found or is_first):
                    restore_limit()
                yield chunk
            tasks += late
            self._work.read_again()

    def _comparing(self, positions: list[int]) -> deque[Task]:
        """Make tasks that compare rows: one task per row if several processes can share them, otherwise one task."""
        size = len(positions) if self._encoders.num_processes < 2 else 1
        return _tasks(TaskKind.COMPARE, np.array(positions, dtype=np.int64), max(1, size))

    def _bar(self, text: str, num_rows: int) -> AbstractContextManager[tqdm[Any]]:
        return self._progress.stage(f"{text} of {self._name}", num_rows)


def _tasks(kind: TaskKind, positions: Positions, size: int) -> deque[Task]:
    return deque(Task(kind, positions[start : start + size]) for start in range(0, len(positions), size))


def _not_in_time(chunk: Chunk) -> deque[Task]:
    """Return the tasks to do once more, a row each."""
    kind = TaskKind.COMPARE if chunk.kinds is None else TaskKind.MEASURE
    return _tasks(kind, chunk.positions[chunk.sizes["reason"] == REASONS.index(Reason.FILE_TIMEOUT)], 1)


def _worth(amount: int, of_a_process: int) -> int:
    """Return how many processes to use for an amount of work, one for each `of_a_process`."""
    return max(1, -(-amount // of_a_process))


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def _index_of(sizes: Sizes, findings: list[Findings], without_headers: str | None, *, is_cut: bool) -> LengthIndex:
    """Join the results of all ranks into the `LengthIndex` that plans are made from."""
    failures = {int(at): REASONS[sizes["reason"][at]] for at in np.flatnonzero(sizes["reason"])}
    faults = {at: fault for of_rank in findings for at, fault in of_rank.faults.items()}
    parts = {at: of_row for of_rank in findings for at, of_row in of_rank.parts.items()}
    surplus_tags = {at for of_rank in findings for at in of_rank.with_surplus_tags}
    return LengthIndex(
        columns=np.stack([sizes[name].astype(np.int64) for name in RowSize._fields]),
        failures=failures,
        # Skip outdated faults: a row that failed when it was measured may have passed, or failed in another way, when
        # it was compared.
        faults={at: fault for at, fault in faults.items() if failures.get(at) == fault.reason},
        without_headers=without_headers,
        num_remembered=sum(of_rank.num_remembered for of_rank in findings),
        surplus_tags=sorted(surplus_tags - set(failures)),
        is_from_header=(sizes["length"] > 0) & (sizes["proof"] == BY_HEADER),
        cut=CutRows.of(parts) if is_cut else None,
    )


# -- progress ---------------------------------------------------------------------------------------------------------


class Progress:
    """Show one progress bar while several sources are measured. A row counts once for each stage.

    >>> with Progress(100) as progress, progress.stage("Lengths of captions", 100) as bar:  # shown if `is_shown`
    ...     _ = bar.update(100)
    """

    def __init__(self, num_rows: int = 0, *, is_shown: bool = False) -> None:
        """Begin the bar. `num_rows` is the number of rows of all sources that this rank measures."""
        is_hidden = not (is_shown and num_rows)
        self._line: tqdm[Any] = tqdm(total=num_rows, unit="row", dynamic_ncols=True, disable=is_hidden)
        self._num_expected = num_rows

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.total = self._line.n  # show 100 %, even if a stage ended early at a row that differs
        self._line.close()

    @contextmanager
    def stage(self, text: str, num_rows: int) -> Iterator[tqdm[Any]]:
        """Begin a stage over `num_rows`. The total of the bar grows by the rows that were not expected."""
        expected = min(num_rows, self._num_expected)
        self._num_expected -= expected
        self._line.total += num_rows - expected
        if num_rows:
            self._line.set_description(text)
        yield self._line


def _show_unreachable(bar: tqdm[Any], num_rows: int) -> None:
    if num_rows:
        bar.set_postfix_str(f"{num_rows} with URLs that cannot be reached", refresh=False)
