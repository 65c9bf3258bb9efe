"""Looking at a planned run, to be started or trained already: an epoch's packs, the packs of a step, rows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from swift_vlpack.cli.look import PlannedPacks
from swift_vlpack.cli.trained import TrainedRun
from swift_vlpack.cli.wanted import Found, Wanted
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.feed.planned import address_of
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.host.run import Run
from swift_vlpack.pages.shown_choice import chosen
from swift_vlpack.pages.shown_epochs import overview_of
from swift_vlpack.pages.shown_packs import Place
from swift_vlpack.pages.values import PackShown, StepShown, Trained
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.resume_schedule import num_steps
from swift_vlpack.rows.samples import Address
from swift_vlpack.runlog.losses import Loss, loss_at, spikes
from swift_vlpack.runlog.run_steps import EpochSpan, PackOfStep, StepFound, find_step, step_of_pack

COMPUTED = "packs computed again"


class PlannedRun:
    """The feed of a run, and how its steps lie in its epochs."""

    def __init__(self, run: Run, feed: PlannedFeed, trained: TrainedRun | None, *, with_thumbnails: bool) -> None:
        self._run = run
        self._feed = feed
        self._trained = trained
        self._packs = PlannedPacks(run, feed, with_thumbnails=with_thumbnails)
        accumulation = run.args.training_args.gradient_accumulation_steps
        known = [] if trained is None else trained.spans()
        self._spans = known or [EpochSpan(0, 0, feed.num_ranks, accumulation)]
        self._plans: dict[EpochSpan, EpochPlan] = {}
        if trained is not None:
            trained.check_spans(self._plan_of)

    def found(self, wanted: Wanted) -> Found:
        """What was asked for."""
        if wanted.loss_spikes is not None:
            return Found(steps=self._spikes(wanted.loss_spikes))
        if wanted.step is not None:
            step = self._step(wanted.step)
            return Found(steps=[self._shown_step(step, wanted.step)], packs=self._of_step(step, wanted.step),
                         num_packs=len(step.packs))  # fmt: skip
        span = self._span_of_epoch(wanted.epoch or 0)
        plan = self._plan_of(span)
        if wanted.examples is not None:
            addresses = (address for number in range(len(plan)) for address in address_of(plan, number).samples)
            first = heapq.nsmallest(wanted.examples, addresses, key=self._in_files)
            return Found(examples=map(self._packs.example, first))
        numbers = chosen(plan, self._feed.dataset, wanted.wish)
        if not wanted.wish.is_open:
            return Found(packs=self._of_epoch(plan, span, numbers), num_packs=len(numbers))
        shown = numbers if wanted.html else numbers[:1]
        return Found(overview=overview_of(plan), packs=self._of_epoch(plan, span, shown), num_packs=len(numbers))

    def _in_files(self, address: Address) -> tuple[Any, ...]:
        """Where a sample comes in the order of the files, which ms-swift shuffles when it loads them."""
        source = self._feed.dataset.sources[address.source]
        return address.source, source.row_number(address.row_index), address.span or ()

    # -- packs ------------------------------------------------------------------------------------------------------

    def _of_epoch(self, plan: EpochPlan, span: EpochSpan, numbers: list[int]) -> Iterator[PackShown]:
        for number in numbers:
            rank, step = step_of_pack(plan, span, number)
            is_behind = step <= span.step  # trained before the resume, in a step of the span before
            yield self._packs.shown(plan, number, Place(len(plan), rank, None if is_behind else step))

    def _of_step(self, found: StepFound, step: int) -> Iterator[PackShown]:
        for pack in found.packs:
            yield self._packs.shown(found.plan, pack.number, Place(len(found.plan), pack.rank, step))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> StepFound:
        most = self._run.args.max_steps
        if 0 < most < step and step > self._last_logged:
            raise ConfigError(f"step {step}: the run has {most} steps; name one from 1 to {most}")
        num_epochs = None if most > 0 else math.ceil(self._run.args.num_train_epochs)
        return find_step(step, self._spans, self._plan_of, num_epochs=num_epochs)

    def _shown_step(self, found: StepFound, step: int) -> StepShown:
        loss = loss_at(self._losses, step)
        notes = []
        if self._trained is not None and step > self._last_logged:
            notes.append(f"the log ends at step {self._last_logged}: step {step} was not logged, or not trained yet")
        return StepShown(
            step=step,
            packs=[self._shown_pack(found.plan, pack) for pack in found.packs],
            known_from=COMPUTED,
            loss=None if loss is None else loss.value,
            loss_of=None if loss is None else (loss.first, loss.last),
            notes=notes,
        )

    def _shown_pack(self, plan: EpochPlan, pack: PackOfStep) -> Trained:
        address = address_of(plan, pack.number)
        ids = [self._feed.dataset.sample_id(where) for where in address.samples]
        return Trained(
            rank=pack.rank,
            epoch=plan.epoch,
            number=pack.number,
            ids=[str(one) for one in ids],
            where=[self._packs.where(one) for one in ids],
            lengths=[size[0] for size in address.sizes],
        )

    def _spikes(self, most: int) -> list[StepShown]:
        found = spikes(self._losses, most)
        if not found:
            raise ConfigError("--loss-spikes: the log has no loss that is higher than the one before it")
        return [
            replace(self._shown_step(self._step(step), step), loss_before=spike.before.value)
            for spike in found
            for step in range(spike.loss.first, spike.loss.last + 1)
        ]

    @cached_property
    def _losses(self) -> list[Loss]:
        return [] if self._trained is None else self._trained.losses

    @property
    def _last_logged(self) -> int:
        return self._losses[-1].last if self._losses else 0

    # -- epochs -----------------------------------------------------------------------------------------------------

    def _plan_of(self, span: EpochSpan) -> EpochPlan:
        if span not in self._plans:
            plan = self._feed.plan_of(span.epoch, span.cuts, span.num_ranks)
            if span.digest not in (None, plan.digest()):
                raise StateMismatch(
                    f"epoch {span.epoch} was trained by another plan ({span.digest}) than these data and options "
                    f"give ({plan.digest()}): data, sizes, options or a version changed since"
                )
            self._plans = {span: plan}  # one at a time: those of millions of rows are large
        return self._plans[span]

    def _span_of_epoch(self, epoch: int) -> EpochSpan:
        known = [span for span in self._spans if span.epoch == epoch]
        if known:
            return known[-1]
        most = math.ceil(self._run.args.num_train_epochs)
        if epoch < 0 or (self._run.args.max_steps <= 0 and epoch >= most):
            raise ConfigError(f"--epoch {epoch}: the run has {most} epochs; name one from 0 to {most - 1}")
        before = [span for span in self._spans if span.epoch < epoch]
        if not before:
            raise ConfigError(f"--epoch {epoch}: the run began with epoch {self._spans[0].epoch}")
        span = before[-1]
        while span.epoch < epoch:
            num_here = num_steps(self._plan_of(span).num_left_per_rank, span.accumulation)
            span = span.next_epoch(num_here)
        return span
