"""An epoch as a value: what is drawn, which packs that becomes, how ranks share them, how far they have come.

    recipe (sizes, mix, config, seed, ranks) + number of the epoch + cuts  ->  EpochPlan

Nothing of it is ever set from outside. Its digest is of the packs in the very order that saved numbers count in: drawn,
packed, cut for the ranks, matched in cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.cuts import Cut, is_finished, num_consumed, replay, share
from swift_vlpack.plan.items import is_left_out
from swift_vlpack.plan.mix import Mix, Schedule
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.parts import CutRows, Part, Span
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.plan.windows import can_be_in_windows, end_to_end

LENGTH, IMAGES, PATCHES, SUPERVISED = range(4)
"""Columns of sizes; a row of length 0 cannot be encoded."""
Sizes = NDArray[np.integer[Any]]  # (4, num_rows)
NameOfRow = Callable[..., str]
"""What the log calls a sample: source and row by number, and the span of a part of a row."""
Where = tuple[int, int] | tuple[int, int, Span]
"""Source and row of a sample, and which part of the row it is."""
_NOT_CUT = Span(0, 0, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """All that the epochs of a run follow from, beside their numbers."""

    sizes: tuple[Sizes, ...]
    """Of the rows of each source."""
    cut: tuple[CutRows | None, ...] = ()
    """Of each source the parts of rows that are longer than a pack; empty where rows stay as they are."""
    mix: Mix
    config: PackingConfig
    seed: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnEpoch:
    """The samples of an epoch in order, which are rows and parts of rows."""

    epoch: int
    schedule: Schedule
    """A row that is cut is there once for each of its parts, one behind the other."""
    sizes: Sizes
    """Of every position of the schedule."""
    spans: NDArray[np.int32] | None = None
    """(5, num_positions): the fields of `Span`, of rows that are not cut 0; None where no row is."""

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

    def samples(self, positions: Sequence[int]) -> list[Where]:
        """What is at each of these positions."""
        return [self.sample(position) for position in positions]

    def sample(self, position: int) -> Where:
        """What is at a position."""
        span = _NOT_CUT if self.spans is None else Span(*self.spans[:, position].tolist())
        return self.schedule[position] if span.stop == 0 else (*self.schedule[position], span)

    @property
    def is_further_part(self) -> NDArray[np.bool_]:
        """Whether a position is a part of a row but not its part 0, by which the row is counted."""
        if self.spans is None:
            return np.zeros(len(self.schedule), dtype=bool)
        further: NDArray[np.bool_] = self.spans[0] > 0
        return further

    @property
    def num_rows(self) -> int:
        """Rows that were drawn, of which some may be there in several parts."""
        return len(self.schedule) - int(self.is_further_part.sum())

    @property
    def unreadable(self) -> NDArray[np.int64]:
        """Positions of rows that cannot be encoded, and of parts that cutting left out, which are in no pack."""
        return np.flatnonzero(self.lengths == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedEpoch(DrawnEpoch):
    """The packs of an epoch before ranks share them; indices are positions in its schedule."""

    packs: Plan


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
        spans=packed.spans,
        packs=packs,
        unshared=packed.packs,
        cuts=present,
    )


def pack_epoch(recipe: Recipe, epoch: int, name_of: NameOfRow | None = None) -> PackedEpoch:
    """Draw the rows of an epoch and pack them. With `name_of` the log names rows that are left out or alone."""
    config = recipe.config
    cut = recipe.cut or (None,) * len(recipe.sizes)
    usable = [can_be_packed(sizes, config, of_source) for sizes, of_source in zip(recipe.sizes, cut, strict=True)]
    schedule = recipe.mix.schedule(epoch, usable, [sizes[LENGTH] for sizes in recipe.sizes])
    drawn = DrawnEpoch(epoch=epoch, schedule=schedule, sizes=_sizes_at(schedule, recipe.sizes))
    drawn = _in_windows(drawn, cut, config) if config.packing_strategy == WINDOW else _in_parts(drawn, cut)
    sizes = drawn.sizes
    # Rows that cannot be read never meet the packer: it has no length for them, and the account has its own reason.
    readable = np.flatnonzero(sizes[LENGTH])
    if not len(readable):
        raise DataError(f"epoch {epoch}: none of the {len(schedule)} rows can be packed; the log has the reasons")
    of_readable = sizes if len(readable) == sizes.shape[1] else sizes[:, readable]
    made = plan(
        of_readable[LENGTH],
        config,
        images=of_readable[IMAGES],
        patches=of_readable[PATCHES],
        # Another one in every epoch, or packs of rows that are not mixed would come in the order of the epoch before.
        seed=recipe.seed + epoch,
        label=None if name_of is None else lambda item: name_of(*drawn.sample(int(readable[item]))),
    )
    if not len(made):
        raise DataError(f"epoch {epoch} has no pack; all {len(readable)} rows were left out: {made.num_dropped}")
    # Length, images and patches; what is supervised decides nothing.
    packs = made if of_readable is sizes else made.renumbered(readable, sizes[: PATCHES + 1])
    return PackedEpoch(epoch=epoch, schedule=drawn.schedule, sizes=sizes, spans=drawn.spans, packs=packs)


def saved_digest(packed: PackedEpoch, cuts: Sequence[Cut]) -> str:
    """The digest of the packs that the last of these cuts counts in, whatever number of ranks shared them."""
    return replay(packed.packs, cuts).digest()


def can_be_packed(sizes: Sizes, config: PackingConfig, cut: CutRows | None = None) -> NDArray[np.bool_]:
    """Which rows can be in a pack. So all epochs have equally many rows, and none too few for the others' steps.

    A step needs one sample: no more steps than samples are ever asked for, because no epoch has more packs than
    samples, and packs can be cut down to one sample. (Where ratios count tokens, or rows are cut, the number of samples
    differs; `Epochs` looks whether it suffices.)
    """
    if config.packing_strategy == WINDOW:
        return can_be_in_windows(sizes, cut, config)
    usable: NDArray[np.bool_] = sizes[LENGTH] > 0
    usable &= ~is_left_out(sizes[LENGTH], sizes[IMAGES], sizes[PATCHES], config)
    if cut is not None and len(cut):
        start, stop, _, images, patches, _, reason = cut.columns
        of_part = (reason == 0) & ~is_left_out(stop - start, images, patches, config)
        usable[cut.rows] = np.logical_or.reduceat(of_part, cut.offsets[:-1])
    return usable


def _in_parts(drawn: DrawnEpoch, cut: Sequence[CutRows | None]) -> DrawnEpoch:
    """The same with every row that is cut once for each of its parts, with their sizes, and where they are.

    Parts that cutting left out have no size, as rows that cannot be encoded have none.
    """
    schedule = drawn.schedule
    counts, first = np.ones(len(schedule), dtype=np.int64), np.full(len(schedule), -1)
    for number, of_source in enumerate(cut):
        if of_source is not None and len(of_source):
            here = schedule.source == number
            counts[here] = of_source.num_parts(schedule.row[here])
            first[here] = of_source.first_parts(schedule.row[here])
    if (first < 0).all():
        return drawn
    at = np.repeat(np.arange(len(schedule)), counts)
    number_of_part = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes, spans = drawn.sizes[:, at], np.zeros((len(Span._fields), len(at)), dtype=np.int32)
    for number, of_source in enumerate(cut):
        here = np.flatnonzero((schedule.source[at] == number) & (first[at] >= 0))
        if of_source is not None and len(here):
            of_part = of_source.columns[:, first[at[here]] + number_of_part[here]]
            start, stop, num_repeated, images, patches, supervised, reason = of_part
            sizes[:, here] = np.stack([stop - start, images, patches, supervised]) * (reason == 0)
            spans[:4, here] = np.stack([number_of_part[here], start, stop, num_repeated])
    in_parts = replace(schedule, source=schedule.source[at], row=schedule.row[at])
    return replace(drawn, schedule=in_parts, sizes=sizes, spans=spans)


def _in_windows(drawn: DrawnEpoch, cut: Sequence[CutRows | None], config: PackingConfig) -> DrawnEpoch:
    """The same with every row once for each pack that it is in."""
    schedule = drawn.schedule

    def runs_of(position: int) -> Sequence[Part]:
        source, row = schedule[position]
        of_source = cut[source]
        return () if of_source is None else of_source.parts(row)

    pieces = end_to_end(drawn.sizes, runs_of, config)
    in_pieces = replace(schedule, source=schedule.source[pieces.at], row=schedule.row[pieces.at])
    return replace(drawn, schedule=in_pieces, sizes=pieces.sizes, spans=pieces.spans)


def _sizes_at(schedule: Schedule, sizes: Sequence[Sizes]) -> Sizes:
    found = np.zeros((SUPERVISED + 1, len(schedule)), dtype=np.int32)  # as a plan has them, which shares the memory
    for number, of_source in enumerate(sizes):
        here = schedule.source == number
        found[:, here] = of_source[:, schedule.row[here]]
    return found
