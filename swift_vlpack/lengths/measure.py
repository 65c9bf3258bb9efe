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

To decode all images takes hours, to read a header takes a millisecond. So `Encoders` has two ways to encode a row, and
the quick one is checked before it is trusted (`trust.py`): rows of every kind, some drawn rows and the extremes are
encoded both ways. After a single difference, every row of the source is encoded in full, now and at later starts. Each
rank measures its share of the rows (`rank_rows.py`) in several processes (`rows_work.py`, `forked.py`), and saves sizes
as they come (`cache.py`).
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
from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, Sizes
from swift_vlpack.lengths.measured_sizes import Findings, MeasuredSizes, joined
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.lengths.rows_work import Encoders, RowsWork, Task, TaskKind, are_equal, in_words
from swift_vlpack.lengths.trust import Checks, extremes, num_to_draw
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
_LEAST_BY_HEADER = 16
"""Fewest rows of a task if several processes share few rows: some milliseconds of work, next to which it is cheap to
pass the task to a process."""
_NUM_KEYS_WORTH_A_PROCESS = 2000
"""Number of rows for which one more process is started to compute their keys. A key takes 0.02 ms for a text and 0.03
to 0.05 ms for an image; to start and end a process takes about 50 ms."""

_NUM_MEASURED_AGAIN = 4
"""Remembered rows that each rank measures again at a start, by their headers: some milliseconds. Most changes that no
key sees (a prompt, an image limit) change every row."""


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
    # Divide the drawn rows among ranks: all ranks together draw as many rows as a single rank would.
    num_drawn = -(-num_to_draw(len(source.rows)) // comm.num_ranks)
    difference = _first(comm.results_of_all(mine.look_up))
    if difference is None and (stale := _first(comm.results_of_all(mine.measure_some_again))) is not None:
        if comm.rank == 0:
            logger.warning("source %s: remembered lengths are wrong, all rows are measured: %s", source.name, stale)
        comm.results_of_all(mine.sizes.forget)
    if difference is None:
        difference = _first(comm.results_of_all(lambda: mine.measure(num_drawn)))
    if difference is None:
        sizes = joined(comm.results_of_all(lambda: mine.sizes.sizes))
        # Find the extremes of the whole source, not of each rank's share, and compare those of this rank.
        ends = extremes(sizes)
        my_ends = ends[ends % comm.num_ranks == comm.rank] // comm.num_ranks
        difference = _first(comm.results_of_all(lambda: mine.compare(my_ends)))
    if difference is None:
        comm.results_of_all(mine.sizes.save_headers)
    else:
        if comm.rank == 0:
            logger.warning(
                "source %s: lengths are not taken from image headers, every row is encoded: %s", source.name, difference
            )
        mine.distrust_headers()
        comm.results_of_all(mine.measure)
        sizes = joined(comm.results_of_all(lambda: mine.sizes.sizes))
    findings = comm.results_of_all(mine.sizes.findings)
    return _index_of(
        sizes, findings, difference or _silence_of_headers(sizes), is_cut=encoders.in_full.divider is not None
    )


class _RankPass:
    """Measure one rank's rows, in three steps: `look_up`, `measure`, `compare`.

    Each returns the first difference between headers and full encoding in words; None if there is none.
    """

    def __init__(
        self, source: RowSource, cache: LengthCache, encoders: Encoders, comm: Comm, progress: Progress | None
    ) -> None:
        rows = RankRows.of(source, comm)
        self.sizes = MeasuredSizes(rows, cache)
        self._rows = rows
        self._comm = comm
        self._name = source.name
        self._work = RowsWork(rows, cache, encoders)
        self._progress = progress or Progress()

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
        if self.sizes.look_up(is_strict=self._encoders.is_strict, divider=self._encoders.in_full.divider):
            return "an earlier start found that they differ, as its file of lengths records"
        if self._encoders.by_header is None:
            self.sizes.forget_headers()
        return None

    def measure_some_again(self) -> str | None:
        """Measure a few remembered rows. A size that is another now says that the key lacks what made it so."""
        some = self.sizes.remembered(_NUM_MEASURED_AGAIN)
        for chunk in self._results(_tasks(TaskKind.MEASURE, some, max(1, len(some)))):
            for at, position in enumerate(chunk.positions.tolist()):
                known, now = self.sizes.sizes[position], chunk.sizes[at]
                if now["length"] and not are_equal(known, now):
                    return f"{self._rows.sample_id(position)} has {in_words(now)}, remembered are {in_words(known)}"
        return None

    def measure(self, num_drawn: int = 0) -> str | None:
        """Measure all rows that the cache does not have, and compare some as the pass goes on."""
        unknown = self.sizes.unknown()
        checks = Checks(self.sizes.drawn(num_drawn))
        tasks = _tasks(TaskKind.MEASURE, unknown, self._rows_of_a_task(len(unknown)))
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
        return None

    def compare(self, positions: Positions) -> str | None:
        """Encode rows both ways, except those that were compared before."""
        todo = self.sizes.unproven(positions)
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
        """Yield the results of tasks. Rows that could not be read in time are read once more at the end."""
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

    def _rows_of_a_task(self, num_rows: int) -> int:
        """Return the number of rows in a task: such that each process gets at least two tasks, and none is idle."""
        if self._encoders.by_header is None:
            return _CHUNK_IN_FULL
        num_processes = self._encoders.num_processes
        share = -(-num_rows // (2 * num_processes)) if num_processes > 1 else num_rows
        return min(_CHUNK_BY_HEADER, max(_LEAST_BY_HEADER, share))

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


def _silence_of_headers(sizes: Sizes) -> str | None:
    """Say that no row could be measured from its headers, if that is so although none differs; otherwise None."""
    proofs = sizes["proof"][sizes["length"] > 0]
    is_silent = len(proofs) > 0 and not np.isin(proofs, (BY_HEADER, AGREED)).any()
    return "no row could be measured without encoding it" if is_silent else None


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
