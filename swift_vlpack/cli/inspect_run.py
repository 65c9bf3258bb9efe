"""Answer `vlpack inspect` for a run: an epoch at a glance, packs, those of an optimizer step, those of a sample.

`look` takes the run and an `InspectRequest`, and returns an `InspectResult`. A planned feed can show any pack of any
epoch, a streamed one its first packs. Steps of a run that was trained are in `trained_steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.cli.inspect_packs import PackViewer, packs_of_sample
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.feed import Feed
from swift_vlpack.host.args import packing_config, plans_ahead
from swift_vlpack.host.pipeline import build_feed
from swift_vlpack.host.run import Run, feed_of
from swift_vlpack.pages.make_values import Place, overview_of
from swift_vlpack.pages.values import PackShown
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.words import counted

NUM_ON_PAGE = 20
"""Packs of a stream that a page shows if none were chosen: more would take long, because all rows are encoded."""


class InspectRequest(NamedTuple):
    """The flags of `vlpack inspect` that choose what to show."""

    pack: int | None = None
    sample: str | None = None
    epoch: int | None = None
    step: int | None = None
    html: Path | None = None


@dataclass(kw_only=True)
class InspectResult:
    """The answer to an `InspectRequest`. `packs` is an iterator that reads data as it goes."""

    overview: Mapping[str, Any] | None = None
    packs: Iterable[PackShown]
    num_packs: int
    """Number of packs that match, of which `packs` may be a selection."""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of `--json`. Reads all packs."""
        return {"overview": self.overview, "packs": [pack.as_json() for pack in self.packs]}


def look(run: Run, request: InspectRequest) -> InspectResult:
    """Answer a request about a run that is to be started."""
    if not plans_ahead(run.args):
        feed, _ = build_feed(run.args, run.template, packing_config(run.args))
        return _first_packs(run, feed, request)
    return _PlannedRun(run, feed_of(run)[0], with_thumbnails=request.html is not None).find(request)


# -- planned packs ----------------------------------------------------------------------------------------------------


class _PlannedRun:
    """Find packs and steps in the plans of a run, ahead of it."""

    def __init__(self, run: Run, feed: Feed, *, with_thumbnails: bool) -> None:
        self._args = run.args
        self._feed = feed
        self._viewer = PackViewer(run, feed, with_thumbnails=with_thumbnails)
        self._accumulation = run.args.training_args.gradient_accumulation_steps
        self._num_epochs = math.ceil(run.args.num_train_epochs) if run.args.max_steps <= 0 else None

    def find(self, request: InspectRequest) -> InspectResult:
        """Answer a request."""
        if request.step is not None:
            return self._step(request.step)
        epoch = request.epoch or 0
        if self._num_epochs is not None and epoch >= self._num_epochs:
            raise ConfigError(
                f"--epoch {epoch}: the run has {self._num_epochs} epochs; name one from 0 to {self._num_epochs - 1}"
            )
        first_step = sum(self._plan(before).num_steps_left(self._accumulation) for before in range(epoch))
        plan = self._plan(epoch)
        numbers = self._numbers(plan, request)

        def place_of(number: int) -> Place:
            rank, nth = number % plan.num_ranks, number // plan.num_ranks
            return Place(len(plan), rank, first_step + 1 + plan.step_of_batch(nth, self._accumulation))

        if request.pack is not None or request.sample is not None:
            return InspectResult(packs=self._viewer.packs(numbers, place_of, plan), num_packs=len(numbers))
        packs = self._viewer.packs(numbers if request.html else numbers[:1], place_of, plan)
        return InspectResult(overview=overview_of(plan), packs=packs, num_packs=len(numbers))

    def _numbers(self, plan: EpochPlan, request: InspectRequest) -> Sequence[int]:
        """Return the numbers of the packs that are asked for; all if none is."""
        if request.sample is not None:
            return packs_of_sample(plan, self._feed.dataset, request.sample)
        if request.pack is None:
            return range(len(plan))
        if request.pack >= len(plan):
            raise ConfigError(
                f"--pack {request.pack}: epoch {plan.epoch} has {counted(len(plan), 'pack')}; name one from 0 to "
                f"{len(plan) - 1}"
            )
        return [request.pack]

    def _step(self, step: int) -> InspectResult:
        """Find the packs of a step, counted from 1, rank by rank."""
        most, num_before, epoch = self._args.max_steps, 0, 0
        while (self._num_epochs is None or epoch < self._num_epochs) and (most <= 0 or step <= most):
            plan = self._plan(epoch)
            num_here = plan.num_steps_left(self._accumulation)
            if step <= num_before + num_here:
                batches = plan.batches_of_step(step - num_before - 1, self._accumulation)
                found = {n: Place(len(plan), rank, step) for rank in range(plan.num_ranks)
                         for n in plan.numbers_left(rank)[batches]}  # fmt: skip
                shown = self._viewer.packs(list(found), found.__getitem__, plan)
                return InspectResult(packs=shown, num_packs=len(found))
            num_before, epoch = num_before + num_here, epoch + 1
        most = most if most > 0 else num_before
        raise ConfigError(f"step {step}: the run has {most} steps; name one from 1 to {most}")

    def _plan(self, epoch: int) -> EpochPlan:
        plan = self._feed.plan_of(epoch)
        assert plan is not None
        return plan


# -- streamed packs ---------------------------------------------------------------------------------------------------


def _first_packs(run: Run, feed: Feed, request: InspectRequest) -> InspectResult:
    """Find the first packs of the first rank; anything else would need a plan."""
    if request.sample is not None or request.epoch:
        raise ConfigError(
            "packs of a stream (or packing_mode=buffer) are made as rows come, so --sample and --epoch cannot be "
            "answered ahead of time; --pack N and --step N read the first packs of rank 0, and --run OUTPUT_DIR --step "
            "N shows what was trained"
        )
    viewer = PackViewer(run, feed)
    accumulation = run.args.training_args.gradient_accumulation_steps
    numbers = range(NUM_ON_PAGE if request.html else 1)
    if request.pack is not None:
        numbers = range(request.pack, request.pack + 1)
    elif request.step is not None:
        numbers = range((request.step - 1) * accumulation, request.step * accumulation)
    packs = list(viewer.packs(numbers, lambda number: Place(step=1 + number // accumulation)))
    if not packs:
        raise ConfigError(f"the rows of rank 0 make fewer than {counted(numbers[0] + 1, 'pack')}")
    return InspectResult(packs=packs, num_packs=len(packs))
