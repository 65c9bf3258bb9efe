"""The training dataloader of buffer mode: workers read, encode and pack their shares; the ranks keep in step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from swift.utils import get_logger, is_master, to_device

from swift_vlpack.data.feeds.buffered import BufferedPackingDataset
from swift_vlpack.data.model.collate import Batch, batch_of
from swift_vlpack.data.rows.samples import LeftOut, PackedSamples, PackRecord
from swift_vlpack.data.rows.streams import StreamedRows
from swift_vlpack.host.ranks import num_ranks
from swift_vlpack.host.training.agreement import Ranks, in_step
from swift_vlpack.host.training.loader import PackLoader

logger = get_logger()


class StreamLoader(PackLoader):
    """The packs of one rank, equally many as on every other."""

    def __init__(
        self,
        packs: BufferedPackingDataset,
        device: Any = None,
        *,
        vote_timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        assert packs.num_ranks == num_ranks(), f"shares of {packs.num_ranks} ranks for {num_ranks()}"
        super().__init__(packs, device=device, batch_size=1, **options)
        self._ranks = Ranks(vote_timeout)
        self._warn_of_shared_rows()

    def __iter__(self) -> Iterator[Batch]:
        return in_step(self._trainable(), self.empty_batch, self._ranks)

    def empty_batch(self) -> Batch:
        """A row without loss."""
        record = PackRecord(epoch=self.dataset.epoch, number=-1, sample_ids=(), lengths=(), num_images=0)
        row: Batch = self.collate_fn([PackedSamples([], record)])
        return to_device(row, self.device) if self.device else row

    def _trainable(self) -> Iterator[Batch]:
        """Packs with a sample. What one without has to tell goes with the next, or stays with the data set."""
        empty: list[PackRecord] = []
        for batch in super().__iter__():
            record: PackRecord = batch.record
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
        self.dataset.left_out_behind = _left_out(empty)

    def _warn_of_shared_rows(self) -> None:
        rows, num_shares = self.dataset.dataset, self.dataset.num_ranks * max(1, self.num_workers)
        if is_master() and num_shares > 1 and isinstance(rows, StreamedRows) and not rows.has_shards_for(num_shares):
            logger.warning_once(
                f"the stream has {getattr(rows.rows, 'num_shards', 1)} shards for {num_shares} readers (ranks x "
                f"workers): each reads all rows and encodes every {num_shares}th. Split the data into at least "
                f"{num_shares} files to spare the reading"
            )


def _left_out(records: list[PackRecord]) -> list[LeftOut]:
    return [left_out for record in records for left_out in record.left_out]
