"""The feed of planned packs: every epoch is a value, a rank trains its part of it, cuts say how far all have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import PlanError, StateMismatch
from swift_vlpack.feed.agreement import Voting
from swift_vlpack.feed.collate import Batch
from swift_vlpack.feed.epochs import ONE_EPOCH, Epochs, Extent
from swift_vlpack.feed.feed import EpochStart, MakeLoader
from swift_vlpack.feed.packs import make_packing
from swift_vlpack.feed.planned import address_of, count_rows, left_out_by, left_out_warning, names_of, recipe_of
from swift_vlpack.feed.reader import PackReader
from swift_vlpack.feed.run_rows import RunRows, digest_of
from swift_vlpack.feed.saved_rows import NUM_PLANNED_COLUMNS
from swift_vlpack.plan.cuts import Cut, cuts_from, with_consumed
from swift_vlpack.plan.epoch import EpochPlan, plan_epoch, saved_digest
from swift_vlpack.plan.resume_schedule import batches_behind
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import LeftOut, PackAddress, PackRecord
from swift_vlpack.runlog.telemetry import Telemetry


class PlannedFeed:
    """Packs that are decided before the first image is opened. `dataset` has been measured."""

    kind = "plan"
    leads_back = True

    def __init__(
        self,
        dataset: FusionCaptionDataset,
        template: Template,
        config: PackingConfig,
        *,
        seed: int = 0,
        num_ranks: int = 1,
        extent: Extent = ONE_EPOCH,
    ) -> None:
        self.unpacked_batch_size = 1
        self.objective: dict[str, Any] = {}
        make_packing(template, dataset, config)
        self.template = template
        self.config = config
        self.dataset = dataset
        self.seed = seed
        self.num_ranks = num_ranks
        self._num_trained = 0  # packs of this rank in the epoch, since it was begun or resumed
        self._epochs = self._planned(dataset, extent)
        self.epoch_plan: EpochPlan = self._epochs.plan(0)
        """The epoch that was begun or resumed."""

    def _planned(self, dataset: FusionCaptionDataset, extent: Extent) -> Epochs:
        recipe = recipe_of(dataset, dataset.sources, self.config, seed=self.seed, num_ranks=self.num_ranks)
        return Epochs(recipe, extent, names_of(dataset))

    def __len__(self) -> int:
        return self._epochs.num_packs

    @cached_property
    def rows(self) -> RunRows:
        """Read when training begins: a plan alone does not need them."""
        return RunRows(self.dataset)

    @property
    def epoch(self) -> int:
        """The number of the epoch that was begun or resumed."""
        return self.epoch_plan.epoch

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left of it."""
        return self.epoch_plan.is_finished

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the plans of all epochs follow from; the order itself is in the digest of each plan."""
        sizes = [source.sizes for source in self.rows.sources if source.sizes is not None]
        columns = [of_source.columns[:NUM_PLANNED_COLUMNS] for of_source in sizes]
        columns += [part for of_source in sizes if of_source.cut is not None for part in of_source.cut.arrays]
        return {
            "seed": self.seed,
            **self.rows.fingerprint(self.dataset),
            # Without the tokens with a label, which decide nothing.
            "lengths": digest_of(*(column.astype("<i8").tobytes() for column in columns)),
            **self.config.pack_options(),
            **self.config.objective(),
            **self.objective,
            "packing_balance": self.config.packing_balance,
        }

    def plan(self, epoch: int, cuts: Sequence[Cut] = (), num_ranks: int | None = None) -> EpochPlan:
        """Any epoch, as any number of ranks shares it; the feed stays where it is."""
        epochs = self._epochs
        if num_ranks not in (None, self.num_ranks):
            epochs = Epochs(replace(epochs.recipe, num_ranks=num_ranks), epochs.extent)
        return epochs.plan(epoch, cuts)

    def begin(self, epoch: int) -> EpochStart:
        """Come to an epoch; the one that was resumed is there already."""
        if epoch != self.epoch:
            self.epoch_plan, self._num_trained = self._epochs.plan(epoch), 0
        left_out = left_out_by(self.epoch_plan, self.dataset)
        return EpochStart(
            must_agree={"digest": self.epoch_plan.digest(), "packs": len(self.epoch_plan)},
            left_out=left_out,
            warning=left_out_warning(self.epoch_plan, left_out, self.config),
        )

    def batches_behind(self, accumulation: int) -> int:
        """What was consumed of the epoch, in whole steps of the present ranks."""
        consumed = self.epoch_plan.num_consumed
        return batches_behind(consumed, num_ranks=self.num_ranks, accumulation=accumulation)

    @property
    def batches_left(self) -> int:
        """Packs that each rank trains on, from where the epoch was begun or resumed."""
        return self.epoch_plan.num_left_per_rank

    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """A loader whose sampler hands out addresses, so that workers that live on need no plan; nobody votes."""
        reader = PackReader(self.dataset, self.config, self.seed, len(self))
        return make(reader, feed=self, batch_sampler=PackSampler(self, rank), **options)

    def batches(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """All of them."""
        return loaded

    def fill_up(self, num_missing: int) -> list[Batch]:
        """None: the trainer knows how long the epoch is."""
        return []

    def consumed(self, records: Sequence[PackRecord]) -> None:
        """Count them, and let the next epoch be planned while this one trains.

        Not before the first step: dataloader workers have been forked by then, none of them in the middle of a plan.
        """
        self._num_trained += len(records)
        self._epochs.make_ahead(self.epoch + 1)

    def left_out_behind(self) -> list[LeftOut]:
        """Nothing: every row has its pack."""
        return []

    def count_rows(self, counted: Telemetry) -> None:
        """All scheduled rows, and those of them that are in no pack."""
        count_rows(counted, self.epoch_plan, self.dataset)

    def end(self, counted: Telemetry) -> str | None:
        """Nothing to say that was not said when the epoch began."""
        return None

    def state(self) -> dict[str, Any]:
        """How far all ranks have come, and the digest of what that counts in."""
        cuts = with_consumed(self.epoch_plan.cuts, self._num_trained * self.num_ranks)
        return {"epoch": self.epoch, "cuts": cuts, "plan": self.epoch_plan.digest()}

    def rank_state(self) -> dict[str, Any] | None:
        """None: all ranks are at the same place."""
        return None

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Go on in an epoch of which some packs were trained on, by any number of ranks."""
        if self.rows.sources != self.dataset.sources:  # a file is gone, or back: the plan is that of the saved run
            self.dataset = self.dataset.with_sources(self.rows.sources)
            self._epochs = self._planned(self.dataset, self._epochs.extent)
        cuts = cuts_from(state["cuts"])
        packed = self._epochs.packed(state["epoch"])
        try:
            # Before the new sharing, which a run on other ranks has: saved numbers count in that of then.
            digest = saved_digest(packed, cuts)
            self.epoch_plan = plan_epoch(self._epochs.recipe, state["epoch"], cuts, packed=packed)
            self._num_trained = 0
        except PlanError as error:
            raise StateMismatch(f"damaged: state.cuts are not of this plan: {error}") from error
        if digest != state["plan"]:
            raise StateMismatch(
                f"the same data and options give another plan of epoch {state['epoch']} than then ({digest}, then "
                f"{state['plan']}): swift_vlpack, numpy or binpacking is another version"
            )


class PackSampler:
    """The packs of one rank in order, as addresses."""

    def __init__(self, feed: PlannedFeed, rank: int) -> None:
        self.feed = feed
        self.rank = rank

    @property
    def epoch(self) -> int:
        """The epoch the packs are of; ms-swift reads it when it rebuilds a loader on resume."""
        return self.feed.epoch

    def __len__(self) -> int:
        """Packs of a whole epoch, from which the trainer computes its steps; a resumed epoch yields what is left."""
        return len(self.feed) // self.feed.num_ranks

    def __iter__(self) -> Iterator[list[PackAddress]]:
        plan = self.feed.epoch_plan
        return ([address_of(plan, number)] for number in plan.numbers_left(self.rank))
