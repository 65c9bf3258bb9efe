"""Pack samples as rows come: the iterable form of `PackingDataset`.

Every dataloader worker of every rank is a *reader*: it reads its own share of the rows (`plan/shares.py`), encodes them
and packs them, so no sample goes from worker to worker.

*Every state has the same future*: each pack carries the state of its reader after the pack, as JSON, and a reader that
begins with this state makes the packs that the other one would have made next. Four facts make it so:

1. The rows of a share have numbers. Read again, a row has the same content and draws the same random numbers.
2. The packer decides by the ids and lengths of the samples that wait; its state is these numbers, and no tensor.
3. A reader that resumes encodes the waiting samples again, before any new row. One that has another length by now is
   refused, because the data has changed; one that cannot be read any more is left out and counted.
4. Only what was trained counts. The training process keeps the state of each reader after its last trained pack
   (`ReaderProgress`), and packs that were made ahead of training are made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import StateMismatch
from swift_vlpack.feed.failures import counted_failure
from swift_vlpack.feed.packs import Packs, packed_samples
from swift_vlpack.plan.items import Item, ItemId
from swift_vlpack.plan.packer import Packer
from swift_vlpack.plan.parts import Span
from swift_vlpack.plan.shares import Share, share_of
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.cutting import in_parts
from swift_vlpack.rows.encoder import RowEncoder, Template
from swift_vlpack.rows.samples import Encoded, LeftOut, PackedSamples, PackRecord, SampleError

WorkerState = dict[str, Any]


class StreamedPackingDataset(Packs, IterableDataset[PackedSamples]):
    """Encode row by row, hold `packing_buffer` samples, and yield packs as they fill.

    `rank` of `num_ranks` and the dataloader worker that iterates decide which share of the rows is read.
    """

    def __init__(
        self,
        dataset: Any,
        template: Template | None,
        config: PackingConfig,
        *,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(dataset, template, config, seed=seed, num_ranks=num_ranks)
        if self.sources and self.dataset.mix.ratio_by != "rows":
            self.dataset.mix.schedule(0)  # raises now, and not in a worker: ratios by tokens need lengths
        self.rank = rank
        self._restored: ReaderProgress | None = None

    def __repr__(self) -> str:
        return (
            f"<StreamedPackingDataset: epoch {self.epoch} of {self.dataset!r}, packs of {self.config.packing_length} "
            f"tokens, rank {self.rank} of {self.num_ranks}>"
        )

    def preview(self, num_samples: int) -> Iterator[Encoded]:
        """Yield the first samples of epoch 0, encoded when they are asked for; skip rows that fail.

        These are the first rows, not the samples of the first pack: to fill a pack takes a whole buffer of rows.
        """
        cutter = self.dataset.encoder.cutter
        read = chain.from_iterable(in_parts(row, cutter) for row in self.dataset.samples(0))
        return islice((sample for _, sample in read if isinstance(sample, dict)), num_samples)

    def restore(self, progress: ReaderProgress) -> None:
        """Continue the saved epoch after the last pack that was trained."""
        self._restored = progress
        self.set_epoch(progress.epoch)

    def __iter__(self) -> Iterator[PackedSamples]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        saved = None
        if self._restored is not None and self._restored.epoch == self.epoch:
            # A dataloader asks worker 0 first, but the saved run would have asked worker `turn` next: so worker 0 takes
            # the part of worker `turn`, and so on.
            worker = (worker + self._restored.turn) % num_workers
            saved = self._restored.workers.get(worker)
        buffer = _Buffer(self.config, self.epoch, worker, seed=self.seed + self.epoch, encoder=self.dataset.encoder)
        if saved is not None:
            buffer.load(saved)
        return buffer.packs(self.dataset, share_of(self.rank, self.num_ranks, worker, num_workers))


class ReaderProgress:
    """Keep how far a rank has trained an epoch: its batches, and the latest state of each of its workers."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = max(1, num_workers)
        self.epoch = 0
        self.turn = 0
        self.num_trained = 0
        """Batches of the epoch, including those without loss, so that all ranks have the same number."""
        self.workers: dict[int, WorkerState] = {}

    def trained(self, record: PackRecord) -> None:
        """Count a trained pack and keep its states. The first pack of another epoch starts a new count."""
        # Use the epoch of the pack, because readers may be in the next epoch already.
        if record.epoch != self.epoch:
            self.epoch, self.turn, self.num_trained, self.workers = record.epoch, 0, 0, {}
        self.num_trained += 1
        for state in record.progress:
            self.workers[state["worker"]] = state
            # The dataloader asks this worker next, or the first one after it that is not at its end.
            self.turn = (state["worker"] + 1) % self.num_workers

    def state(self) -> dict[str, Any]:
        """Return the progress as JSON: positions of the workers, and ids and lengths of the samples that wait."""
        return {
            "num_workers": self.num_workers,
            "epoch": self.epoch,
            "turn": self.turn,
            "num_trained": self.num_trained,
            "workers": [self.workers[worker] for worker in sorted(self.workers)],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ReaderProgress:
        """Restore a state returned by `state()`."""
        progress = cls(state["num_workers"])
        progress.epoch, progress.turn, progress.num_trained = state["epoch"], state["turn"], state["num_trained"]
        progress.workers = {saved["worker"]: saved for saved in state["workers"]}
        return progress


class _Buffer:
    """Hold the encoded samples of a reader that wait for a pack, while the packer decides by their lengths.

    The packer identifies a sample by an id with which it is found again after a resume:

        number                  a whole row, by its number in the share (0, 1, 2 ...)
        (number, part)          a part of a row
    """

    def __init__(self, config: PackingConfig, epoch: int, worker: int, *, seed: int, encoder: RowEncoder) -> None:
        self._config = config
        self._cutter = encoder.cutter
        self._epoch = epoch
        self._worker = worker
        self._packer = Packer(config, seed=seed, on_drop=self._dropped, label=self._name)
        self._samples: dict[ItemId, Encoded | SampleError] = {}
        """The samples that wait. An error stands for one that could be encoded before the run was interrupted."""
        self._ready: deque[tuple[Item, ...]] = deque()
        self._left_out: list[LeftOut] = []
        self._num_read = 0
        self._num_failed_in_a_row = 0
        self._num_packs = 0
        self._is_at_end = False

    def packs(self, dataset: Any, share: Share) -> Iterator[PackedSamples]:
        """Pack a share. One pack is held back, so that samples left out at the end can go into its record."""
        held = self._held_rows()
        rows = dataset.samples(self._epoch, share, start=self._num_read, held=set(held))
        # Do this first, because the iterator yields the rows of waiting samples before new rows.
        for number, items in held.items():
            self._encode_again(number, items, next(rows, None))
        if not self._is_at_end:
            for row in rows:
                self._take(row)
                while len(self._ready) > 1:
                    yield self._next()
            self._ready += [pack.items for pack in self._packer.flush()]
            self._is_at_end = True
        while self._ready:
            yield self._next()
        if self._left_out:
            yield self._pack([])  # without samples: only its record is needed

    def _take(self, row: Encoded | SampleError) -> None:
        number = self._num_read
        self._num_read += 1
        if isinstance(row, SampleError):
            self._num_failed_in_a_row += 1
            self._left_out.append(counted_failure(row, self._num_failed_in_a_row))
            return
        self._num_failed_in_a_row = 0
        for span, sample in in_parts(row, self._cutter):
            if isinstance(sample, LeftOut):
                self._left_out.append(sample)
            elif not isinstance(sample, SampleError):
                key = _item_id(number, span)
                self._samples[key] = sample
                self._ready += [pack.items for pack in self._packer.push(_item(key, sample))]

    def _next(self) -> PackedSamples:
        samples = []
        for item in self._ready.popleft():
            sample = self._samples.pop(item.id)
            if isinstance(sample, SampleError):
                self._left_out.append(counted_failure(sample, 1))
            else:
                samples.append(sample)
        return self._pack(samples)

    def _pack(self, samples: list[Encoded]) -> PackedSamples:
        left_out, self._left_out = self._left_out, []
        self._num_packs += 1
        pack = packed_samples(samples, self._epoch, self._num_packs - 1, self._config, left_out)
        # Take the state now, when the samples of this pack no longer wait: it is the state after the pack.
        pack.record = replace(pack.record, progress=(self.state(),))
        return pack

    def _name(self, key: ItemId) -> str:
        sample = self._samples[key]
        return str(sample.sample_id if isinstance(sample, SampleError) else sample["sample_id"])

    def _dropped(self, item: Item, reason: Reason) -> None:
        sample = self._samples.pop(item.id)
        if isinstance(sample, SampleError):
            self._left_out.append(counted_failure(sample, 1))
            return
        said = f"{item.length} tokens, {item.images} images"
        self._left_out.append(LeftOut(sample["sample_id"], reason.value, said))

    # -- the state of a reader ----------------------------------------------------------------------------------------

    def state(self) -> WorkerState:
        """Return, as JSON without tensors, what a new buffer needs to make the same packs from here on.

        Left-out samples are not part of the state, because the record of the pack has them.
        """
        return {
            "worker": self._worker,
            "num_read": self._num_read,
            "num_packs": self._num_packs,
            "num_failed_in_a_row": self._num_failed_in_a_row,
            "is_at_end": self._is_at_end,
            "ready": [[list(item) for item in items] for items in self._ready],
            "packer": self._packer.state(),
        }

    def load(self, state: WorkerState) -> None:
        """Restore a state returned by `state()`. The waiting samples are encoded when `packs` begins."""
        self._num_read = state["num_read"]
        self._num_packs = state["num_packs"]
        self._num_failed_in_a_row = state["num_failed_in_a_row"]
        self._is_at_end = state["is_at_end"]
        self._ready = deque(tuple(_item_from(item) for item in items) for items in state["ready"])
        self._packer.load(state["packer"])

    def _held_rows(self) -> dict[int, list[Item]]:
        """Group the waiting items by the number of their row, in the order in which rows are read again."""
        rows: dict[int, list[Item]] = {}
        for item in (*self._packer.held, *chain.from_iterable(self._ready)):
            rows.setdefault(_row_of(item.id), []).append(item)
        return dict(sorted(rows.items()))

    def _encode_again(self, number: int, items: Sequence[Item], row: Encoded | SampleError | None) -> None:
        """Take the samples that waited from their row, read again."""
        if row is None:
            raise StateMismatch(
                f"the saved state holds row {number} of a share of the data, but the share now ends before it: "
                "the data has changed. Give the data of the saved run, or start without --resume_from_checkpoint"
            )
        if isinstance(row, SampleError):
            self._samples |= {item.id: row.of_part(_part_of(item)) for item in items}
            return
        samples = {_item_id(number, span): sample for span, sample in in_parts(row, self._cutter)}
        self._samples |= {item.id: _unchanged(samples.get(item.id), row, item) for item in items}


def _item_id(number: int, span: Span | None) -> ItemId:
    return number if span is None else (number, span.number)


def _item_from(saved: Sequence[Any]) -> Item:
    key, *numbers = saved
    return Item(tuple(key) if isinstance(key, list) else key, *numbers)  # JSON knows no tuples


def _row_of(key: ItemId) -> int:
    number = key[0] if isinstance(key, (tuple, list)) else key
    assert isinstance(number, int)
    return number


def _part_of(item: Item) -> int | None:
    return item.id[1] if isinstance(item.id, tuple) else None


def _unchanged(sample: Encoded | SampleError | LeftOut | None, row: Encoded, item: Item) -> Encoded:
    """Return a waiting sample that was encoded again. Raises `StateMismatch` if its length has changed."""
    if isinstance(sample, dict) and sample["length"] == item.length:
        return sample
    now = f"{sample['length']} tokens" if isinstance(sample, dict) else "another number of parts"
    name = sample["sample_id"] if isinstance(sample, dict) else row["sample_id"]
    raise StateMismatch(
        f"{name} has {now}, but had {item.length} tokens when the state was saved: data or template have changed. Give "
        "those of the saved run, or start without --resume_from_checkpoint"
    )


def _item(key: ItemId, sample: Encoded) -> Item:
    size = size_of(sample)
    return Item(key, size.length, size.images, size.patches)
