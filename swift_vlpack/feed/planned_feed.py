"""Feed a trainer with planned packs: each rank trains its share of an epoch, and cuts record how far all ranks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swift_vlpack.feed.agreement import Voting
from swift_vlpack.feed.collate import Batch
from swift_vlpack.feed.epoch_report import count_rows, left_out_by, left_out_warning
from swift_vlpack.feed.feed import Collate, EpochStart, Feed, MakeLoader
from swift_vlpack.feed.planned import PlannedPackingDataset, address_of
from swift_vlpack.feed.reader import PackReader
from swift_vlpack.feed.saved_rows import NUM_PLANNED_COLUMNS, digest_of
from swift_vlpack.plan.cuts import Cut, with_consumed
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.resume_schedule import batches_trained
from swift_vlpack.plan.same_steps import UnpackedStep
from swift_vlpack.rows.samples import Encoded, PackAddress, PackRecord, SampleError
from swift_vlpack.runlog.counts import Counts


class PlannedFeed(Feed):
    """A feed of packs that are planned before the first image is opened."""

    kind = "plan"
    packs: PlannedPackingDataset

    def __init__(self, packs: PlannedPackingDataset, **options: Any) -> None:
        super().__init__(packs, **options)
        self.is_decoded_ahead = packs.is_decoded_ahead
        self._num_trained = 0  # packs that this rank trained since the epoch was begun or resumed

    def __len__(self) -> int:
        """Return the packs of every epoch, over all ranks."""
        return self.packs.num_packs

    @property
    def epoch_plan(self) -> EpochPlan:
        """Return the plan of the epoch that was begun or resumed."""
        return self.packs.epoch_plan

    def plan_of(self, epoch: int) -> EpochPlan:
        """Plan an epoch. The current epoch does not change."""
        return self.packs.plan_of(epoch)

    def batches_of(
        self, numbers: Sequence[int], collate: Collate, *, plan: EpochPlan | None = None, num_workers: int = 0
    ) -> Iterator[Batch]:
        """Encode packs of a plan (default: of the current epoch) in this process, each when it is asked for."""
        plan = self.epoch_plan if plan is None else plan
        return (collate([self.packs[address_of(plan, number)]]) for number in numbers)

    def samples_again(self, record: PackRecord, *, rank: int, num_workers: int) -> Iterator[Encoded | SampleError]:
        """Encode the samples of a pack of this epoch a second time, in this process and with the same random draws."""
        # Use another reader than the one that trains, because that one keeps the row in which its last pack ended.
        reader = PackReader(self.dataset, self.config, self.seed, len(self))
        return iter(reader.encoded(address_of(self.epoch_plan, record.number)))

    # -- epochs -----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> EpochStart:
        """Begin an epoch. A resumed epoch continues after its last trained pack."""
        if epoch != self.epoch:
            self.packs.set_epoch(epoch)
            self._num_trained = 0
        plan = self.epoch_plan
        left_out = left_out_by(plan, self.dataset)
        return EpochStart(
            must_agree={"digest": plan.digest(), "packs": len(plan)},
            left_out=left_out,
            warning=left_out_warning(plan, left_out, self.config),
            facts={"num_packs": len(plan), "balance": round(plan.packs.balance.slowest_to_mean, 4)},
        )

    @property
    def is_finished(self) -> bool:
        """Tell whether the epoch has no packs left to train."""
        return self.epoch_plan.is_finished

    def batches_trained(self, accumulation: int) -> int:
        """Return how many batches of each rank were trained in the epoch, in whole steps of the present ranks."""
        if self.kept_step is not None:
            return self.epoch_plan.num_steps_consumed
        consumed = self.epoch_plan.num_consumed
        return batches_trained(consumed, num_ranks=self.num_ranks, accumulation=accumulation)

    @property
    def batches_left(self) -> int:
        """Return the number of packs that each rank trains from where the epoch was begun or resumed."""
        plan = self.epoch_plan
        return plan.num_left_per_rank if self.kept_step is None else plan.num_steps_left(1)

    @property
    def kept_step(self) -> UnpackedStep | None:
        """Return the optimizer step whose samples are kept; None if the packs decide what a step trains."""
        return self.packs.step

    def sequences_of_steps(self) -> Iterator[int]:
        """Yield the number of sequences that a rank trains in each step, if steps keep their samples; else nothing."""
        plan = self.epoch_plan
        if plan.packs.batches is not None:
            yield from plan.packs.batches[plan.num_steps_consumed :].tolist()

    # -- batches ----------------------------------------------------------------------------------------------------

    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """Make a loader whose sampler yields addresses, so that persistent workers need no plan. Ranks do not vote."""
        return make(self.packs.reader, feed=self, batch_sampler=PackSampler(self, rank), **options)

    def consumed(self, records: Sequence[PackRecord]) -> None:
        """Count trained packs, and let the next epoch be planned while this one trains.

        Planning ahead begins after the first step, when dataloader workers have been forked: a fork while the thread
        plans could copy a held lock.
        """
        self._num_trained += len(records)
        self.packs.make_ahead(self.epoch + 1)

    def count_rows(self, counted: Counts) -> None:
        """Count all scheduled rows, and those of them that are in no pack."""
        count_rows(counted, self.epoch_plan, self.dataset)

    # -- the state in a checkpoint ----------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the plans of all epochs. The order itself is in the digest of each plan."""
        sizes = [source.sizes for source in self.saved_rows.sources if source.sizes is not None]
        columns = [of_source.columns[:NUM_PLANNED_COLUMNS] for of_source in sizes]
        columns += [part for of_source in sizes if of_source.cut is not None for part in of_source.cut.arrays]
        return {
            "seed": self.seed,
            **self.saved_rows.fingerprint(self.dataset.mix),
            # Leave out the tokens with a label: no plan depends on them.
            "lengths": digest_of(*(column.astype("<i8").tobytes() for column in columns)),
            **self.config.pack_options(),
            **self.config.step_options(),
            **self.config.objective(),
        }

    def state(self) -> dict[str, Any]:
        """Return how far all ranks are in the epoch, and the digest of the plan that this number refers to."""
        cuts = with_consumed(self.epoch_plan.cuts, self._num_trained * self.num_ranks)
        state = {"epoch": self.epoch, "cuts": cuts, "plan": self.epoch_plan.digest()}
        return state if self.kept_step is None else {**state, "unpacked_step": list(self.kept_step)}

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Resume an epoch that was partly trained, by any number of ranks."""
        # Plan with the saved sizes, so that the plan is the same although files have gone or come back since.
        self.packs.take_sizes(self.saved_rows.sources)
        if self.kept_step is not None:  # those of the saved run, which may have had another number of ranks
            self.packs.keep_step(UnpackedStep(*state["unpacked_step"]))
        self.packs.resume(state["epoch"], [Cut(*numbers) for numbers in state["cuts"]], state["plan"])
        self._num_trained = 0


class PackSampler:
    """Yield the addresses of one rank's packs, in the order of training, which the plan decides (`numbers_left`)."""

    def __init__(self, feed: PlannedFeed, rank: int) -> None:
        self.feed = feed
        self.rank = rank

    @property
    def epoch(self) -> int:
        """Return the epoch of the packs. ms-swift reads it when it rebuilds a loader on resume."""
        return self.feed.epoch

    def __len__(self) -> int:
        """Return the packs of a whole epoch, from which the trainer computes its steps. A resumed epoch yields fewer.

        If steps keep their samples, return the number of steps, because the trainer accumulates nothing then.
        """
        if self.feed.kept_step is not None:
            return self.feed.epoch_plan.num_steps
        return len(self.feed) // self.feed.num_ranks

    def __iter__(self) -> Iterator[list[PackAddress]]:
        plan = self.feed.epoch_plan
        return ([address_of(plan, number)] for number in plan.numbers_left(self.rank))
