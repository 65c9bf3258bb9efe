"""The feed of rows that come without a length: readers pack their shares, ranks keep in step, one pack at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from swift_vlpack.errors import DataError
from swift_vlpack.feed.agreement import Voting, in_step
from swift_vlpack.feed.buffered import BufferedPackingDataset, ReaderProgress
from swift_vlpack.feed.collate import Batch, batch_of
from swift_vlpack.feed.feed import EpochStart, MakeLoader
from swift_vlpack.feed.packs import packed_samples
from swift_vlpack.feed.run_rows import RunRows, digest_of
from swift_vlpack.plan.advice import long_row_warning
from swift_vlpack.remedies import warning_of_left_out
from swift_vlpack.rows.samples import LeftOut, PackRecord
from swift_vlpack.rows.source import row_bytes
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.runlog.telemetry import Telemetry
from swift_vlpack.words import by_reason

logger = logging.getLogger(__name__)

NUM_ROWS_COMPARED = 16
"""The beginning of a stream stands for its data: to read more than that would cost what streams are there to save."""


class StreamedFeed:
    """Packs as their readers make them."""

    kind = "buffer"
    leads_back = False
    batches_left = None
    is_finished = False

    def __init__(self, packs: BufferedPackingDataset, num_workers: int) -> None:
        self.unpacked_batch_size = 1
        self.objective: dict[str, Any] = {}
        self.packs = packs
        self.config = packs.config
        self.dataset = packs.dataset
        self.seed = packs.seed
        self.num_ranks = packs.num_ranks
        self.progress = ReaderProgress(num_workers)
        self._left_out_behind: list[LeftOut] = []
        self._has_warned_of_length = False

    @cached_property
    def rows(self) -> RunRows:
        """None of a stream."""
        return RunRows(self.dataset)

    @property
    def epoch(self) -> int:
        """The number of the epoch that was begun or resumed."""
        return self.packs.epoch

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the packs of every reader follow from."""
        data = self.dataset
        return {
            "num_ranks": self.num_ranks,
            "num_workers": self.progress.num_workers,
            "seed": self.seed,
            **(_of_stream(data) if isinstance(data, StreamedRows) else self.rows.fingerprint(data)),
            **self.config.pack_options(),
            **self.config.objective(),
            **self.objective,
        }

    def begin(self, epoch: int) -> EpochStart:
        """Let the readers come to an epoch."""
        self.packs.set_epoch(epoch)
        return EpochStart()

    def batches_behind(self, accumulation: int) -> int:
        """All that were trained: the readers go on by themselves, and the trainer steps where it would have stepped."""
        return self.progress.num_trained

    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """A loader whose workers read shares of their own."""
        # Now, and not at the first vote: making a group is a point that all ranks have to come to.
        self._ranks = ranks()
        self._empty_row = options["collate_fn"]
        self._device = options.get("device")
        loader = make(self.packs, feed=self, batch_size=1, **options)
        self._warn_of_shared_rows(self.num_ranks * max(1, loader.num_workers), is_first=rank == 0)
        return loader

    def batches(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """As many as on every other rank."""
        return in_step(self._trainable(loaded), self._empty, self._ranks)

    def fill_up(self, num_missing: int) -> list[Batch]:
        """Rows without loss. The trainer steps after every so many batches of an epoch whose length it does not know:
        the gradients of an incomplete group would end in the next epoch's first step, with its number of tokens.
        """
        return [self._empty() for _ in range(num_missing)]

    def _empty(self) -> Batch:
        row: Batch = self._empty_row([packed_samples([], self.epoch, -1, self.config, ())])
        return row if self._device is None else row.to(self._device)

    def _trainable(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Packs with a sample. What one without has to tell goes with the next, or is told behind the last."""
        empty: list[PackRecord] = []
        for batch in loaded:
            assert batch.record is not None
            record = batch.record
            if not record.sample_ids:
                empty.append(record)
                continue
            told = replace(
                record,
                left_out=(*_left_out(empty), *record.left_out),
                progress=tuple(state for one in (*empty, record) for state in one.progress),
            )
            empty = []
            yield batch_of(batch, told, batch.beside)
        self._left_out_behind = _left_out(empty)

    def consumed(self, records: Sequence[PackRecord]) -> None:
        """Note where the readers of these packs stand."""
        for record in records:
            self.progress.trained(record)
        if not self._has_warned_of_length:
            num_tokens = np.array([sum(record.lengths) for record in records], dtype=np.int64)
            if warning := long_row_warning(num_tokens, self.config):
                self._has_warned_of_length = True
                logger.warning("%s", warning)

    def left_out_behind(self) -> list[LeftOut]:
        """What the readers of this rank left out behind their last packs."""
        left_out, self._left_out_behind = self._left_out_behind, []
        return left_out

    def count_rows(self, counted: Telemetry) -> None:
        """Every row that was packed or left out; nobody knew of it before it was read."""
        counted.read_what_came()

    def end(self, counted: Telemetry) -> str | None:
        """An epoch without a pack is an error: another one would have none either, for ever."""
        if not counted.num_packs:
            raise DataError(
                f"epoch {self.epoch} has no pack; of its rows were left out: {by_reason(counted.num_dropped)}"
            )
        return warning_of_left_out(counted.num_dropped, num_of=counted.num_read, what=self.config.what_is_packed)

    def state(self) -> dict[str, Any]:
        """The epoch; where the readers are is a matter of each rank."""
        return {"epoch": self.epoch}

    def rank_state(self) -> dict[str, Any] | None:
        """Where the readers of this rank are."""
        return self.progress.state()

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Let the readers go on where they were."""
        assert rank_state is not None
        self.progress = ReaderProgress.of(rank_state)
        self.packs.restore(self.progress)

    def _warn_of_shared_rows(self, num_shares: int, *, is_first: bool) -> None:
        rows = self.dataset
        if is_first and num_shares > 1 and isinstance(rows, StreamedRows) and not rows.has_shards_for(num_shares):
            logger.warning(
                "the stream has %d shards for %d readers (ranks x workers): each reads all rows and encodes every "
                "%dth. Split the data into at least %d files to spare the reading",
                getattr(rows.rows, "num_shards", 1), num_shares, num_shares, num_shares,
            )  # fmt: skip


def _of_stream(stream: StreamedRows) -> dict[str, Any]:
    return {
        "num_shards": getattr(stream.rows, "num_shards", 1),
        "data": digest_of(*map(row_bytes, stream.first_rows(NUM_ROWS_COMPARED))),
    }


def _left_out(records: list[PackRecord]) -> list[LeftOut]:
    return [left_out for record in records for left_out in record.left_out]
