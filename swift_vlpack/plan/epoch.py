"""Plan an epoch: draw its rows, pack them, and share the packs among ranks. The plan is a frozen value.

    recipe (sizes, mix, config, seed, ranks) + number of the epoch + cuts  ->  EpochPlan

>>> from swift_vlpack.plan.mix import Source
>>> sizes = np.array([[6, 5, 4, 5], [0] * 4, [0] * 4, [6, 5, 4, 5]])  # tokens, images, patches, supervised tokens
>>> config = PackingConfig(packing_length=10, packing_strategy="exact", packing_drop_last=False)
>>> mix = Mix(sources=(Source("captions", 4),), rows=(None,), shuffle=False)
>>> epoch = plan_epoch(Recipe(sizes=(sizes,), mix=mix, config=config, num_ranks=2), 0)
>>> [epoch.samples(epoch.packs[number]) for number in epoch.numbers_left(rank=0)]  # (source, row) of each sample
[[(0, 1), (0, 3)]]

A plan is never saved, because the same recipe gives the same plan. A checkpoint has how far the epoch has come
(cuts.py), and the digest of the packs in the order that these numbers refer to: drawn, packed, cut for the ranks,
matched in cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.cuts import Cut, is_finished, num_consumed, replay, share
from swift_vlpack.plan.items import is_left_out, must_be_alone
from swift_vlpack.plan.mix import Mix, Schedule
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.parts import CutRows, Span
from swift_vlpack.plan.planner import columns_of, pack_items
from swift_vlpack.plan.resume_schedule import num_steps
from swift_vlpack.plan.same_steps import IN_NO_STEP, UnpackedRows, UnpackedStep, pack_steps
from swift_vlpack.plan.units import NO_KEY, Prefixes, Together, Units, stand_together
from swift_vlpack.reasons import Reason
from swift_vlpack.words import by_reason, counted

LENGTH, IMAGES, PATCHES, SUPERVISED = range(4)
"""The rows of an array of sizes. A length of 0 means that the row of data cannot be encoded."""
Sizes = NDArray[np.integer[Any]]  # (4, num_rows)
NameOfRow = Callable[..., str]
"""Function that returns the name of a sample for the log, from the numbers of source and row and the span of a part."""
Where = tuple[int, int] | tuple[int, int, Span]
"""(source, row) of a sample, or (source, row, span) if the row was cut."""
_NOT_CUT = Span(0, 0, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """Everything that decides the epochs of a run, other than their numbers."""

    sizes: tuple[Sizes, ...]
    """The sizes of all rows, by source."""
    cut: tuple[CutRows | None, ...] = ()
    """The parts of cut rows, by source; empty if rows are not cut."""
    prefixes: tuple[Prefixes | None, ...] = ()
    """The prefixes that rows share, by source; empty if rows share nothing."""
    mix: Mix
    config: PackingConfig
    seed: int = 0
    num_ranks: int = 1
    step: UnpackedStep | None = None
    """The optimizer step whose samples are kept, under `packing_batch=samples`."""
    unpacked: UnpackedRows | None = None
    """The rows and batches of un-packed training, whose steps are kept; None keeps steps of the mix."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnEpoch:
    """The samples of an epoch in order, which are rows and parts of rows."""

    epoch: int
    schedule: Schedule
    """The drawn rows in order. A cut row has one entry for each of its parts, one after the other."""
    sizes: Sizes
    """The sizes at every position of the schedule."""
    shared: NDArray[np.int32]
    """The tokens that each sample shares with the one at the position before it."""
    spans: NDArray[np.int32] | None = None
    """(4, num_positions): the fields of `Span`, 0 for rows that are not cut; None if no row is cut."""
    batch: NDArray[np.int32] | None = None
    """The un-packed batch of each position, which decides its optimizer step; None if steps are not kept."""

    @property
    def lengths(self) -> NDArray[Any]:
        """Return the tokens at each position of the schedule; 0 if the row cannot be encoded."""
        lengths: NDArray[Any] = self.sizes[LENGTH]
        return lengths

    @property
    def images(self) -> NDArray[Any]:
        """Return the images at each position."""
        images: NDArray[Any] = self.sizes[IMAGES]
        return images

    @property
    def patches(self) -> NDArray[Any]:
        """Return the vision patches at each position."""
        patches: NDArray[Any] = self.sizes[PATCHES]
        return patches

    @property
    def supervised(self) -> NDArray[Any]:
        """Return the tokens with a label at each position."""
        supervised: NDArray[Any] = self.sizes[SUPERVISED]
        return supervised

    def samples(self, positions: Sequence[int]) -> list[Where]:
        """Return the samples at these positions."""
        return [self.sample(position) for position in positions]

    def sample(self, position: int) -> Where:
        """Return the sample at a position."""
        span = _NOT_CUT if self.spans is None else Span(*self.spans[:, position].tolist())
        return self.schedule[position] if span.stop == 0 else (*self.schedule[position], span)

    @property
    def is_further_part(self) -> NDArray[np.bool_]:
        """Return a mask of positions with part 1, 2, ... of a row. A row is counted once, by its part 0."""
        if self.spans is None:
            return np.zeros(len(self.schedule), dtype=bool)
        further: NDArray[np.bool_] = self.spans[0] > 0
        return further

    @property
    def num_rows(self) -> int:
        """Return the number of drawn rows. A row in several parts counts once."""
        return len(self.schedule) - int(self.is_further_part.sum())

    @property
    def unreadable(self) -> NDArray[np.int64]:
        """Return the positions without a length: rows that cannot be encoded, and parts that cutting left out."""
        return np.flatnonzero(self.lengths == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedEpoch(DrawnEpoch):
    """The packs of an epoch before they are shared among ranks. Their items are positions in the schedule."""

    packs: Plan
    step: UnpackedStep | None = None
    """The optimizer step whose samples are kept; None if the packs decide what a step trains."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan(PackedEpoch):
    """The packs of an epoch in the order in which ranks train them."""

    unshared: Plan
    """The packs before some are cut in two, so that all ranks and epochs have equally many."""
    cuts: tuple[Cut, ...]
    """How far the epoch had come when it was begun or resumed. The last cut belongs to the present ranks."""

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that share the packs."""
        return self.cuts[-1].num_ranks

    @property
    def num_consumed(self) -> int:
        """Return how many packs were trained before, in all cuts together."""
        return num_consumed(self.cuts)

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the epoch. Only for steps that keep their samples."""
        assert self.packs.batches is not None, "only the trainer knows the number of steps"
        return len(self.packs.batches)

    @property
    def num_steps_consumed(self) -> int:
        """Return the number of optimizer steps that were trained. Only for steps that keep their samples."""
        return _steps_of(self.packs, self.cuts[-1].num_consumed)

    @property
    def num_left_per_rank(self) -> int:
        """Return how many packs each rank has left to train, from where the epoch was begun or resumed."""
        return (self.cuts[-1].num_packs - self.cuts[-1].num_consumed) // self.num_ranks

    def num_steps_left(self, accumulation: int) -> int:
        """Return the number of steps left. `accumulation` is ignored if steps keep their samples."""
        if self.packs.batches is None:
            return num_steps(self.num_left_per_rank, accumulation)
        return self.num_steps - self.num_steps_consumed

    def batches_of_step(self, step: int, accumulation: int) -> slice:
        """Return the slice of a rank's packs (`numbers_left`) that step `step`, counted from 0, trains."""
        if self.packs.batches is None:
            return slice(step * accumulation, (step + 1) * accumulation)
        left = self.packs.batches[self.num_steps_consumed :]
        return slice(int(left[:step].sum()), int(left[: step + 1].sum()))

    def step_of_batch(self, batch: int, accumulation: int) -> int:
        """Return the step, counted from 0, that trains pack `batch` of a rank's packs (`numbers_left`)."""
        if self.packs.batches is None:
            return batch // accumulation
        left = np.cumsum(self.packs.batches[self.num_steps_consumed :])
        return int(np.searchsorted(left, batch, side="right"))

    @property
    def is_finished(self) -> bool:
        """Tell whether no pack of the epoch is left."""
        return is_finished(self.cuts)

    def numbers_left(self, rank: int) -> range:
        """Return the numbers of the packs that a rank has left, from where the epoch was begun or resumed."""
        return self.packs.for_rank(rank)[self.cuts[-1].num_consumed // self.num_ranks :]

    def digest(self) -> str:
        """Return the digest of the packs in the order that saved numbers refer to: shared, aligned, balanced."""
        return self.packs.digest()


def plan_epoch(
    recipe: Recipe,
    epoch: int,
    cuts: Sequence[Cut] = (),
    *,
    least_packs: int = 0,
    packed: PackedEpoch | None = None,
) -> EpochPlan:
    """Draw, pack and share an epoch, and continue after its cuts. A new epoch has no cuts.

    A new epoch gets at least `least_packs` packs, because all epochs of a run have equally many. `packed` is the result
    of `pack_epoch`, if a thread has made it ahead of time.
    """
    packed = packed or pack_epoch(recipe, epoch)
    if packed.packs.batches is not None:
        return _in_kept_steps(recipe, packed, cuts)
    packs, present = share(packed.packs, cuts, recipe.num_ranks, least_packs=least_packs)
    return EpochPlan(**of_drawn(packed), packs=packs, unshared=packed.packs, cuts=present)


def pack_epoch(recipe: Recipe, epoch: int, name_of: NameOfRow | None = None) -> PackedEpoch:
    """Draw the rows of an epoch and pack them. With `name_of`, log the samples that are left out or alone."""
    drawn = draw_epoch(recipe, epoch)
    if recipe.step is not None:
        return _pack_steps(recipe, drawn)
    units = Units.of(drawn.shared)
    sizes = _sizes_of(units, drawn)
    # Give only units with a length to the packer. Rows that cannot be encoded are counted under their own reasons.
    numbers = np.flatnonzero(sizes[LENGTH])
    if not len(numbers):
        raise DataError(f"epoch {epoch}: none of the {len(drawn.schedule)} rows can be packed; the log has the reasons")
    of_readable = sizes if len(numbers) == sizes.shape[1] else sizes[:, numbers]
    readable = Units(units.starts[numbers], units.counts[numbers])
    made = pack_items(
        columns_of(of_readable[LENGTH], recipe.config, of_readable[IMAGES], of_readable[PATCHES]),
        recipe.config,
        samples=readable.counts,
        # Use another seed in every epoch: without shuffled rows, packs would come in the order of the epoch before.
        seed=recipe.seed + epoch,
        label=None if name_of is None else lambda item: name_of(*drawn.sample(int(readable.starts[item]))),
    )
    if not len(made):
        raise DataError(
            f"epoch {epoch} has no pack; nothing would be trained: {counted(len(numbers), 'row')} of {len(numbers)} "
            f"left out ({by_reason(made.num_dropped)}); raise packing_length ({recipe.config.packing_length}) or its "
            "caps"
        )
    # A `Plan` needs no supervised tokens, because they decide nothing.
    packs = made.of_samples(readable, drawn.sizes[: PATCHES + 1], drawn.shared)
    return PackedEpoch(**of_drawn(drawn), packs=packs)


def of_drawn(epoch: DrawnEpoch) -> dict[str, Any]:
    """Return the fields of a drawn epoch, to make a `PackedEpoch` or `EpochPlan` of it."""
    return {spec.name: getattr(epoch, spec.name) for spec in fields(DrawnEpoch)}


def draw_epoch(recipe: Recipe, epoch: int) -> DrawnEpoch:
    """Draw the rows of an epoch, and replace rows that are cut by their parts."""
    config, lengths = recipe.config, [sizes[LENGTH] for sizes in recipe.sizes]
    cut = recipe.cut or (None,) * len(recipe.sizes)
    usable = [can_be_packed(sizes, config, of_source) for sizes, of_source in zip(recipe.sizes, cut, strict=True)]
    batch = None
    if recipe.unpacked is not None and recipe.step is not None:
        schedule, batch = _unpacked_order(recipe, recipe.unpacked, recipe.step, epoch)
    else:
        schedule = recipe.mix.schedule(epoch, usable, lengths)
        if recipe.step is not None:
            # Count only rows that can be trained, so that all steps but the last have the same number of samples.
            is_usable = _at(schedule, usable, (), bool)
            batch = ((np.cumsum(is_usable) - 1).clip(0) // recipe.step.batch_size).astype(np.int32)
    sizes, shared = _sizes_at(schedule, recipe.sizes), np.zeros(len(schedule), dtype=np.int32)
    drawn = _in_parts(DrawnEpoch(epoch=epoch, schedule=schedule, sizes=sizes, shared=shared, batch=batch), cut)
    return _in_units(drawn, recipe) if config.shares_media else drawn


def saved_digest(packed: PackedEpoch, cuts: Sequence[Cut]) -> str:
    """Return the digest of the packs that the last of these cuts refers to, with its number of ranks."""
    if packed.packs.batches is not None:
        return _for_ranks(packed, cuts[-1].num_ranks).digest()
    return replay(packed.packs, cuts).digest()


# -- the steps of un-packed training ----------------------------------------------------------------------------------


def _pack_steps(recipe: Recipe, drawn: DrawnEpoch) -> PackedEpoch:
    assert recipe.step is not None
    packs = _steps_packed(drawn, recipe.step, recipe.config, recipe.num_ranks, recipe.seed + drawn.epoch)
    if not len(packs.members):
        num_rows = len(drawn.schedule)
        if len(packs.dropped.get(Reason.UNPACKED_LEAVES_OUT.value, ())):
            batches = f"batches of {recipe.step.batch_size} on {counted(recipe.step.num_ranks, 'rank')}"
            raise DataError(
                f"epoch {drawn.epoch}: un-packed training would train none of {num_rows} rows ({batches}, of which "
                "--dataloader_drop_last trains whole ones); give a smaller --per_device_train_batch_size, or "
                "packing_batch=packs"
            )
        raise DataError(f"epoch {drawn.epoch}: none of the {num_rows} rows can be packed; the log has the reasons")
    return PackedEpoch(**of_drawn(drawn), packs=packs, step=recipe.step)


def _for_ranks(packed: PackedEpoch, num_ranks: int) -> Plan:
    """Return the packs of the same steps for another number of ranks."""
    made = packed.packs
    if made.num_ranks == num_ranks:
        return made
    assert packed.step is not None
    return _steps_packed(packed, packed.step, made.config, num_ranks, made.seed)


def _steps_packed(drawn: DrawnEpoch, step: UnpackedStep, config: PackingConfig, num_ranks: int, seed: int) -> Plan:
    """Pack each step of a drawn epoch for `num_ranks` ranks."""
    assert drawn.batch is not None
    units = Units.of(drawn.shared)
    lengths, images, patches, _ = _sizes_of(units, drawn)
    packs = pack_steps(
        lengths,
        drawn.batch[units.starts],
        step,
        config=config,
        num_ranks=num_ranks,
        images=images,
        patches=patches,
        samples=units.counts,
        seed=seed,
    )
    return packs.of_samples(units, drawn.sizes[: PATCHES + 1], drawn.shared)


def _sizes_of(units: Units, drawn: DrawnEpoch) -> Sizes:
    """Add up the sizes of the samples of each unit, with what they share once."""
    if len(units.starts) == len(drawn.schedule):
        return drawn.sizes
    own = drawn.sizes.copy()
    own[LENGTH] -= drawn.shared
    own[[IMAGES, PATCHES]] *= drawn.shared == 0  # samples that share tokens share all images and patches
    made: Sizes = np.add.reduceat(own, units.starts, axis=1)
    return made


def _in_kept_steps(recipe: Recipe, packed: PackedEpoch, cuts: Sequence[Cut]) -> EpochPlan:
    """Share an epoch whose steps are kept. Another number of ranks trains the same steps, in other packs."""
    packs = _for_ranks(packed, recipe.num_ranks)
    num_consumed = 0
    if cuts:
        before = _for_ranks(packed, cuts[-1].num_ranks)
        num_steps = _steps_of(before, cuts[-1].num_consumed)
        assert packs.batches is not None
        num_consumed = int(packs.batches[:num_steps].sum()) * packs.num_ranks
    cut = Cut(packs.num_ranks, len(packs), num_consumed)
    return EpochPlan(**of_drawn(packed), packs=packs, unshared=packs, cuts=(cut,), step=packed.step)


def _steps_of(packs: Plan, num_consumed: int) -> int:
    """Return how many steps this number of packs makes."""
    assert packs.batches is not None
    return int(np.searchsorted(np.cumsum(packs.batches) * packs.num_ranks, num_consumed, side="right"))


def _unpacked_order(
    recipe: Recipe, rows: UnpackedRows, step: UnpackedStep, epoch: int
) -> tuple[Schedule, NDArray[np.int32]]:
    """Return the rows of an epoch in the order of un-packed batches, then the rows that are in no batch."""
    lengths = _sizes_at(rows, recipe.sizes)[LENGTH]
    drawn_from = np.flatnonzero((lengths > 0) | ~rows.is_deleted_if_failing)
    grouped_by = np.where(rows.lengths_of_cache > 0, rows.lengths_of_cache, lengths)
    order, batch = rows.batches(epoch, grouped_by[drawn_from], step)
    is_drawn = np.zeros(len(lengths), dtype=bool)
    is_drawn[drawn_from[order]] = True
    everything = np.concatenate((drawn_from[order], np.flatnonzero(~is_drawn)))
    of_all = np.full(len(everything), IN_NO_STEP, dtype=np.int32)
    of_all[: len(batch)] = batch
    names = tuple(source.name for source in recipe.mix.sources)
    return Schedule(names, rows.source[everything], rows.row[everything]), of_all


def can_be_packed(sizes: Sizes, config: PackingConfig, cut: CutRows | None = None) -> NDArray[np.bool_]:
    """Return a mask of the rows that can be in a pack.

    Ratios count these rows, so all epochs have the same number of them. That is enough for equal steps: a step needs
    one sample, no epoch has more packs than samples, and packs can be cut down to one sample. If ratios count tokens,
    or rows are cut, the number of samples differs between epochs; then `Epochs` checks that all have enough.
    """
    usable: NDArray[np.bool_] = sizes[LENGTH] > 0
    usable &= ~is_left_out(sizes[LENGTH], sizes[IMAGES], sizes[PATCHES], config)
    if cut is not None and len(cut):
        start, stop, _, images, patches, _, reason = cut.columns
        of_part = (reason == 0) & ~is_left_out(stop - start, images, patches, config)
        usable[cut.rows] = np.logical_or.reduceat(of_part, cut.offsets[:-1])
    return usable


def _in_parts(drawn: DrawnEpoch, cut: Sequence[CutRows | None]) -> DrawnEpoch:
    """Replace cut rows by their parts, with sizes and spans.

    A part that cutting left out has length 0, like a row that cannot be encoded.
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
            spans[:, here] = np.stack([number_of_part[here], start, stop, num_repeated])
    in_parts = replace(schedule, source=schedule.source[at], row=schedule.row[at])
    batch = None if drawn.batch is None else drawn.batch[at]
    return replace(drawn, schedule=in_parts, sizes=sizes, shared=drawn.shared[at], spans=spans, batch=batch)


def prefixes_in(drawn: DrawnEpoch, prefixes: Sequence[Prefixes | None], config: PackingConfig) -> Prefixes:
    """Return the prefix that each sample of an epoch could share; `prefixes` are those of the rows, by source."""
    schedule, sizes = drawn.schedule, drawn.sizes
    key = np.zeros(len(schedule), dtype=np.uint64)
    prefix = np.zeros(len(schedule), dtype=np.int32)
    for number, of_source in enumerate(prefixes):
        if of_source is not None:
            here = schedule.source == number
            key[here], prefix[here] = of_source.key[schedule.row[here]], of_source.length[schedule.row[here]]
    # A part of a row, and a sample that fills a pack, share with no other.
    is_alone = must_be_alone(sizes[LENGTH], sizes[IMAGES], sizes[PATCHES], config) | (sizes[LENGTH] == 0)
    if drawn.spans is not None:
        is_alone |= drawn.spans.any(axis=0)
    key[is_alone] = NO_KEY
    return Prefixes(key, prefix)


def num_shared_anywhere(drawn: DrawnEpoch, prefixes: Sequence[Prefixes | None], config: PackingConfig) -> int:
    """Count the tokens that units save if they form anywhere in the epoch, whatever steps keep their samples."""
    return int(_together(drawn, prefixes_in(drawn, prefixes, config), config).shared.sum())


def _together(
    drawn: DrawnEpoch, prefixes: Prefixes, config: PackingConfig, row: NDArray[Any] | None = None
) -> Together:
    """Order the samples of an epoch in units that fit a pack; `prefixes` are those of its samples."""
    return stand_together(
        prefixes.key,
        prefixes.length,
        drawn.lengths,
        capacity=config.packing_length,
        most=min(config.packing_share_max, config.packing_max_samples or config.packing_share_max),
        row=row,
    )


def _in_units(drawn: DrawnEpoch, recipe: Recipe) -> DrawnEpoch:
    """Bring samples together that share a prefix: anywhere in the epoch, or within a step whose samples are kept."""
    schedule, config, sizes = drawn.schedule, recipe.config, drawn.sizes
    prefixes = prefixes_in(drawn, recipe.prefixes, config)
    if drawn.batch is not None and recipe.step is not None:
        prefixes = prefixes._replace(key=_keys_in_steps(prefixes.key, drawn.batch // recipe.step.num_batches))
    row = np.lexsort((schedule.row, schedule.source)).argsort()
    together = _together(drawn, prefixes, config, row)
    order = together.order
    return replace(
        drawn,
        schedule=replace(schedule, source=schedule.source[order], row=schedule.row[order]),
        sizes=sizes[:, order],
        spans=None if drawn.spans is None else drawn.spans[:, order],
        batch=None if drawn.batch is None else drawn.batch[order],
        shared=together.shared,
    )


def _keys_in_steps(key: NDArray[np.uint64], step: NDArray[Any]) -> NDArray[Any]:
    """Return other keys for the samples of each step, so that only samples of one step share."""
    _, numbers = np.unique(np.stack([key, step.astype(np.int64).view(np.uint64)]), axis=1, return_inverse=True)
    in_steps: NDArray[Any] = np.where((key == NO_KEY) | (step < 0), NO_KEY, numbers.ravel() + 1)
    return in_steps


def _sizes_at(where: Schedule | UnpackedRows, sizes: Sequence[Sizes]) -> Sizes:
    return _at(where, sizes, (SUPERVISED + 1,), np.int32)  # the type of a `Plan`, which shares this memory


def _at(
    where: Schedule | UnpackedRows, of_sources: Sequence[NDArray[Any]], shape: tuple[int, ...], dtype: Any
) -> NDArray[Any]:
    """Return the values of these rows, from one array for each source whose last dimension counts its rows."""
    found = np.zeros((*shape, len(where.row)), dtype=dtype)
    for number, of_source in enumerate(of_sources):
        here = where.source == number
        found[..., here] = of_source[..., where.row[here]]
    return found
