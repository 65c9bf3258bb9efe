"""Record a run while it trains: events, packs, left-out rows, and the account of every epoch.

    begin -> begin_epoch -> trained ... take_step -> note_steps -> checkpoint -> report_epoch ... -> end

Every rank has a `RunEvents` and counts its own packs. A pack counts when its optimizer step is taken. Rank 0 writes
`vlpack/run.jsonl` (`runlog/events.py` has the format) and `vlpack/epoch_N.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift.utils import get_logger, is_master

from swift_vlpack.feed.failures import FEWEST_ROWS_OF_EPOCH, FailedShare
from swift_vlpack.feed.feed import Feed
from swift_vlpack.files import write_json
from swift_vlpack.host.ranks import gathered
from swift_vlpack.plan.same_steps import steps_are_other
from swift_vlpack.reasons import is_failure
from swift_vlpack.rows.left_out import LeftOutRows, deleted_by_loader
from swift_vlpack.rows.samples import LeftOut, PackRecord
from swift_vlpack.runlog import left_out
from swift_vlpack.runlog.account import account_json, account_line
from swift_vlpack.runlog.counts import Counts, padded
from swift_vlpack.runlog.events import CHECKPOINT, END, EPOCH, FOLDER, RESUME, START, STEPS, EventLog
from swift_vlpack.runlog.pack_log import PackLog, pack_file

logger = get_logger()


class RunEvents:
    """The events and counts of this rank."""

    def __init__(self, feed: Feed, output_dir: str, rank: int) -> None:
        self.feed = feed
        self.of_epoch = self._no_counts()
        """Counts of this rank in the epoch so far: trained and left out."""
        self.of_run = self._no_counts()
        """Counts of all ranks since the start or resume, up to the last `steps` event."""
        self._since_line = self._no_counts()  # as `of_run`, but since the last log line
        self._since_event = self._no_counts()
        self._tokens_of_steps: list[int] = []  # tokens of this rank in each step since the last `steps` event
        self._in_step: list[PackRecord] = []  # packs that were trained, but whose optimizer step is not taken yet
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        folder = Path(output_dir)
        self._reports = folder / FOLDER
        self._log = EventLog(folder) if is_master() else None
        self._packs = PackLog.wanted(pack_file(folder, rank), os.environ)
        self._sources = feed.sources
        self._left_out_rows = LeftOutRows(self._reports / left_out.FILE, self._sources)
        self._failed_share = FailedShare(feed.config.packing_max_failed_share)

    # -- start and end ------------------------------------------------------------------------------------------------

    def list_deleted_rows(self) -> None:
        """Write the rows that ms-swift's loader deleted to the list of left-out rows, without an epoch."""
        for source in self._sources if is_master() else ():
            self._left_out_rows.add(None, deleted_by_loader(source))

    def begin(self, step: int, checkpoint: Path | None, facts: Mapping[str, Any]) -> None:
        """Record that training starts, or resumes from a checkpoint. All ranks must call it; rank 0 has the facts."""
        if checkpoint is None:
            when = self._note(START, step, **facts)
        else:
            when = self._note(RESUME, step, checkpoint=str(checkpoint.absolute()), **facts)
        (when, *_) = gathered(when, "when training began")
        if self._packs is not None:
            self._packs.begin(when)
        self._since = time.perf_counter()

    def checkpoint(self, step: int, path: Path) -> None:
        """Record that a checkpoint is complete."""
        self._note(CHECKPOINT, step, checkpoint=path.name)

    def end(self, step: int) -> None:
        """Record that training has ended, and was not interrupted."""
        self._note(END, step)

    # -- steps --------------------------------------------------------------------------------------------------------

    def trained(self, record: PackRecord) -> None:
        """Keep the record of a trained pack until its optimizer step is taken. Only then does the pack count."""
        self._in_step.append(record)

    def take_step(self, step: int) -> tuple[list[PackRecord], Counts]:
        """Count the packs whose optimizer step has just been taken. Returns (records, counts of the step)."""
        # Empty the list before anything can fail: a step that is counted twice would break the account.
        records, self._in_step = self._in_step, []
        counts = self._no_counts()
        for record in records:
            record.count_in(counts)
            self._failed_share.count(len(record.sample_ids))
            self.leave_out(record.epoch, record.left_out)
            if self.feed.is_decoded_ahead:
                counts.num_failed_late += sum(is_failure(sample.reason) for sample in record.left_out)
        # Un-packed, the samples of the step would be padded in this order, in batches of the size that was given.
        lengths = [length for record in records for length in record.lengths]
        counts.num_tokens_unpacked = padded(lengths, self.feed.unpacked_batch_size)
        self.of_epoch.merge(counts)
        self._since_event.merge(counts)
        self._tokens_of_steps.append(counts.num_tokens)
        if self._packs is not None:
            self._packs.append([_as_line(record, step) for record in records])
        # Check after the file is written, so that the file is complete if the run stops here.
        self._failed_share.check()
        return records, counts

    def note_steps(self, step: int) -> Counts | None:
        """Record what all ranks trained since the last `steps` event. All ranks must call it. None without a step."""
        if not self._tokens_of_steps:  # empty on all ranks or on none, because ranks take steps together
            return None
        total = self._no_counts()
        ranks = gathered((self._since_event, self._tokens_of_steps), "what every rank has trained")
        for counts, _ in ranks:
            total.merge(counts)
        total.num_steps = len(self._tokens_of_steps)
        total.num_tokens_slowest = sum(map(max, zip(*(tokens for _, tokens in ranks), strict=True)))
        total.milliseconds = round(1000 * (self._now() - self._since))
        self._note(STEPS, step, epoch=self.feed.epoch, **total.as_event())
        if total.num_failed_late and not self.of_run.num_failed_late and is_master():
            logger.warning(f"packing: {steps_are_other(total.num_failed_late)}")
        self.of_run.merge(total)
        self._since_line.merge(total)
        self._since_event, self._tokens_of_steps, self._since = self._no_counts(), [], self._now()
        return total

    def since_line(self) -> Counts | None:
        """Return what all ranks trained since the last call, up to the last `steps` event. None without a step."""
        counts, self._since_line = self._since_line, self._no_counts()
        return counts if counts.num_steps else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the run evaluates or saves."""
        if self._paused_at is not None:  # paused already: evaluating several data sets nests evaluations
            yield
            return
        self._paused_at = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def _now(self) -> float:
        """Return the time; while the clock is stopped, the time of the stop, because an evaluation logs a line."""
        return time.perf_counter() if self._paused_at is None else self._paused_at

    # -- epochs -------------------------------------------------------------------------------------------------------

    def begin_epoch(self, step: int, facts: Mapping[str, Any]) -> None:
        """Record that an epoch begins or resumes."""
        self._note(EPOCH, step, epoch=self.feed.epoch, **facts)

    def list_left_out(self, epoch: int, left_out: Sequence[LeftOut]) -> None:
        """List what the plan of an epoch leaves out. Raises if the epoch before lost too many rows."""
        # Fewer rows are enough for a verdict than in the middle of an epoch, because a small epoch has no more.
        self._failed_share.check(FEWEST_ROWS_OF_EPOCH)
        if is_master():
            self._left_out_rows.add(epoch, left_out)

    def leave_out(self, epoch: int, left_out: Sequence[LeftOut]) -> None:
        """Count and list samples of an epoch that are in no pack."""
        self._failed_share.count(0, left_out)
        self._left_out_rows.add(epoch, left_out)
        for sample in left_out:
            sample.count_in(self.of_epoch)

    def over_all_ranks(self) -> Counts:
        """Add up the epoch's counts so far. All ranks must call it."""
        total = self._no_counts()
        for counts in gathered(self.of_epoch, "the counts of the epoch"):
            total.merge(counts)
        return total

    def report_epoch(self, counts: Counts, global_step: int) -> None:
        """Log the account of the feed's epoch, and write it to `vlpack/epoch_N.json`."""
        epoch = self.feed.epoch
        logger.info(f"packing: {account_line(counts, epoch=epoch)}")
        deleted = {source.name: source.num_lost for source in self._sources}
        path = self._reports / f"epoch_{epoch}.json"
        try:
            write_json(
                path, account_json(counts, epoch=epoch) | {"global_step": global_step, "loader_deleted": deleted}
            )
        # Continue: the numbers are in the log, and training is worth more than a report.
        except OSError as error:
            logger.warning(
                f"packing: the report of epoch {epoch} is in the log only, {path} cannot be written: {error}"
            )

    def forget_epoch(self) -> None:
        """Reset the counts after an epoch has ended."""
        self.of_epoch = self._no_counts()

    def _no_counts(self) -> Counts:
        return Counts(packing_length=self.feed.config.packing_length)

    def _note(self, event: str, step: int, **facts: Any) -> str | None:
        return None if self._log is None else self._log.append(event, step, **facts)


def _as_line(record: PackRecord, step: int) -> dict[str, Any]:
    ids = [str(sample_id) for sample_id in record.sample_ids]
    shared = {"shared": list(record.shared)} if record.shared else {}
    lengths = list(record.lengths)
    return {"step": step, "epoch": record.epoch, "pack": record.number, "ids": ids, "lengths": lengths, **shared}
