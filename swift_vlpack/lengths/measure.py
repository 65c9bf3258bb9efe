"""The length pass: the size of every row of a source, from image headers where that proves exact, else in full.

Trust is earned: the first rows of every kind of row and image, some drawn by a seed, and the extremes of size and
aspect are encoded both ways, and one difference sends the whole source through the full encoding, now and at later
starts. Kinds that were found equal are trusted in other sources too. Sizes are remembered in one file a source, as they
are found. The ranks of a run measure every n-th row each and tell each other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from tqdm import tqdm

from swift_vlpack.comm import ALONE, Comm
from swift_vlpack.lengths import checks, forked
from swift_vlpack.lengths.checks import Checks, Unconfirmed, extremes
from swift_vlpack.lengths.inputs import Encoders, Known
from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, VOUCHED, Sizes
from swift_vlpack.lengths.measured_sizes import Found, joined
from swift_vlpack.lengths.progress import stage
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows, faults_by_index, positions_of
from swift_vlpack.lengths.rows_work import Aim, RowsWork, Task
from swift_vlpack.plan.cut_rows import CutRows
from swift_vlpack.reasons import REASONS, Reason
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource

logger = logging.getLogger(__name__)

_CHUNK_BY_HEADER = 128
"""Rows of a task, which may hold the bytes of their images; by header a row takes 0.3 to 0.8 ms, so it is a tenth of a
second at most between two looks at what came back."""
_CHUNK_IN_FULL = 8
"""An image takes 10 ms and more to encode: what is lost by a kill, and what others wait for at the end, stays small."""
_LEAST_BY_HEADER = 16
"""Where several processes share few rows: some milliseconds of work, against which the way there and back is little."""
_NUM_KEYS_WORTH_A_PROCESS = 2000
"""A key takes 0.05 ms of a text and 0.3 ms of an image, a process some 50 ms to start and end."""


def measure(source: RowSource, known: Known, encoders: Encoders, comm: Comm = ALONE) -> LengthIndex:
    """The sizes of all rows of a source, and why some have none; all ranks give the same."""
    part = _Part.of(source, known, encoders, comm)
    # Over all ranks together as many as one rank alone would draw.
    num_drawn = -(-checks.NUM_ROWS_DRAWN // comm.num_ranks)
    difference = _first(comm.results_of_all(lambda: _looked_up(part) or _measured(part, num_drawn)))
    if difference is None:
        sizes = joined(comm.results_of_all(lambda: part.found.sizes))
        # Of the whole source, so that the ends are its own and not those of every rank's part.
        mine = _own(extremes(sizes), comm)
        difference = _first(comm.results_of_all(lambda: _compared(part, mine)))
    if difference is not None:
        if comm.rank == 0:
            logger.warning(
                "source %s: lengths are not taken from image headers, every row is encoded: %s", source.name, difference
            )
        in_full = part.without_headers()
        comm.results_of_all(lambda: _measured(in_full))
        sizes = joined(comm.results_of_all(lambda: part.found.sizes))
    faults = faults_by_index(comm.results_of_all(lambda: part.found.faults))
    index = _index_of(sizes, faults, difference or _silence_of_headers(sizes))
    index = replace(
        index,
        num_remembered=sum(comm.results_of_all(lambda: part.found.num_remembered)),
        surplus_tags=sorted({*chain(*comm.results_of_all(part.found.with_surplus_tags))} - set(index.failures)),
    )
    if encoders.in_full.cutter is None:
        return index
    parts = comm.results_of_all(lambda: part.found.parts_by_index())
    return replace(index, cut=CutRows.of({at: one for share in parts for at, one in share.items()}))


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of the pass."""

    rows: RankRows
    known: Known
    encoders: Encoders
    found: Found
    work: RowsWork
    is_shown: bool

    @classmethod
    def of(cls, source: RowSource, known: Known, encoders: Encoders, comm: Comm) -> _Part:
        rows = RankRows.of(source, comm)
        work = RowsWork(rows, known, encoders)
        return cls(rows, known, encoders, Found(rows, known), work, comm.rank == 0)

    def without_headers(self) -> _Part:
        """What is measured from now on is encoded in full."""
        self.found.forget_headers()
        work = self.work.without_headers()
        return _Part(self.rows, self.known, work.encoders, self.found, work, self.is_shown)

    def done(self, tasks: deque[Task], num_processes: int | None = None) -> Iterator[Any]:
        """What becomes of the tasks."""
        return forked.done(self.work, tasks, min(num_processes or self.encoders.num_processes, len(tasks)))

    def bar(self, text: str, num_rows: int) -> AbstractContextManager[tqdm[Any]]:
        return stage(f"{text} of {self.rows.source.name}", num_rows, is_shown=self.is_shown)


def _looked_up(part: _Part) -> str | None:
    """Take over what is remembered; why headers are not to be trusted, if that is remembered."""
    everything = np.arange(len(part.rows))
    num_processes = min(part.encoders.num_processes, -(-len(everything) // _NUM_KEYS_WORTH_A_PROCESS))
    tasks = _tasks(Aim.KEYS, everything, _CHUNK_BY_HEADER)
    with part.bar("Looking up lengths", len(everything)) as bar:
        for positions, keys, stamps, has_surplus_tags in part.done(tasks, num_processes):
            part.found.keys[positions], part.found.stamps[positions] = keys, stamps
            part.found.has_surplus_tags[positions] = has_surplus_tags
            bar.update(len(positions))
    remembered = part.known.cache.load()
    cutter = part.encoders.in_full.cutter
    part.found.take_over(remembered, is_strict=part.encoders.is_strict, cutter=cutter)
    if remembered.num_differing:
        return f"they were found to differ at an earlier start, which {part.known.cache.path} remembers"
    return None


def _measured(part: _Part, num_drawn: int = 0) -> str | None:
    """Measure all rows not known yet, and compare some of them; the first difference, if there is one.

    Compared are the first row of every kind that is not trusted yet, and, as far as their pixels are a small share
    of all, the next ones of it and `num_drawn` rows drawn by a seed, of which the first one in any case.
    """
    found, unknown = part.found, part.found.unknown()
    chosen_by = Checks(found.drawn(num_drawn), part.known.trust.remembered())
    unconfirmed = Unconfirmed()
    tasks = _tasks(Aim.MEASURE, unknown, _chunk_size(part.encoders, len(unknown)))
    with part.bar("Lengths", len(unknown)) as bar:
        for chunk in part.done(tasks):
            found.take(chunk)
            if chunk.difference is not None:
                found.remember_difference(chunk, unconfirmed.all())
                return str(chunk.difference)
            if chunk.seen is None:
                instead = _believed(part, chunk, chosen_by)
                # Before what is to be measured: until they are compared, sizes wait to be remembered.
                tasks.extendleft(_comparing(part.encoders, instead))
                found.remember(unconfirmed.confirm(chunk, instead))
            else:
                chosen = chosen_by.chosen(chunk) if part.encoders.by_header is not None else []
                tasks.extendleft(_comparing(part.encoders, chosen))
                found.remember(unconfirmed.add(chunk, chosen))
                bar.update(len(chunk.positions))
                _show_unreachable(bar, found.num_failed(Reason.URL_UNREACHABLE))
    return None


def _compared(part: _Part, positions: Positions) -> str | None:
    """Encode rows both ways, but for those that were found equal before; the first difference, if there is one."""
    todo = part.found.unproven(positions)
    tasks = _comparing(part.encoders, todo.tolist())
    with part.bar("Checking lengths", len(todo)) as bar:
        for chunk in part.done(tasks):
            part.found.take(chunk)
            if chunk.difference is not None:
                part.found.remember_difference(chunk, [])
                return str(chunk.difference)
            part.found.remember([chunk])
            bar.update(len(chunk.positions))
    return None


def _believed(part: _Part, chunk: Chunk, chosen_by: Checks) -> list[int]:
    """Trust the kinds of rows that were found equal; other rows to compare in place of broken ones."""
    instead: list[int] = []
    for position, proof in zip(chunk.positions.tolist(), chunk.sizes["proof"].tolist(), strict=True):
        if proof == AGREED:
            part.known.trust.add(chosen_by.kinds[position])
        else:
            instead += chosen_by.instead_of(position)
    return instead


def _chunk_size(encoders: Encoders, num_rows: int) -> int:
    """Rows of a task: two at least for every process, so that none is idle while another one has the last of them."""
    if encoders.by_header is None:
        return _CHUNK_IN_FULL
    share = -(-num_rows // (2 * encoders.num_processes)) if encoders.num_processes > 1 else num_rows
    return min(_CHUNK_BY_HEADER, max(_LEAST_BY_HEADER, share))


def _tasks(aim: Aim, positions: Positions, size: int) -> deque[Task]:
    return deque(Task(aim, positions[start : start + size]) for start in range(0, len(positions), size))


def _comparing(encoders: Encoders, positions: list[int]) -> deque[Task]:
    """Tasks that compare these rows: each of its own, where other processes can take them."""
    size = len(positions) if encoders.num_processes < 2 else 1
    return _tasks(Aim.COMPARE, positions_of(positions), max(1, size))


def _show_unreachable(bar: tqdm[Any], num_rows: int) -> None:
    if num_rows:
        bar.set_postfix_str(f"{num_rows} with URLs that cannot be reached", refresh=False)


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def _own(indices: Positions, comm: Comm) -> Positions:
    """Positions among this rank's rows of those that are its own."""
    return indices[indices % comm.num_ranks == comm.rank] // comm.num_ranks


def _silence_of_headers(sizes: Sizes) -> str | None:
    """Why there is nothing to trust, where no row could be measured otherwise than in full."""
    proofs = sizes["proof"][sizes["length"] > 0]
    is_silent = len(proofs) > 0 and not np.isin(proofs, (BY_HEADER, AGREED, VOUCHED)).any()
    return "no row could be measured without encoding it" if is_silent else None


def _index_of(sizes: Sizes, faults: Mapping[int, Fault], without_headers: str | None) -> LengthIndex:
    """As the plan wants them, with what was said of those that have none."""
    columns = np.stack([sizes[name].astype(np.int64) for name in RowSize._fields])
    failures = {int(at): REASONS[sizes["reason"][at]] for at in np.flatnonzero(sizes["reason"])}
    told = {at: fault for at, fault in faults.items() if failures.get(at) == fault.reason}
    return LengthIndex(columns, failures, told, without_headers)
