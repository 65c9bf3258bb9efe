"""Answer `vlpack inspect` for a run: an epoch at a glance, packs, optimizer steps, samples.

`look` takes the run and an `InspectRequest`, and returns an `InspectResult`. A planned feed can show any pack of any
epoch, before or after training. A streamed feed can show its first packs before training. After training it shows which
rows each step trained, from the packs that the ranks recorded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from swift_vlpack.cli.inspect_packs import PackFilter, PackViewer
from swift_vlpack.cli.stream_rows import with_places
from swift_vlpack.cli.trained_run import TrainedRun
from swift_vlpack.config import RECORD_PACKS
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.feed.feed import Feed
from swift_vlpack.feed.planned import address_of
from swift_vlpack.host.args import packing_config, plans_ahead
from swift_vlpack.host.pipeline import build_feed
from swift_vlpack.host.run import Run, feed_of
from swift_vlpack.pages.make_values import Place, overview_of
from swift_vlpack.pages.values import Member, PackShown, StepShown, TrainedPack
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.rows.samples import Address
from swift_vlpack.runlog.losses import Loss, loss_at, spikes
from swift_vlpack.runlog.run_steps import EpochSpan, PackOfStep, StepFound, find_step, step_of_pack
from swift_vlpack.words import counted

COMPUTED, RECORDED = "packs computed again", "packs as recorded"
NUM_ON_PAGE = 20
"""Packs of a stream that a page shows if none were chosen: more would take long, because all rows are encoded."""


@dataclass(frozen=True, kw_only=True)
class InspectRequest:
    """The flags of `vlpack inspect` that choose what to show. Fields are named like the flags."""

    packs: PackFilter = field(default_factory=PackFilter)
    epoch: int | None = None
    step: int | None = None
    loss_spikes: int | None = None
    examples: int | None = None
    run: Path | None = None
    """The output directory of a run that was trained."""
    html: Path | None = None
    html_mb: float = 20.0

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> InspectRequest:
        """Make a request of the parsed flags, and ignore all other flags."""
        given = {name: value for name, value in flags.items() if value is not None}
        chosen, own = ({one.name: given[one.name] for one in fields(kind) if one.name in given}
                       for kind in (PackFilter, cls))  # fmt: skip
        return cls(**own, packs=PackFilter(**chosen))

    @property
    def is_of_steps(self) -> bool:
        """Tell whether optimizer steps are asked for."""
        return self.step is not None or self.loss_spikes is not None


@dataclass(kw_only=True)
class InspectResult:
    """The answer to an `InspectRequest`. `packs` and `examples` are iterators that read data as they go."""

    overview: Mapping[str, Any] | None = None
    steps: Sequence[StepShown] = ()
    packs: Iterable[PackShown] = ()
    num_packs: int | None = None
    """Number of packs that match, of which `packs` may be a selection; None if unknown before they are read."""
    examples: Iterable[Member] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of `--json`. Reads all packs and examples."""
        return {
            "overview": self.overview,
            "steps": [step.as_json() for step in self.steps],
            "packs": [pack.as_json() for pack in self.packs],
            "examples": [member.as_json() for member in self.examples],
        }


def look(run: Run, request: InspectRequest) -> InspectResult:
    """Answer a request about a run that is to be started, or that was trained (`request.run`)."""
    trained = None if request.run is None else TrainedRun(request.run)
    plans = plans_ahead(run.args)
    if trained is not None and request.is_of_steps and not (plans and trained.was_planned):
        return _recorded(run, trained, request)
    if not plans:
        feed, _ = build_feed(run.args, run.template, packing_config(run.args))
        return _first_packs(run, feed, request)
    planned = feed_of(run)[0] if trained is None else trained.feed(run)
    return _PlannedRun(run, planned, trained, with_thumbnails=request.html is not None).find(request)


# -- planned packs ----------------------------------------------------------------------------------------------------


class _PlannedRun:
    """Find packs and steps in the plans of a run, which are computed again or, before training, ahead of it."""

    def __init__(self, run: Run, feed: Feed, trained: TrainedRun | None, *, with_thumbnails: bool) -> None:
        self._args = run.args
        self._feed = feed
        self._trained = trained
        self._viewer = PackViewer(run, feed, with_thumbnails=with_thumbnails)
        accumulation = run.args.training_args.gradient_accumulation_steps
        known = [] if trained is None else trained.spans()
        self._spans = known or [EpochSpan(0, 0, feed.num_ranks, accumulation)]
        self._plans: dict[EpochSpan, EpochPlan] = {}
        if trained is not None:
            trained.check_spans(self._plan_of)

    def find(self, request: InspectRequest) -> InspectResult:
        """Answer a request."""
        if request.loss_spikes is not None:
            return InspectResult(steps=_spike_steps(self._losses, request.loss_spikes, self._step_shown))
        if request.step is not None:
            found = self._find_step(request.step)
            shown = self._packs_of_step(found, request.step)
            return InspectResult(steps=[self._step_shown(request.step, found)], packs=shown, num_packs=len(found.packs))
        span = self._span_of_epoch(request.epoch or 0)
        plan = self._plan_of(span)
        if request.examples is not None:
            addresses = (address for number in range(len(plan)) for address in address_of(plan, number).samples)
            first = heapq.nsmallest(request.examples, addresses, key=self._place_in_files)
            return InspectResult(examples=map(self._viewer.sample_at, first))
        numbers = request.packs.numbers(plan, self._feed.dataset)
        if not request.packs.is_empty:
            return InspectResult(packs=self._packs_of_epoch(plan, span, numbers), num_packs=len(numbers))
        shown = self._packs_of_epoch(plan, span, numbers if request.html else numbers[:1])
        return InspectResult(overview=overview_of(plan), packs=shown, num_packs=len(numbers))

    def _place_in_files(self, address: Address) -> tuple[Any, ...]:
        """Return a key that sorts samples as in the files, because ms-swift shuffles rows when it loads them."""
        source = self._feed.sources[address.source]
        return address.source, source.row_number(address.row_index), address.span or ()

    def _packs_of_epoch(self, plan: EpochPlan, span: EpochSpan, numbers: Sequence[int]) -> Iterator[PackShown]:
        def place_of(number: int) -> Place:
            rank, step = step_of_pack(plan, span, number)
            # Packs before the resume were trained by the span before, perhaps with other ranks or accumulation, so this
            # span cannot say their step.
            return Place(len(plan), rank, step if step > span.step else None)

        return self._viewer.packs(numbers, place_of, plan)

    def _packs_of_step(self, found: StepFound, step: int) -> Iterator[PackShown]:
        places = {pack.number: Place(len(found.plan), pack.rank, step) for pack in found.packs}
        return self._viewer.packs(list(places), places.__getitem__, found.plan)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _find_step(self, step: int) -> StepFound:
        most = self._args.max_steps
        if 0 < most < step and step > self._last_logged:
            raise ConfigError(f"step {step}: the run has {most} steps; name one from 1 to {most}")
        num_epochs = None if most > 0 else math.ceil(self._args.num_train_epochs)
        return find_step(step, self._spans, self._plan_of, num_epochs=num_epochs)

    def _step_shown(self, step: int, found: StepFound | None = None) -> StepShown:
        found = found or self._find_step(step)
        packs = [self._trained_pack(found.plan, pack) for pack in found.packs]
        notes = []
        if self._trained is not None and step > self._last_logged:
            notes.append(f"the log ends at step {self._last_logged}: step {step} was not logged, or not trained yet")
        return _step_shown(step, packs, COMPUTED, self._losses, notes)

    def _trained_pack(self, plan: EpochPlan, pack: PackOfStep) -> TrainedPack:
        address = address_of(plan, pack.number)
        ids = [self._feed.dataset.sample_id(where) for where in address.samples]
        return TrainedPack(
            rank=pack.rank,
            epoch=plan.epoch,
            number=pack.number,
            ids=[str(one) for one in ids],
            where=[self._viewer.where(one) for one in ids],
            lengths=[size[0] for size in address.sizes],
            shared=address.shared,
        )

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
            assert plan is not None
            if span.digest not in (None, plan.digest()):
                raise StateMismatch(
                    f"epoch {span.epoch} was trained by another plan ({span.digest}) than these data and options "
                    f"give ({plan.digest()}): data, sizes, options or a version changed since"
                )
            self._plans = {span: plan}  # only one is kept, because plans of millions of rows are large
        return self._plans[span]

    def _span_of_epoch(self, epoch: int) -> EpochSpan:
        """Return the last known span of an epoch; count on to an epoch that is not trained yet."""
        known = [span for span in self._spans if span.epoch == epoch]
        if known:
            return known[-1]
        most = math.ceil(self._args.num_train_epochs)
        if epoch < 0 or (self._args.max_steps <= 0 and epoch >= most):
            raise ConfigError(f"--epoch {epoch}: the run has {most} epochs; name one from 0 to {most - 1}")
        before = [span for span in self._spans if span.epoch < epoch]
        if not before:
            raise ConfigError(f"--epoch {epoch}: the run began with epoch {self._spans[0].epoch}")
        span = before[-1]
        while span.epoch < epoch:
            span = span.next_epoch(self._plan_of(span).num_steps_left(span.accumulation))
        return span


# -- streamed packs ---------------------------------------------------------------------------------------------------


def _first_packs(run: Run, feed: Feed, request: InspectRequest) -> InspectResult:
    """Find the first packs of the first rank; anything else would need a plan."""
    if request.packs.needs_plan or request.epoch:
        raise ConfigError(
            "packs of a stream (or packing_mode=buffer) are made as rows come, so --sample, --longest, --emptiest, "
            "--random and --epoch cannot be answered ahead of time; --pack N and --step N read the first packs of rank "
            "0, --examples K the first rows, and --run OUTPUT_DIR --step N shows what was trained"
        )
    viewer = PackViewer(run, feed)
    if request.examples is not None:
        return InspectResult(examples=viewer.first_samples(request.examples))
    accumulation = run.args.training_args.gradient_accumulation_steps
    numbers = range(NUM_ON_PAGE if request.html else 1)
    if request.packs.pack is not None:
        numbers = range(request.packs.pack, request.packs.pack + 1)
    elif request.step is not None:
        numbers = range((request.step - 1) * accumulation, request.step * accumulation)
    packs = list(viewer.packs(numbers, lambda number: Place(step=1 + number // accumulation)))
    if not packs:
        raise ConfigError(f"the rows of rank 0 make fewer than {counted(numbers[0] + 1, 'pack')}")
    return InspectResult(packs=packs, num_packs=len(packs))


def _recorded(run: Run, trained: TrainedRun, request: InspectRequest) -> InspectResult:
    """Show the steps of a trained stream from the packs that its ranks recorded."""
    recorded = trained.recorded_steps()
    if recorded is None:
        raise ConfigError(
            f"{trained.folder} has no record of its packs, and packs of a stream cannot be computed again: it was "
            f"started with {RECORD_PACKS}=false, or by an earlier version. Leave {RECORD_PACKS} out, or set it to true"
        )

    def step_shown(step: int) -> StepShown:
        packs = trained.recorded_step(step)
        if not packs:
            raise ConfigError(f"step {step} is not on record, which has steps {recorded[0]} to {recorded[1]}")
        return _step_shown(step, packs, RECORDED, trained.losses)

    if request.step is not None:
        steps = [step_shown(request.step)]
    else:
        steps = _spike_steps(trained.losses, request.loss_spikes or 0, step_shown)
    return InspectResult(steps=with_places(steps, run, trained.num_shares))


# -- steps and their losses -------------------------------------------------------------------------------------------


def _step_shown(
    step: int, packs: Sequence[TrainedPack], known_from: str, losses: Sequence[Loss], notes: Sequence[str] = ()
) -> StepShown:
    loss = loss_at(losses, step)
    return StepShown(
        step=step,
        packs=packs,
        known_from=known_from,
        loss=None if loss is None else loss.value,
        loss_of=None if loss is None else (loss.first, loss.last),
        notes=notes,
    )


def _spike_steps(losses: Sequence[Loss], most: int, step_shown: Callable[[int], StepShown]) -> list[StepShown]:
    """Show the steps of the largest jumps of the loss, each with the loss before it."""
    found = spikes(losses, most)
    if not found:
        raise ConfigError("--loss-spikes: the log has no loss that is higher than the one before it")
    return [
        replace(step_shown(step), loss_before=spike.before.value)
        for spike in found
        for step in range(spike.loss.first, spike.loss.last + 1)
    ]
