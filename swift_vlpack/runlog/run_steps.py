"""Find the packs of an optimizer step of a planned run, without a record of packs: the epoch is computed again.

A run is a list of `EpochSpan`s. Each says at which step an epoch began or was resumed, on how many ranks, and how many
packs a rank accumulates for a step. Within a span nothing interrupts the steps, so packs can be counted off.

>>> spans = [EpochSpan(step, epoch, num_ranks=2, accumulation=1) for step, epoch in ((0, 0), (3, 1))]
>>> span_of_step(spans, 3).epoch, span_of_step(spans, 4).epoch
(0, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.cuts import Cut
from swift_vlpack.plan.epoch import EpochPlan


class EpochSpan(NamedTuple):
    """An epoch, or the rest of an epoch after a resume, that one segment of a run trains."""

    step: int
    """Optimizer steps that were taken before the span."""
    epoch: int
    num_ranks: int
    accumulation: int
    cuts: tuple[Cut, ...] = ()
    """Packs of the epoch that were consumed before the span, by each number of ranks; empty if none were."""
    digest: str | None = None
    """Digest of the plan that was trained; None if there is no run log."""

    def next_epoch(self, num_steps_here: int) -> EpochSpan:
        """Return the span of the following epoch, if nothing interrupts the run."""
        return EpochSpan(self.step + num_steps_here, self.epoch + 1, self.num_ranks, self.accumulation)


PlanOf = Callable[[EpochSpan], EpochPlan]


class PackOfStep(NamedTuple):
    """A pack of a step: the rank that trains it, and its number in the epoch."""

    rank: int
    number: int


class StepFound(NamedTuple):
    """The packs of a step, with the plan that has them and the span that the step is in."""

    span: EpochSpan
    plan: EpochPlan
    packs: list[PackOfStep]


def span_of_step(spans: Sequence[EpochSpan], step: int) -> EpochSpan:
    """Return the last span that began before `step`: of several that trained the step, only the last one counts.

    Raises `ConfigError` if the step was trained before the first known span.
    """
    before = [span for span in spans if span.step < step]
    if not before:
        first = spans[0].step
        raise ConfigError(
            f"step {step}: what is known of this run begins after step {first}; steps up to {first} were trained by "
            "the run that it resumed, in another output_dir"
        )
    return before[-1]


def find_step(step: int, spans: Sequence[EpochSpan], plan_of: PlanOf, *, num_epochs: int | None) -> StepFound:
    """Find the packs of a step, counted from 1. Epochs that have not begun yet are computed ahead.

    `num_epochs` is None if the run ends by a number of steps. Raises `ConfigError` if the run has no such step.
    """
    if step < 1:
        raise ConfigError(f"step {step}: steps are counted from 1, as in the log")
    span = span_of_step(spans, step)
    while num_epochs is None or span.epoch < num_epochs or span.cuts:
        plan = plan_of(span)
        num_here = plan.num_steps_left(span.accumulation)
        if step <= span.step + num_here:
            return StepFound(span, plan, packs_of_step(plan, span, step))
        span = span.next_epoch(num_here)
    raise ConfigError(f"step {step}: the run has {span.step} steps; name one from 1 to {span.step}")


def packs_of_step(plan: EpochPlan, span: EpochSpan, step: int) -> list[PackOfStep]:
    """Return the packs of a step of the span, rank by rank."""
    batches = plan.batches_of_step(step - span.step - 1, span.accumulation)  # the same slice for every rank
    ranks = range(span.num_ranks)
    return [PackOfStep(rank, number) for rank in ranks for number in plan.numbers_left(rank)[batches]]


def step_of_pack(plan: EpochPlan, span: EpochSpan, number: int) -> tuple[int, int]:
    """Return the rank that trains a pack of the span, and the step in which that happens."""
    # Packs before the last cut were shared among another number of ranks, so only those after it are counted off.
    num_trained_before = plan.cuts[-1].num_consumed // plan.num_ranks
    rank, nth = number % plan.num_ranks, number // plan.num_ranks - num_trained_before
    return rank, span.step + 1 + (plan.step_of_batch(nth, span.accumulation) if nth >= 0 else -1)


def position_after(span: EpochSpan, step: int, plan_of: PlanOf) -> tuple[int, int]:
    """Return the epoch that `step` is in, and how many of its packs are consumed by then, if nothing interrupts."""
    while True:
        plan = plan_of(span)
        num_here = plan.num_steps_left(span.accumulation)
        if step <= span.step + num_here:
            taken = plan.batches_of_step(step - span.step, span.accumulation).start
            return span.epoch, plan.num_consumed + min(plan.num_left_per_rank, taken) * span.num_ranks
        span = span.next_epoch(num_here)
