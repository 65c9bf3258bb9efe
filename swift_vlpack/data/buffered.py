"""Packs as samples come: the iterable form of `PackingDataset`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.packer import Packer
from swift_vlpack.core.records import Dropped, Item, ItemId, Pack
from swift_vlpack.data.dataset import PackingDataset, counted_failure, packed_samples
from swift_vlpack.data.fusion import Template
from swift_vlpack.data.lengths import size_of
from swift_vlpack.data.samples import Encoded, LeftOut, PackedSamples, SampleError


class BufferedPackingDataset(PackingDataset, IterableDataset[PackedSamples]):
    """The iterable form: a buffer of encoded samples, the packer over their lengths, packs as they fill.

    Every dataloader worker reads its own share of the rows: every n-th of the schedule.
    """

    def __init__(self, dataset: Any, template: Template, config: PackingConfig, *, seed: int = 0) -> None:
        super().__init__(dataset, template, config)
        self.seed = seed
        # Shared memory, so that workers that live on see the new epoch.
        self._shared_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration mixes and packs anew, in every worker."""
        super().set_epoch(epoch)
        self._shared_epoch[0] = epoch

    def __iter__(self) -> Iterator[PackedSamples]:
        super().set_epoch(int(self._shared_epoch[0]))
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        buffer = _Buffer(self.config, self.epoch, seed=self.seed + self.epoch)
        return buffer.packs(self.dataset.encoded(number, num_workers))


class _Buffer:
    """Encoded samples that wait for a pack: the core's packer decides, this holds the tensors."""

    def __init__(self, config: PackingConfig, epoch: int, *, seed: int) -> None:
        self._config = config
        self._epoch = epoch
        self._packer = Packer(config, seed=seed, on_drop=self._dropped, label=self._name)
        self._waiting: dict[ItemId, Encoded] = {}
        self._left_out: list[LeftOut] = []
        self._num_packs = 0

    def packs(self, samples: Iterable[Encoded | SampleError]) -> Iterator[PackedSamples]:
        """Pack what comes. One pack is kept back, so that what the end leaves out has a record to travel in."""
        last: PackedSamples | None = None
        for pack in self._in_order(samples):
            if last is not None:
                yield last
            last = self._load(pack)
        if last is None and self._left_out:
            last = packed_samples([], self._epoch, self._num_packs, self._config, self._left_out)
        elif last is not None and self._left_out:
            last.record = replace(last.record, left_out=(*last.record.left_out, *self._left_out))
        if last is not None:
            yield last

    def _in_order(self, samples: Iterable[Encoded | SampleError]) -> Iterator[Pack]:
        num_failed_in_a_row = 0
        for number, sample in enumerate(samples):
            if isinstance(sample, SampleError):
                num_failed_in_a_row += 1
                self._left_out.append(counted_failure(sample, num_failed_in_a_row, self._config.packing_max_failures))
                continue
            num_failed_in_a_row = 0
            self._waiting[number] = sample
            yield from self._packer.push(Item(number, *size_of(sample)))
        yield from self._packer.flush()

    def _load(self, pack: Pack) -> PackedSamples:
        samples = [self._waiting.pop(item.id) for item in pack.items]
        left_out, self._left_out = self._left_out, []
        self._num_packs += 1
        return packed_samples(samples, self._epoch, self._num_packs - 1, self._config, left_out)

    def _name(self, number: ItemId) -> str:
        return str(self._waiting[number]["sample_id"])

    def _dropped(self, item: Item, reason: Dropped) -> None:
        sample = self._waiting.pop(item.id)
        self._left_out.append(LeftOut(sample["sample_id"], reason.value))
