"""What became of the rows of a run: counted when an optimizer step was taken, added up over ranks, listed, reported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift.utils import get_logger, is_master

from swift_vlpack.feed.epoch_report import count_left_out
from swift_vlpack.feed.failures import FEWEST_ROWS_OF_EPOCH, FailedShare
from swift_vlpack.feed.feed import Feed
from swift_vlpack.files import write_json
from swift_vlpack.host.begun import note_epoch
from swift_vlpack.host.pack_log import PACKS_FILE, PackLog, as_line
from swift_vlpack.host.ranks import gathered
from swift_vlpack.rows.left_out import LeftOutRows, deleted_by_loader
from swift_vlpack.rows.samples import LeftOut, PackRecord
from swift_vlpack.runlog import left_out_list
from swift_vlpack.runlog.run_files import BEGUN
from swift_vlpack.runlog.run_log import FOLDER
from swift_vlpack.runlog.telemetry import Telemetry

logger = get_logger()


class Account:
    """The counts of this rank."""

    def __init__(self, feed: Feed, output_dir: str, rank: int) -> None:
        self.feed = feed
        self.counted = self._no_counts()
        """Of the epoch so far."""
        self.num_samples_trained = 0  # since the run was begun or resumed
        self._folder = Path(output_dir) / FOLDER
        self._record = PackLog.wanted(self._folder / PACKS_FILE.format(rank), os.environ, feed.can_plan_again)
        self._sources = feed.sources
        self._failed_share = FailedShare(feed.config.packing_max_failed_share)
        self._left_out_rows = LeftOutRows(self._folder / left_out_list.FILE, self._sources)
        self._in_step: list[PackRecord] = []  # trained, but their optimizer step is not taken yet

    def list_deleted_rows(self) -> None:
        """List what ms-swift's loader deleted, which is in no epoch."""
        for source in self._sources if is_master() else ():
            self._left_out_rows.add(None, deleted_by_loader(source))

    def note_epoch(self, template: Any, args: Any, step: int) -> None:
        """Note where the feed is, for who asks later which rows a step had."""
        note_epoch(self._folder / BEGUN, self.feed, template, args, step)

    def begin_epoch(self, epoch: int, left_out: Sequence[LeftOut]) -> None:
        """List what the epoch leaves out, the same on all ranks; stop where the one before lost too many rows."""
        self._failed_share.check(FEWEST_ROWS_OF_EPOCH)  # which may have had too few rows to say so
        if is_master():
            self._left_out_rows.add(epoch, left_out)

    def trained(self, record: PackRecord) -> None:
        """A pack has been trained; it counts when its optimizer step is taken."""
        self._in_step.append(record)

    def take_step(self, step: int) -> list[PackRecord]:
        """Count the packs whose optimizer step has just been taken, and give them back: consumed means trained."""
        # Emptied before anything can fail: a step that is counted twice would break the account.
        taken, self._in_step = self._in_step, []
        for record in taken:
            self._count(record)
        if self._record is not None:
            self._record.append([as_line(record, step) for record in taken])
        # Behind the file: what a run that stops here has trained is in it.
        self._failed_share.check()
        return taken

    def count_left_out(self, epoch: int, left_out: Sequence[LeftOut]) -> None:
        """Count and list rows of an epoch that are in no pack."""
        self._failed_share.count(0, left_out)
        self._left_out_rows.add(epoch, left_out)
        for one in left_out:
            count_left_out(self.counted, one)

    def over_all_ranks(self) -> Telemetry:
        """The epoch's counts so far; all ranks have to call it."""
        total = self._no_counts()
        for counts in gathered(self.counted, "the counts of the epoch"):
            total.merge(counts)
        return total

    def report(self, counted: Telemetry, global_step: int) -> None:
        """Log the account of the epoch that the feed is in, and write it."""
        epoch = self.feed.epoch
        logger.info(f"packing: {counted.line(epoch=epoch)}")
        lost = {source.name: source.num_lost for source in self._sources}
        path = self._folder / f"epoch_{epoch}.json"
        try:
            write_json(path, {**counted.as_json(epoch=epoch), "global_step": global_step, "loader_deleted": lost})
        # The run goes on: the numbers are in the log, and training is dearer than a report.
        except OSError as error:
            logger.warning(
                f"packing: the report of epoch {epoch} is in the log only, {path} cannot be written: {error}"
            )

    def begin_anew(self) -> None:
        """Forget the counts of an epoch that has ended."""
        self.counted = self._no_counts()

    def _count(self, record: PackRecord) -> None:
        samples = [(key.source, length) for key, length in zip(record.sample_ids, record.lengths, strict=True)]
        self._failed_share.count(len(samples))
        self.count_left_out(record.epoch, record.left_out)
        self.num_samples_trained += len(samples)
        if samples:
            self.counted.packed(
                samples,
                num_images=record.num_images,
                num_padding=record.num_padding,
                single_long=record.single_long,
                further=[key.source for key in record.sample_ids if key.is_further_part],
            )

    def _no_counts(self) -> Telemetry:
        return Telemetry(packing_length=self.feed.config.packing_length)
