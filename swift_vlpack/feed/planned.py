"""Plan the packs of an epoch before the first image is opened: `len()` packs, `[i]` encodes the samples of pack i.

`PlannedPackingDataset` owns the epochs of a run: their plans, how far one was trained before a resume, and which one is
set. A trainer of your own iterates it with a plain `DataLoader`; ms-swift's trainer gets it through a `PlannedFeed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, Sampler, get_worker_info

from swift_vlpack.config import MEDIA, SAMPLES, PackingConfig
from swift_vlpack.errors import ConfigError, DataError, PlanError, StateMismatch
from swift_vlpack.feed.epochs import Epochs, Extent
from swift_vlpack.feed.failures import refuse_unreadable
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.reader import PackReader, lives_on
from swift_vlpack.lengths.prefixes import sharing_rows
from swift_vlpack.plan.cuts import Cut
from swift_vlpack.plan.epoch import EpochPlan, NameOfRow, Recipe, plan_epoch, saved_digest
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.same_steps import UnpackedRows, UnpackedStep
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address, Encoded, PackAddress, PackedSamples, SampleError
from swift_vlpack.rows.source import RowSource, prefixes_of
from swift_vlpack.words import counted

_GIVE_SAMPLER = (
    "give the loader sampler=packs.sampler, or leave persistent_workers out, so that every epoch starts workers of its "
    "own"
)
NUM_SAMPLES_COMPARED = 8
"""Samples of an epoch whose tokens are compared between ranks; of the others, lengths and order are."""
MOST_FAILURES_OF_PREVIEW = 16
"""Most failing rows that a preview skips. If a disk is gone, every row fails slowly, and training will report that."""


class PlannedPackingDataset(Packs, Dataset[PackedSamples]):
    """The map-style form of `PackingDataset`: `len()` packs in the epoch that is set, `[i]` encodes pack i."""

    dataset: FusionCaptionDataset

    def __init__(  # noqa: PLR0913 - what it packs, then how often and for whom
        self,
        dataset: Any,
        template: Template | None,
        config: PackingConfig,
        *,
        seed: int = 0,
        num_ranks: int = 1,
        lengths: Sequence[int] | None = None,
        num_epochs: int = 1,
        num_packs: int | None = None,
        samples_per_step: int | None = None,
        step: UnpackedStep | None = None,
        unpacked: UnpackedRows | None = None,
    ) -> None:
        """Plan `num_epochs` epochs; if steps bound the run, as many epochs as it takes to train `num_packs` packs.

        Under `packing_batch=samples`, every optimizer step of all ranks takes the next `samples_per_step` samples. For
        a run of ms-swift, `step` and `unpacked` describe its un-packed steps instead.
        """
        super().__init__(dataset, template, config, seed=seed, num_ranks=num_ranks, lengths=lengths)
        if not self.sources:
            raise DataError("data without a length cannot be planned; use PackingDataset, which packs it as it comes")
        self.dataset.measure()
        refuse_unreadable(self.dataset.sources)
        self.dataset = sharing_rows(self.dataset, self.config)
        if step is None and config.packing_batch == SAMPLES and config.effective_batch_size is not None:
            if samples_per_step is not None:
                raise ConfigError("effective_batch_size and samples_per_step both say what a step takes; give one")
            samples_per_step = config.effective_batch_size
        self._rows = {0: self.dataset}
        """Rows of the epochs that were planned, of data that changes: each is measured once."""
        self._has_later_epochs = num_epochs > 1
        if samples_per_step is not None:
            step = UnpackedStep(batch_size=samples_per_step, accumulation=1, num_ranks=1)
        self.step = checked_step(step, self.config, self.dataset)
        """The optimizer step whose samples are kept; None if the packs decide what a step trains."""
        self._unpacked = unpacked
        self._plan_epochs(Extent(num_epochs, num_packs))
        self._plan = self._epochs.plan(0)
        deletes = unpacked is not None and bool(unpacked.is_deleted_if_failing.any())
        self.is_decoded_ahead = deletes and bool(self._plan.images.any())
        """True if un-packed training, whose steps are kept, decodes all images before it draws. The plan knows headers,
        so a row with broken pixels is in a step here, and was deleted there."""

    def _plan_epochs(self, extent: Extent) -> None:
        rows = self.dataset
        recipe_of_epoch = self._recipe if rows.changes else None
        self._epochs = Epochs(self._recipe(self.epoch), extent, name_of=names_of(rows), recipe_of=recipe_of_epoch)
        self.num_packs = self._epochs.num_packs
        """Packs of an epoch, over all ranks. An epoch that was not planned ahead can have more."""
        self.digests_ahead = self._epochs.digests
        """Digests of the epochs that were planned at the start."""
        self.reader = PackReader(rows, self.config, self.seed, self.num_packs)

    def _recipe(self, epoch: int) -> Recipe:
        recipe = recipe_of(self._rows_of(epoch), self.config, seed=self.seed, num_ranks=self.num_ranks)
        return replace(recipe, step=self.step, unpacked=self._unpacked)

    def _rows_of(self, epoch: int) -> FusionCaptionDataset:
        """Return the rows of an epoch. Data that changes is told the epoch first, and then measured."""
        if not self.dataset.changes:
            return self.dataset
        if epoch not in self._rows:
            self._rows[epoch] = self.dataset.at(epoch)
        return self._rows[epoch]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the packs of the epoch that is set, for spawned workers, which plan nothing."""
        return {**self.__dict__, "_epochs": None, "dataset": None, "_rows": None, "_unpacked": None}

    def __repr__(self) -> str:
        return f"<PlannedPackingDataset: epoch {self.epoch} of {self.dataset!r}, {self.plan!r}>"

    # -- epochs -----------------------------------------------------------------------------------------------------

    @property
    def epoch_plan(self) -> EpochPlan:
        """Return the plan of the epoch that was set. Raises `DataError` in a worker that was started before it was."""
        if self._plan.epoch != self.epoch:
            raise DataError(
                f"this dataloader worker has the packs of epoch {self._plan.epoch}, and epoch {self.epoch} is set: "
                f"{_GIVE_SAMPLER}"
            )
        return self._plan

    @property
    def plan(self) -> Plan:
        """Return the packs of the epoch; indices are positions in its schedule."""
        return self.epoch_plan.packs

    def plan_of(self, epoch: int) -> EpochPlan:
        """Plan any epoch. The epoch that is set does not change."""
        return self._epochs.plan(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let data that changes draw its rows, mix the sources, and pack. A resumed epoch continues where it was."""
        if epoch != self.epoch:
            num_ranks = self.num_ranks if self.dataset.changes else 1
            alike_on_ranks(num_ranks, lambda: self._go_to(self._epochs.plan(epoch)))

    def make_ahead(self, epoch: int) -> None:
        """Start to plan a later epoch in a thread, if the run has it."""
        self._epochs.make_ahead(epoch)

    def resume(self, epoch: int, cuts: Sequence[Cut], digest: str) -> None:
        """Set an epoch that was partly trained, by any number of ranks. `digest` is the digest of the saved plan.

        Raises `StateMismatch` if this run plans the epoch differently.
        """
        packed = self._epochs.packed(epoch)
        try:
            # Check the digest before the packs are shared anew: saved counts refer to the old layout.
            found = saved_digest(packed, cuts)
            plan = plan_epoch(self._epochs.recipe, epoch, cuts, packed=packed)
        except PlanError as error:
            raise StateMismatch(f"damaged: state.cuts are not of this plan: {error}") from error
        if found != digest:
            raise StateMismatch(
                f"the same data and options now give another plan of epoch {epoch} ({found}, but {digest} was saved): "
                "the version of swift_vlpack or numpy has changed"
            )
        self._go_to(plan)

    def take_sizes(self, sources: Sequence[RowSource]) -> None:
        """Plan with the sizes of a saved run. They differ for rows whose files have gone or come back since."""
        if tuple(sources) != self.dataset.sources:
            self.dataset = self.dataset.with_sources(sources)
            self._plan_epochs(self._epochs.extent)

    def keep_step(self, step: UnpackedStep) -> None:
        """Keep the steps of a saved run, which may have had another number of ranks.

        Raises `StateMismatch` if its steps have another number of samples.
        """
        assert self.step is not None
        if step.num_samples != self.step.num_samples:
            raise StateMismatch(_other_samples(step, self.step))
        if step != self.step:
            self.step = step
            self._plan_epochs(self._epochs.extent)

    def _go_to(self, plan: EpochPlan) -> PlannedPackingDataset:
        self._plan = plan
        self.dataset = self._rows_of(plan.epoch)
        self.dataset.tell_sources()  # also where the epoch was planned ahead
        self._rows = {epoch: rows for epoch, rows in self._rows.items() if epoch >= plan.epoch}
        super().set_epoch(plan.epoch)
        return self

    # -- packs ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.epoch_plan)

    def __getitem__(self, index: int | PackAddress) -> PackedSamples:
        if isinstance(index, PackAddress):
            return self.reader[index]
        if self._has_later_epochs and get_worker_info() is not None and lives_on():
            raise DataError(
                f"this dataloader worker will live on, and knows only the packs of its epoch: {_GIVE_SAMPLER}"
            )
        return self.reader[self.address(index)]

    def address(self, number: int) -> PackAddress:
        """Return the address of pack `number` of the epoch."""
        return address_of(self.epoch_plan, number)

    @property
    def sampler(self) -> Sampler[PackAddress]:
        """Return a sampler for a loader with persistent workers: `DataLoader(packs, sampler=packs.sampler, ...)`."""
        return AddressSampler(self)

    def preview(self, num_samples: int) -> Iterator[Encoded]:
        """Yield the first samples of the epoch, encoded when they are asked for; skip rows that fail."""
        epoch = self.epoch_plan
        tried = epoch.samples(epoch.packs.members[: num_samples + MOST_FAILURES_OF_PREVIEW].tolist())
        samples = (self.dataset.alone(Address(*where)) for where in tried)
        return islice((sample for sample in samples if not isinstance(sample, SampleError)), num_samples)


def alike_on_ranks(num_ranks: int, make: Callable[[], PlannedPackingDataset]) -> PlannedPackingDataset:
    """Plan packs on all ranks that share them. Raises on all of them if one fails, or has planned other rows.

    If ranks share packs and `torch.distributed` runs, all of them must call it.
    """
    is_shared = num_ranks > 1 and dist.is_available() and dist.is_initialized()
    if not is_shared or get_worker_info() is not None:
        return make()
    everyone: list[Any] = [None] * dist.get_world_size()
    made: Any = None
    try:
        made = make()
        tokens = [list(map(int, sample["input_ids"])) for sample in made.preview(NUM_SAMPLES_COMPARED)]
        said: Any = made.digests_ahead, made._epochs.packed(made.epoch).packs.digest(), tokens
    except Exception as error:
        made, said = error, f"{type(error).__name__}: {error}"
    dist.all_gather_object(everyone, said)
    if isinstance(made, Exception):  # raised only now, because the other ranks would wait for this one
        raise made
    for rank, of_rank in enumerate(everyone):
        if isinstance(of_rank, str):
            raise DataError(f"rank {rank} cannot plan its packs: {of_rank}")
        if of_rank != everyone[0]:
            raise DataError(
                f"rank {rank} has other rows than rank 0: every rank has to draw the rows of all ranks, by the same "
                "seed, because packs are shared among ranks afterwards"
            )
    return made


class AddressSampler(Sampler[PackAddress]):
    """Yield the addresses of all packs of the epoch that is set, from which workers of any epoch encode packs."""

    def __init__(self, packs: PlannedPackingDataset) -> None:
        self.packs = packs

    def __len__(self) -> int:
        return len(self.packs)

    def __iter__(self) -> Iterator[PackAddress]:
        return map(self.packs.address, range(len(self)))


def recipe_of(rows: FusionCaptionDataset, config: PackingConfig, *, seed: int, num_ranks: int) -> Recipe:
    """Collect everything that decides the plans of a run: sizes, cuts of rows, the mix, options, ranks."""
    sizes, cut = [], []
    for source in rows.sources:
        assert source.sizes is not None, f"{source.name} was not measured"
        if config.packing_overflow != "keep" and source.sizes.cut is None:
            raise DataError(
                f"source {source.name!r} was measured for rows that stay whole, but packing_overflow="
                f"{config.packing_overflow} cuts them; give the source without sizes, so that it is measured again"
            )
        sizes.append(source.sizes.columns)
        cut.append(source.sizes.cut)
    return Recipe(
        sizes=tuple(sizes),
        cut=tuple(cut),
        prefixes=prefixes_of(rows.sources) if config.packing_share == MEDIA else (),
        mix=rows.mix,
        config=config,
        seed=seed,
        num_ranks=num_ranks,
    )


def checked_step(step: UnpackedStep | None, config: PackingConfig, rows: FusionCaptionDataset) -> UnpackedStep | None:
    """Return the step to keep. Raises `ConfigError` if it is missing, or was given but would be ignored."""
    if rows.changes and (config.packing_batch == SAMPLES or config.shares_media):
        raise ConfigError(
            "packing_batch=samples and packing_share=media need the same rows in every epoch, but the data set has "
            "set_epoch; leave both options out"
        )
    if config.packing_batch != SAMPLES:
        if step is not None:
            raise ConfigError("samples_per_step needs packing_batch=samples; set that, or leave samples_per_step out")
        return None
    if step is None:
        raise ConfigError(
            "packing_batch=samples keeps the samples of every optimizer step; give effective_batch_size, the samples "
            "of a step over all ranks (or PackingDataset samples_per_step)"
        )
    if min(step) < 1:
        raise ConfigError(f"samples_per_step must be at least 1, got {step.num_samples}")
    if rows.mix.ratio_by == "tokens":
        raise ConfigError(
            "ratio_by: tokens draws a different number of rows in every epoch, but packing_batch=samples needs equally "
            "many steps in all epochs; use ratio_by: rows"
        )
    return step


def _other_samples(saved: UnpackedStep, now: UnpackedStep) -> str:
    """Return an error: a step of the saved run has another number of samples. Names the accumulation to use."""
    found = (
        f"packing_batch=samples: a step of the saved run has {saved.num_samples} samples ({saved.batch_size} a batch x "
        f"{saved.accumulation} accumulated x {counted(saved.num_ranks, 'rank')}), one of this run {now.num_samples}"
    )
    others = now.batch_size * now.num_ranks
    if saved.num_samples % others:
        return f"{found}; take a number of ranks and a batch size whose product divides {saved.num_samples}"
    return f"{found}; give --gradient_accumulation_steps {saved.num_samples // others}"


def address_of(plan: EpochPlan, number: int) -> PackAddress:
    """Return the address of a pack in a plan: everything that a worker needs to encode it."""
    positions = plan.packs[number]
    sizes = tuple(map(tuple, plan.sizes[:, positions].T.tolist()))
    samples = tuple(Address(*at) for at in plan.samples(positions))
    return PackAddress(plan.epoch, number % len(plan), samples, sizes, plan.packs.shared_in(number))


def names_of(rows: FusionCaptionDataset) -> NameOfRow:
    """Return a function that names samples in the log of planning."""
    return lambda *where: str(rows.sample_id(Address(*where)))
