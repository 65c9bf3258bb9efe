"""Packs planned ahead of time: the map-style form of `PackingDataset`, and what it shares with the planned feed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.feed.epochs import Epochs, Extent
from swift_vlpack.feed.feed import count_left_out
from swift_vlpack.feed.packs import make_packing, rows_of
from swift_vlpack.feed.published import PublishedAddresses
from swift_vlpack.feed.reader import PackReader
from swift_vlpack.plan.epoch import EpochPlan, NameOfRow, Recipe
from swift_vlpack.plan.packs import Plan
from swift_vlpack.remedies import warning_of_left_out
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address, LeftOut, PackAddress, PackedSamples
from swift_vlpack.rows.source import RowSource
from swift_vlpack.runlog.telemetry import Telemetry
from swift_vlpack.words import counted


class PlannedPackingDataset(Dataset[PackedSamples]):
    """The map-style form: the plan of an epoch, decided before a single image is opened.

    `len()` packs this epoch, `[i]` encodes the samples of pack i and no others. `set_epoch` goes on to another epoch,
    which dataloader workers that live on learn of.
    """

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
        rows = rows_of(dataset, template)
        if not isinstance(rows, FusionCaptionDataset):
            raise DataError("data without a length cannot be planned; use PackingDataset, which packs it as it comes")
        make_packing(template, rows, config)
        rows.measure()
        self.template = template
        self.config = config
        self.dataset = rows
        self.seed = seed
        self.num_ranks = num_ranks
        recipe = recipe_of(rows, rows.sources, config, seed=seed, num_ranks=num_ranks)
        self._epochs = Epochs(recipe, Extent(num_epochs, num_packs), name_of=names_of(rows))
        self.num_packs = self._epochs.num_packs
        """Packs of every epoch; over all ranks. One beyond those that were looked at can have more."""
        self.reader = PackReader(rows, config, seed, self.num_packs)
        self._published = PublishedAddresses()
        self._epoch_plan: EpochPlan | None = self._epochs.plan(0)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: addresses are what they get."""
        if self._epoch_plan is not None and not self._published.is_there:
            self._published.publish(self._epoch_plan)
        return {**self.__dict__, "_epoch_plan": None, "_epochs": None, "dataset": None}

    def __repr__(self) -> str:
        if self._epoch_plan is None:
            return f"<PlannedPackingDataset of {counted(len(self), 'pack')}, a copy in another process>"
        return f"<PlannedPackingDataset: epoch {self.epoch} of {self.dataset!r}, {self.plan!r}>"

    @property
    def epoch_plan(self) -> EpochPlan:
        """The epoch that was set."""
        if self._epoch_plan is None:
            raise DataError("a copy of the packs in another process knows addresses only; ask the original")
        return self._epoch_plan

    @property
    def epoch(self) -> int:
        """The number of the epoch that was set."""
        return self.epoch_plan.epoch

    @property
    def plan(self) -> Plan:
        """The packs of the epoch; indices are positions in its schedule."""
        return self.epoch_plan.packs

    def set_epoch(self, epoch: int) -> None:
        """Mix the sources anew, and pack anew."""
        if epoch == self.epoch:
            return
        self._epoch_plan = self._epochs.plan(epoch)
        self._published.publish(self._epoch_plan)

    def __len__(self) -> int:
        return len(self._published if self._epoch_plan is None else self._epoch_plan)

    def __getitem__(self, index: int | PackAddress) -> PackedSamples:
        return self.reader[index if isinstance(index, PackAddress) else self.address(index)]

    def address(self, number: int) -> PackAddress:
        """What pack `number` of the epoch is made of."""
        is_elsewhere = self._epoch_plan is None or get_worker_info() is not None
        if is_elsewhere and self._published.is_there:
            return self._published.address(number)
        return address_of(self.epoch_plan, number)


def recipe_of(
    dataset: FusionCaptionDataset, sized: Sequence[RowSource], config: PackingConfig, *, seed: int, num_ranks: int
) -> Recipe:
    """What the epochs follow from, with the sizes that these sources have."""
    sizes, cut = [], []
    for source in sized:
        assert source.sizes is not None, f"{source.name} was not measured"
        if config.packing_overflow != "keep" and source.sizes.cut is None:
            raise DataError(
                f"source {source.name!r} was measured for rows that stay whole, and packing_overflow="
                f"{config.packing_overflow} cuts them; give it without sizes, and it is measured again"
            )
        sizes.append(source.sizes.columns)
        cut.append(source.sizes.cut)
    return Recipe(sizes=tuple(sizes), cut=tuple(cut), mix=dataset.mix, config=config, seed=seed, num_ranks=num_ranks)


def address_of(plan: EpochPlan, number: int) -> PackAddress:
    """What a pack is made of."""
    positions = plan.packs[number]
    sizes = tuple(map(tuple, plan.sizes[:, positions].T.tolist()))
    return PackAddress(plan.epoch, number % len(plan), tuple(Address(*at) for at in plan.samples(positions)), sizes)


def left_out_by(plan: EpochPlan, dataset: FusionCaptionDataset) -> list[LeftOut]:
    """Scheduled rows that are in no pack, with reasons."""

    def address(position: int) -> Address:
        return Address(*plan.sample(position))

    left_out = [dataset.failed(address(position)) for position in plan.unreadable.tolist()]
    for reason, positions in plan.packs.dropped.items():
        for position in positions.tolist():
            said = f"{plan.lengths[position]} tokens, {plan.images[position]} images"
            left_out.append(LeftOut(dataset.sample_id(address(position)), reason, said))
    return left_out


def count_rows(counted: Telemetry, plan: EpochPlan, dataset: FusionCaptionDataset) -> None:
    """Count all samples of an epoch, and those of them that are in no pack."""
    schedule, further = plan.schedule, plan.is_further_part
    num_further = np.bincount(schedule.source[further], minlength=len(schedule.names)).tolist()
    for name, num_samples, num in zip(schedule.names, schedule.num_rows_per_source, num_further, strict=True):
        counted.read(name, num_samples, num_further=num)
    for left_out in left_out_by(plan, dataset):
        count_left_out(counted, left_out)


def left_out_warning(plan: EpochPlan, left_out: Sequence[LeftOut], config: PackingConfig) -> str | None:
    """What to do about what an epoch leaves out, where that is too much."""
    reasons = Counter(one.reason for one in left_out)
    return warning_of_left_out(reasons, num_of=len(plan.schedule), what=config.what_is_packed)


def names_of(dataset: FusionCaptionDataset) -> NameOfRow:
    """What the log calls a row."""
    return lambda *where: str(dataset.sample_id(Address(*where)))
