"""From an optimizer step back to its packs: no record of them is needed, as an epoch can be computed again.

A run is a list of stretches: each begins an epoch, or goes on in one after a resume, with so many ranks that accumulate
so many packs each. Within a stretch steps follow one another, so the packs of a step are counted off.

>>> stretches = [Stretch(step, epoch, num_ranks=2, accumulation=1) for step, epoch in ((0, 0), (3, 1))]
>>> last_before(stretches, 3).epoch, last_before(stretches, 4).epoch
(0, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.cuts import Cut
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.resume_schedule import num_steps


class Stretch(NamedTuple):
    """An epoch from where it was begun or resumed."""

    step: int
    """Optimizer steps that were taken before."""
    epoch: int
    num_ranks: int
    accumulation: int
    cuts: tuple[Cut, ...] = ()
    """How far the epoch had come; none where it begins."""
    digest: str | None = None
    """Of the plan that was trained, where that was noted."""


class PackOfStep(NamedTuple):
    """A pack of a step: the rank that trains it and its number in the epoch."""

    rank: int
    number: int


class StepFound(NamedTuple):
    """Where a step is: the epoch as it was shared then, and the packs."""

    stretch: Stretch
    plan: EpochPlan
    packs: list[PackOfStep]


def last_before(stretches: Sequence[Stretch], step: int) -> Stretch:
    """The stretch that a step is in, or behind: what was trained again after a resume counts, and not what was lost."""
    before = [stretch for stretch in stretches if stretch.step < step]
    if not before:
        first = stretches[0].step
        raise ConfigError(
            f"step {step}: this run began behind step {first}; steps up to {first} were trained by the run that it "
            "resumed, in another output_dir"
        )
    return before[-1]


def find_step(
    step: int, stretches: Sequence[Stretch], plan_of: Callable[[Stretch], EpochPlan], *, num_epochs: int | None
) -> StepFound:
    """The packs of a step of a run, counted from 1; `num_epochs` bounds the run where no number of steps does."""
    if step < 1:
        raise ConfigError(f"step {step}: steps are counted from 1, as in the log")
    stretch = last_before(stretches, step)
    while num_epochs is None or stretch.epoch < num_epochs or stretch.cuts:
        plan = plan_of(stretch)
        num_here = num_steps(plan.num_left_per_rank, stretch.accumulation)
        if step <= stretch.step + num_here:
            return StepFound(stretch, plan, packs_of_step(plan, stretch, step))
        stretch = Stretch(stretch.step + num_here, stretch.epoch + 1, stretch.num_ranks, stretch.accumulation)
    raise ConfigError(f"step {step}: the run has {stretch.step} steps; name one from 1 to {stretch.step}")


def packs_of_step(plan: EpochPlan, stretch: Stretch, step: int) -> list[PackOfStep]:
    """The packs of a step that is in the stretch, rank by rank."""
    first = (step - stretch.step - 1) * stretch.accumulation
    return [
        PackOfStep(rank, number)
        for rank in range(stretch.num_ranks)
        for number in plan.numbers_left(rank)[first : first + stretch.accumulation]
    ]


def step_of_pack(plan: EpochPlan, stretch: Stretch, number: int) -> tuple[int, int]:
    """The rank that trains a pack of the stretch, and in which step."""
    behind = plan.cuts[-1].num_consumed // plan.num_ranks
    rank, nth = number % plan.num_ranks, number // plan.num_ranks - behind
    return rank, stretch.step + 1 + nth // stretch.accumulation
