"""An epoch as a value: what is drawn, which packs that becomes, how ranks share them, how far they have come.

    recipe (sizes, mix, config, seed, ranks) + number of the epoch + cuts  ->  EpochPlan

Nothing of it is ever set from outside. Its digest is of the packs in the very order that saved numbers count in: drawn,
packed, cut for the ranks, matched in cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.epoch.cuts import Cut, is_finished, num_consumed, replay, share
from swift_vlpack.core.epoch.mix import Mix, Schedule
from swift_vlpack.core.epoch.plan import Plan
from swift_vlpack.core.epoch.planner import plan
from swift_vlpack.core.errors import DataError
from swift_vlpack.core.packing.alone import is_left_out

LENGTH, IMAGES, PATCHES, SUPERVISED = range(4)
"""Columns of sizes; a row of length 0 cannot be encoded."""
Sizes = NDArray[np.integer[Any]]  # (4, num_rows)
NameOfRow = Callable[[int, int], str]
"""What the log calls a row of a source, both by number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """All that the epochs of a run follow from, beside their numbers."""

    sizes: tuple[Sizes, ...]
    """Of the rows of each source."""
    mix: Mix
    config: PackingConfig
    seed: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedEpoch:
    """The packs of an epoch before ranks share them; indices are positions in its schedule."""

    epoch: int
    schedule: Schedule
    sizes: Sizes
    """Of every position of the schedule."""
    packs: Plan

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens at each position of the schedule; 0 where the row cannot be encoded."""
        lengths: NDArray[Any] = self.sizes[LENGTH]
        return lengths

    @property
    def images(self) -> NDArray[Any]:
        """Images at each position."""
        images: NDArray[Any] = self.sizes[IMAGES]
        return images

    @property
    def patches(self) -> NDArray[Any]:
        """Vision patches at each position."""
        patches: NDArray[Any] = self.sizes[PATCHES]
        return patches

    @property
    def supervised(self) -> NDArray[Any]:
        """Tokens with a label at each position."""
        supervised: NDArray[Any] = self.sizes[SUPERVISED]
        return supervised

    def samples(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Source and row at each of these positions."""
        return [self.schedule[position] for position in positions]

    @property
    def unreadable(self) -> NDArray[np.int64]:
        """Positions of rows that cannot be encoded, which are in no pack."""
        return np.flatnonzero(self.lengths == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan(PackedEpoch):
    """The packs of an epoch as ranks train them: `packs` is the shared order."""

    unshared: Plan
    """The packs before any is cut to give ranks and epochs equally many."""
    cuts: tuple[Cut, ...]
    """How far the epoch had come when it was begun or resumed; the last cut is that of the present ranks."""

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the packs."""
        return self.cuts[-1].num_ranks

    @property
    def num_consumed(self) -> int:
        """Packs that were trained on, by all ranks there ever were."""
        return num_consumed(self.cuts)

    @property
    def num_left_per_rank(self) -> int:
        """Packs that each rank trains on, from where the epoch was begun or resumed."""
        return (self.cuts[-1].num_packs - self.cuts[-1].num_consumed) // self.num_ranks

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left of it."""
        return is_finished(self.cuts)

    def numbers_left(self, rank: int) -> range:
        """The packs of a rank, from where the epoch was begun or resumed."""
        return self.packs.for_rank(rank)[self.cuts[-1].num_consumed // self.num_ranks :]

    def digest(self) -> str:
        """Of what saved numbers count in: the packs, in their shared, aligned and balanced order."""
        return self.packs.digest()


def plan_epoch(
    recipe: Recipe,
    epoch: int,
    cuts: Sequence[Cut] = (),
    *,
    least_packs: int = 0,
    packed: PackedEpoch | None = None,
) -> EpochPlan:
    """Draw, pack and share an epoch, from where the cuts left it; a new one, without cuts, has `least_packs` or more.

    `packed` is what `pack_epoch` makes of it, where that was made ahead of time.
    """
    packed = packed or pack_epoch(recipe, epoch)
    packs, present = share(packed.packs, cuts, recipe.num_ranks, least_packs=least_packs)
    return EpochPlan(
        epoch=epoch,
        schedule=packed.schedule,
        sizes=packed.sizes,
        packs=packs,
        unshared=packed.packs,
        cuts=present,
    )


def pack_epoch(recipe: Recipe, epoch: int, name_of: NameOfRow | None = None) -> PackedEpoch:
    """Draw the rows of an epoch and pack them. With `name_of` the log names rows that are left out or alone."""
    config = recipe.config
    usable = [can_be_packed(sizes, config) for sizes in recipe.sizes]
    schedule = recipe.mix.schedule(epoch, usable, [sizes[LENGTH] for sizes in recipe.sizes])
    sizes = _sizes_at(schedule, recipe.sizes)
    # Rows that cannot be read never meet the packer: it has no length for them, and the account has its own reason.
    readable = np.flatnonzero(sizes[LENGTH])
    if not len(readable):
        raise DataError(f"epoch {epoch}: none of the {len(schedule)} rows can be packed; the log has the reasons")
    of_readable = sizes if len(readable) == len(schedule) else sizes[:, readable]
    made = plan(
        of_readable[LENGTH],
        config,
        images=of_readable[IMAGES],
        patches=of_readable[PATCHES],
        # Another one in every epoch, or packs of rows that are not mixed would come in the order of the epoch before.
        seed=recipe.seed + epoch,
        label=None if name_of is None else lambda item: name_of(*schedule[int(readable[item])]),
    )
    if not len(made):
        raise DataError(f"epoch {epoch} has no pack; all {len(readable)} rows were left out: {made.num_dropped}")
    # Length, images and patches; what is supervised decides nothing.
    packs = made if of_readable is sizes else made.renumbered(readable, sizes[: PATCHES + 1])
    return PackedEpoch(epoch=epoch, schedule=schedule, sizes=sizes, packs=packs)


def saved_digest(packed: PackedEpoch, cuts: Sequence[Cut]) -> str:
    """The digest of the packs that the last of these cuts counts in, whatever number of ranks shared them."""
    return replay(packed.packs, cuts).digest()


def can_be_packed(sizes: Sizes, config: PackingConfig) -> NDArray[np.bool_]:
    """Which rows can be in a pack. So all epochs have equally many samples, and none too few for the others' steps.

    A step needs one sample: no more steps than samples are ever asked for, because no epoch has more packs than
    samples, and packs can be cut down to one sample. (Where ratios count tokens the number of samples differs a little;
    `Epochs` looks whether it suffices.)
    """
    usable: NDArray[np.bool_] = sizes[LENGTH] > 0
    usable &= ~is_left_out(sizes[LENGTH], sizes[IMAGES], sizes[PATCHES], config)
    return usable


def _sizes_at(schedule: Schedule, sizes: Sequence[Sizes]) -> Sizes:
    found = np.zeros((SUPERVISED + 1, len(schedule)), dtype=np.int32)  # as a plan has them, which shares the memory
    for number, of_source in enumerate(sizes):
        here = schedule.source == number
        found[:, here] = of_source[:, schedule.row[here]]
    return found
