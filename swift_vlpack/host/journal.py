"""What a run notes of itself as it goes, for `vlpack report`: `run.jsonl`, and the shares in ms-swift's log lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift.utils import is_master

from swift_vlpack.feed.feed import Feed
from swift_vlpack.host.ranks import gathered
from swift_vlpack.rows.samples import PackRecord
from swift_vlpack.runlog.run_log import CHECKPOINT, END, EPOCH, RESUME, START, STEPS, RunLog
from swift_vlpack.runlog.step_counts import NUMBERS, StepCounts, summed


class Journal:
    """The steps of this rank since the last note; the first rank writes the notes."""

    def __init__(self, feed: Feed, output_dir: str) -> None:
        self.feed = feed
        self._log = RunLog(Path(output_dir)) if is_master() else None
        self.trained_so_far: Counter[str] = Counter()
        """Sums over all notes of steps, with their `seconds`. Every rank has the sums of all ranks."""
        self._counts = StepCounts()
        self._since = time.perf_counter()
        self._paused_at: float | None = None

    def begin(self, step: int, checkpoint: Path | None, facts: Mapping[str, Any]) -> None:
        """Training begins, or goes on from a checkpoint."""
        if checkpoint is None:
            self._note(START, step, **facts)
        else:
            self._note(RESUME, step, checkpoint=str(checkpoint.absolute()), **facts)
        self._since = time.perf_counter()

    def begin_epoch(self, step: int, facts: Mapping[str, Any]) -> None:
        """An epoch begins, or what is left of it."""
        self._note(EPOCH, step, epoch=self.feed.epoch, **facts)

    def trained(self, records: Sequence[PackRecord]) -> StepCounts:
        """Count one step of this rank. Returns the counts of the step."""
        counts = StepCounts.of_step(records, self.feed.unpacked_batch_size)
        self._counts.merge(counts)
        return counts

    def note_steps(self, step: int) -> dict[str, Any] | None:
        """Write what was trained since the last note. All ranks must call it. Returns the note; None without a step."""
        if not self._counts.num_steps:  # the same on all ranks
            return None
        ranks = gathered(self._counts, "what every rank has trained")
        noted = {"seconds": round(self._now() - self._since, 3), **summed(ranks)}
        self._note(STEPS, step, epoch=self.feed.epoch, **noted)
        self.trained_so_far.update({name: noted[name] for name in ("seconds", *NUMBERS)})
        self._counts = StepCounts()
        self._since = self._now()
        return noted

    def checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""
        self._note(CHECKPOINT, step, checkpoint=path.name)

    def end(self, step: int) -> None:
        """Training has ended by itself."""
        self._note(END, step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the run evaluates or saves, it does not train."""
        if self._paused_at is not None:  # of several data sets an evaluation is made of evaluations
            yield
            return
        self._paused_at = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def _now(self) -> float:
        """The time of training; an evaluation logs too, while it stands still."""
        return time.perf_counter() if self._paused_at is None else self._paused_at

    def _note(self, event: str, step: int, **facts: Any) -> None:
        if self._log is not None:
            self._log.note(event, step, **facts)
