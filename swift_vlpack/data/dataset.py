"""PackingDataset: packs of encoded samples, planned ahead of time or buffered as they come.

`PackingDataset(dataset, template, config)` chooses by `packing_mode` and by whether the data is sized:

  PlannedPackingDataset    map-style: `len()` packs this epoch, `[i]` encodes the samples of pack i and no others
  BufferedPackingDataset   iterable: encodes row by row, holds `packing_buffer` of them, yields packs as they fill

Both yield `PackedSamples`, a list of encoded samples for the template's own collator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from tqdm import tqdm

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.errors import ConfigError, DataError
from swift_vlpack.core.packer import Packer
from swift_vlpack.core.plan import Plan
from swift_vlpack.core.planner import plan
from swift_vlpack.core.records import Dropped, Item, ItemId, Pack
from swift_vlpack.data.fusion import FusionCaptionDataset, RowSource, StreamedRows, Template
from swift_vlpack.data.lengths import size_of
from swift_vlpack.data.samples import (
    Encoded,
    LeftOut,
    PackAddress,
    PackedSamples,
    PackRecord,
    SampleError,
    SampleId,
    TooManyFailures,
    num_images,
)

logger = logging.getLogger(__name__)

NUM_ROWS_SHOWN = 500_000
"""Planning more rows than that takes long enough for a progress bar."""


class PackingDataset(Dataset[PackedSamples]):
    """Packs of encoded samples. Sets `template.packing` and `padding_free`; `set_epoch` mixes and packs anew."""

    def __new__(cls, dataset: Any, template: Template, config: PackingConfig, **options: Any) -> PackingDataset:
        """Choose the form: planned for sized data, buffered for streams or where the config asks for it."""
        if cls is not PackingDataset:
            return super().__new__(cls)
        is_sized = hasattr(dataset, "__len__")
        if config.packing_mode == "plan" and not is_sized:
            raise ConfigError(
                "packing_mode=plan needs data with a length, and this has none; set packing_mode=buffer (and max_steps)"
            )
        is_planned = config.packing_mode != "buffer" and is_sized
        return super().__new__(PlannedPackingDataset if is_planned else BufferedPackingDataset)

    def __init__(self, dataset: Any, template: Template, config: PackingConfig) -> None:
        template.packing = True
        template.padding_free = True
        self.template = template
        self.config = config
        self.dataset = _fused(dataset, template)
        self.epoch = 0

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For pickle (spawned workers) and copy, which call `__new__` before they fill what it made."""
        return self.dataset, self.template, self.config

    def set_epoch(self, epoch: int) -> None:
        """Let the sources be mixed anew, then pack anew."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class PlannedPackingDataset(PackingDataset):
    """The map-style form: the plan of the epoch, decided before a single image is opened."""

    def __init__(  # noqa: PLR0913 - what it packs, then how often and for whom
        self,
        dataset: Any,
        template: Template,
        config: PackingConfig,
        *,
        seed: int = 0,
        num_ranks: int = 1,
        num_epochs: int = 1,
        num_packs: int | None = None,
    ) -> None:
        """Plan for `num_epochs`, or, where steps are given instead, for as many as `num_packs` packs take."""
        super().__init__(dataset, template, config)
        self.seed = seed
        self.num_ranks = num_ranks
        self.dataset.measure()
        self._plan: Plan | None = None
        self._num_packs = self._num_packs_of_longest_epoch(max(1, num_epochs), num_packs)
        self._num_failed_in_a_row = 0

    @property
    def plan(self) -> Plan:
        """The packs of the current epoch; indices are positions in the epoch's schedule."""
        if self._plan is None:
            planned = self._planned(is_logged=True)
            # An epoch beyond `num_epochs` may need more packs than those that were looked at.
            num_packs = max(self._num_packs, _rounded_up(len(planned), self.num_ranks))
            self._plan = planned.align(self.num_ranks, num_packs=num_packs)
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Mix, then plan anew when the packs are next asked for."""
        if epoch != self.epoch:
            self._plan = None
        super().set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int | PackAddress) -> PackedSamples:
        return self.load(index if isinstance(index, PackAddress) else self.address(index))

    def __getstate__(self) -> dict[str, Any]:
        """Workers get addresses, so the plan stays at home."""
        return {**self.__dict__, "_plan": None}

    def address(self, index: int) -> PackAddress:
        """What pack `index` of the current epoch is made of."""
        return PackAddress(self.epoch, index, tuple(self.dataset.address(position) for position in self.plan[index]))

    @property
    def packed_length(self) -> list[int]:
        """Tokens of every pack, under the name ms-swift's statistics ask for."""
        return self.plan.num_tokens_per_pack.tolist()

    def left_out_by_plan(self) -> list[LeftOut]:
        """Scheduled rows of the epoch that are in no pack, with reasons."""
        unreadable = np.flatnonzero(self.dataset.scheduled_sizes().lengths == 0)
        left_out: list[tuple[int, str | None]] = [(position, None) for position in unreadable.tolist()]
        left_out += [(position, reason) for reason, some in self.plan.dropped.items() for position in some.tolist()]
        where = [(self.dataset.address(position), reason) for position, reason in left_out]
        return [LeftOut(self.dataset.sample_id(at), reason or self.dataset.failure(at)) for at, reason in where]

    def load(self, address: PackAddress) -> PackedSamples:
        """Encode the samples of a pack. The true length decides: what does not fit is left out, with a reason."""
        kept: list[Encoded] = []
        left_out: list[LeftOut] = []
        num_tokens = 0
        for where in address.samples:
            try:
                sample = self.dataset.encode(where)
            except SampleError as error:
                left_out.append(self._failed(error))
                continue
            self._num_failed_in_a_row = 0
            if kept and num_tokens + sample["length"] > self.config.packing_length:
                left_out.append(LeftOut(sample["sample_id"], "longer_than_planned"))
                logger.warning(
                    "%s: left out: %d tokens do not fit beside the %d of its pack (packing_length %d)",
                    sample["sample_id"], sample["length"], num_tokens, self.config.packing_length,
                )  # fmt: skip
                continue
            kept.append(sample)
            num_tokens += sample["length"]
        return _packed(kept, address.epoch, address.number, self.config, left_out)

    def _sample_id(self, position: int) -> SampleId:
        return self.dataset.sample_id(self.dataset.address(position))

    def _failed(self, error: SampleError) -> LeftOut:
        self._num_failed_in_a_row += 1
        return _left_out(error, self._num_failed_in_a_row, self.config.packing_max_failures)

    def _planned(self, *, is_logged: bool = False) -> Plan:
        """Plan the rows that can be encoded; the plan's indices are positions in the schedule."""
        sizes = self.dataset.scheduled_sizes()
        usable = np.flatnonzero(sizes.lengths > 0)
        if not len(usable):
            raise DataError(f"epoch {self.epoch}: none of the {len(sizes)} rows can be packed; the log has the reasons")
        made = plan(
            sizes.lengths[usable],
            self.config,
            images=sizes.images[usable],
            patches=sizes.patches[usable],
            seed=self.seed + self.epoch,
            label=(lambda item: str(self._sample_id(int(usable[item])))) if is_logged else None,
        )
        if not len(made):
            raise DataError(f"epoch {self.epoch} has no pack; all {len(usable)} rows were left out: {made.num_dropped}")
        return made if len(usable) == len(sizes) else made.renumbered(usable, sizes.columns)

    def _num_packs_of_longest_epoch(self, num_epochs: int, num_packs: int | None) -> int:
        """All epochs get as many packs as the one that needs most, so that steps are known from the start."""
        most = epoch = 0
        is_quick = len(self.dataset) * num_epochs < NUM_ROWS_SHOWN
        with tqdm(desc="Planning epochs", dynamic_ncols=True, disable=is_quick) as bar:
            while epoch < num_epochs if num_packs is None else epoch * most < num_packs or not epoch:
                self.set_epoch(epoch)
                most = max(most, _rounded_up(len(self._planned()), self.num_ranks))
                epoch += 1
                bar.update()
        self.set_epoch(0)
        return most


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
            last = _packed([], self._epoch, self._num_packs, self._config, self._left_out)
        elif last is not None and self._left_out:
            last.record = replace(last.record, left_out=(*last.record.left_out, *self._left_out))
        if last is not None:
            yield last

    def _in_order(self, samples: Iterable[Encoded | SampleError]) -> Iterator[Pack]:
        num_failed_in_a_row = 0
        for number, sample in enumerate(samples):
            if isinstance(sample, SampleError):
                num_failed_in_a_row += 1
                self._left_out.append(_left_out(sample, num_failed_in_a_row, self._config.packing_max_failures))
                continue
            num_failed_in_a_row = 0
            self._waiting[number] = sample
            yield from self._packer.push(Item(number, *size_of(sample)))
        yield from self._packer.flush()

    def _load(self, pack: Pack) -> PackedSamples:
        samples = [self._waiting.pop(item.id) for item in pack.items]
        left_out, self._left_out = self._left_out, []
        self._num_packs += 1
        return _packed(samples, self._epoch, self._num_packs - 1, self._config, left_out)

    def _name(self, number: ItemId) -> str:
        return str(self._waiting[number]["sample_id"])

    def _dropped(self, item: Item, reason: Dropped) -> None:
        sample = self._waiting.pop(item.id)
        self._left_out.append(LeftOut(sample["sample_id"], reason.value))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _packed(
    samples: Sequence[Encoded], epoch: int, number: int, config: PackingConfig, left_out: Sequence[LeftOut]
) -> PackedSamples:
    lengths = tuple(sample["length"] for sample in samples)
    record = PackRecord(
        epoch=epoch,
        number=number,
        sample_ids=tuple(sample["sample_id"] for sample in samples),
        lengths=lengths,
        num_images=sum(map(num_images, samples)),
        single_long=len(lengths) == 1 and lengths[0] > config.packing_length,
        left_out=tuple(left_out),
    )
    return PackedSamples(samples, record)


def _left_out(error: SampleError, num_in_a_row: int, max_failures: int) -> LeftOut:
    """Log and count a failure; too many in a row are no accident."""
    logger.warning("%s: left out: %s: %s", error.sample_id, error.reason, error.detail)
    if num_in_a_row > max_failures:
        raise TooManyFailures(
            f"{num_in_a_row} rows in a row could not be encoded, the last is {error}. "
            "Mend the data, or raise packing_max_failures"
        ) from error
    return LeftOut(error.sample_id, error.reason)


def _fused(dataset: Any, template: Template) -> Any:
    """A FusionCaptionDataset over what was given: itself, or sized rows as its one source, or a stream of rows."""
    if isinstance(dataset, (FusionCaptionDataset, StreamedRows)):
        return dataset
    if hasattr(dataset, "__len__"):
        return FusionCaptionDataset([RowSource(name="data", rows=dataset)], template)
    return StreamedRows(dataset, template)
