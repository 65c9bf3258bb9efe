"""Feed a trainer with packs that are made as rows come. Ranks agree on every step before they train it.

A *reader* is a dataloader worker that reads and packs rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from swift_vlpack.errors import DataError
from swift_vlpack.feed.agreement import Voting, in_step
from swift_vlpack.feed.collate import Batch, batch_of
from swift_vlpack.feed.feed import CannotReadAgain, Collate, EpochStart, Feed, MakeLoader
from swift_vlpack.feed.packs import packed_samples
from swift_vlpack.feed.saved_rows import digest_of
from swift_vlpack.feed.streamed import ReaderProgress, StreamedPackingDataset
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.report import long_sequence_warning
from swift_vlpack.plan.shares import share_of
from swift_vlpack.reasons import warning_of_left_out
from swift_vlpack.rows.cutting import in_parts
from swift_vlpack.rows.samples import Encoded, LeftOut, PackRecord, SampleError
from swift_vlpack.rows.source import row_bytes
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.runlog.counts import Counts
from swift_vlpack.words import by_reason

logger = logging.getLogger(__name__)

NUM_ROWS_COMPARED = 16
"""First rows by which a stream is recognized. To read more would cost the time that streams should save."""
AFTER_ALL_ROWS = 2**43
"""A start that no share reaches. From there, `samples` yields only the rows that are asked for by number (`held`)."""


class StreamedFeed(Feed):
    """A feed of packs in the order in which the readers of each rank make them."""

    kind = "buffer"
    batches_left = None
    is_finished = False
    packs: StreamedPackingDataset

    def __init__(self, packs: StreamedPackingDataset, num_workers: int, **options: Any) -> None:
        super().__init__(packs, **options)
        self.progress = ReaderProgress(num_workers)
        self._left_out_after: list[LeftOut] = []
        self._has_warned_of_length = False

    def batches_of(
        self, numbers: Sequence[int], collate: Collate, *, plan: EpochPlan | None = None, num_workers: int = 0
    ) -> Iterator[Batch]:
        """Read the packs of rank 0 from the beginning, and yield those with these numbers."""
        # A single worker reads the same rows as this process would, so it is not worth starting.
        num_workers = num_workers if num_workers > 1 else 0
        loader: Any = DataLoader(self.packs, batch_size=1, collate_fn=collate, num_workers=num_workers)
        made: Iterator[Batch] = (batch for batch in loader if batch.record.sample_ids)
        stop = max(numbers, default=-1) + 1
        return (batch for number, batch in enumerate(islice(made, stop)) if number in numbers)

    def samples_again(self, record: PackRecord, *, rank: int, num_workers: int) -> Iterator[Encoded | SampleError]:
        """Encode the samples of a pack of this epoch a second time, from the shares of this rank's readers."""
        if why := self.dataset.why_not_again(record.sample_ids):
            raise CannotReadAgain(why)
        return self._samples_of(record, rank, max(1, num_workers))

    def _samples_of(self, record: PackRecord, rank: int, num_workers: int) -> Iterator[Encoded | SampleError]:
        """Encode the rows of a pack again, reader by reader. A cut row also yields the parts in other packs."""
        rows, wanted = self.dataset, {key._replace(part=None) for key in record.sample_ids}
        for worker in range(num_workers):
            share = share_of(rank, self.num_ranks, worker, num_workers)
            held = rows.numbers_in(share, record.epoch, wanted)
            for row in islice(rows.samples(record.epoch, share, start=AFTER_ALL_ROWS, held=held), len(held)):
                for _, sample in in_parts(row, rows.encoder.cutter):
                    if not isinstance(sample, LeftOut):
                        yield sample

    # -- epochs -----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> EpochStart:
        """Begin an epoch. Persistent readers see its number when they begin their next packs."""
        self.packs.set_epoch(epoch)
        return EpochStart()

    def batches_trained(self, accumulation: int) -> int:
        """Return all trained batches, not rounded to steps, because the readers continue exactly where they were."""
        return self.progress.num_trained

    # -- batches ----------------------------------------------------------------------------------------------------

    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """Make a loader whose workers each read a share of the rows."""
        # Make the group now and not at the first vote: all ranks have to make it at the same point.
        self._ranks = ranks()
        self._collate = options["collate_fn"]
        self._device = options.get("device")
        loader = make(self.packs, feed=self, batch_size=1, **options)
        self._warn_of_shared_rows(self.num_ranks * max(1, loader.num_workers), is_first=rank == 0)
        return loader

    def batches(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Yield as many batches as every other rank does."""
        return in_step(self._trainable(loaded), self._without_loss, self._ranks)

    def fill_up(self, num_missing: int) -> list[Batch]:
        """Return batches without loss that complete the last step of an epoch.

        transformers' Trainer does not know how long the epoch is. It would add the gradients of an incomplete step to
        the first step of the next epoch, divided by that step's number of tokens.
        """
        return [self._without_loss() for _ in range(num_missing)]

    def _without_loss(self) -> Batch:
        batch: Batch = self._collate([packed_samples([], self.epoch, -1, self.config, ())])
        return batch if self._device is None else batch.to(self._device)

    def _trainable(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Skip packs without samples. Their left-out samples go to the next pack, or to `left_out_after`."""
        empty: list[PackRecord] = []
        for batch in loaded:
            assert batch.record is not None
            record = batch.record
            if not record.sample_ids:
                empty.append(record)
                continue
            record = replace(
                record,
                left_out=(*_left_out(empty), *record.left_out),
                progress=tuple(state for one in (*empty, record) for state in one.progress),
            )
            empty = []
            yield batch_of(batch, record, batch.beside)
        self._left_out_after = _left_out(empty)

    def consumed(self, records: Sequence[PackRecord]) -> None:
        """Count these packs as trained, and keep the states of their readers."""
        for record in records:
            self.progress.trained(record)
        if not self._has_warned_of_length:
            num_tokens = np.array([record.num_tokens for record in records], dtype=np.int64)
            if warning := long_sequence_warning(num_tokens, self.config):
                self._has_warned_of_length = True
                logger.warning("%s", warning)

    # -- the account of an epoch ------------------------------------------------------------------------------------

    def left_out_after(self) -> list[LeftOut]:
        """Return and forget the samples that the readers of this rank left out after their last packs."""
        left_out, self._left_out_after = self._left_out_after, []
        return left_out

    def count_rows(self, counted: Counts) -> None:
        """Set the rows read to those packed or left out: the rows of a stream are unknown in advance."""
        counted.read_what_came()

    def end(self, counted: Counts) -> str | None:
        """Return a warning or None. Raises `DataError` if the epoch had no pack: no other epoch would have one."""
        if not counted.num_packs:
            raise DataError(f"epoch {self.epoch} has no pack; its rows were left out: {by_reason(counted.num_dropped)}")
        return warning_of_left_out(counted.num_dropped, num_of=counted.num_read, what=self.config.what_is_packed)

    # -- the state in a checkpoint ----------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the packs of every reader."""
        return {
            "num_ranks": self.num_ranks,
            "num_workers": self.progress.num_workers,
            "seed": self.seed,
            **(self.saved_rows.fingerprint(self.dataset.mix) if self.sources else _of_stream(self.dataset)),
            **self.config.pack_options(),
            **self.config.objective(),
        }

    def state(self) -> dict[str, Any]:
        """Return the epoch. `rank_state` has the states of the readers, which each rank saves for itself."""
        return {"epoch": self.epoch}

    def rank_state(self) -> dict[str, Any] | None:
        """Return the states of this rank's readers."""
        return self.progress.state()

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Let the readers continue from their saved states."""
        assert rank_state is not None
        self.progress = ReaderProgress.of(rank_state)
        self.packs.restore(self.progress)

    def _warn_of_shared_rows(self, num_shares: int, *, is_first: bool) -> None:
        if is_first and num_shares > 1 and not self.dataset.has_shards_for(num_shares):
            logger.warning(
                "the stream has %d shards for %d readers (ranks x workers): each reads all rows and encodes every "
                "%dth. Split the data into at least %d files to spare the reading",
                self.dataset.num_shards, num_shares, num_shares, num_shares,
            )  # fmt: skip


def _of_stream(stream: StreamedRows) -> dict[str, Any]:
    """Return what identifies a stream: the number of its shards, and its first rows."""
    return {
        "num_shards": stream.num_shards,
        "data": digest_of(*map(row_bytes, stream.first_rows(NUM_ROWS_COMPARED))),
    }


def _left_out(records: list[PackRecord]) -> list[LeftOut]:
    return [left_out for record in records for left_out in record.left_out]
