"""Packs planned ahead of time: the map-style form of `PackingDataset`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info
from tqdm import tqdm

from swift_vlpack.core.account.reasons import Reason
from swift_vlpack.core.account.remedies import warning_of_left_out
from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.epoch.cuts import Cut, replayed, shared
from swift_vlpack.core.epoch.plan import Plan
from swift_vlpack.core.epoch.planner import plan
from swift_vlpack.core.errors import DataError, PlanError, StateMismatch
from swift_vlpack.core.packing.alone import must_be_alone
from swift_vlpack.data.feeds.dataset import PackingDataset, counted_failure, packed_samples
from swift_vlpack.data.lengths.sizes import LengthIndex
from swift_vlpack.data.rows.fusion import RowSource, Template
from swift_vlpack.data.rows.randomness import RandomStream
from swift_vlpack.data.rows.samples import Encoded, LeftOut, PackAddress, PackedSamples, SampleError, SampleId

logger = logging.getLogger(__name__)

NUM_ROWS_SHOWN = 500_000
"""Planning more rows than that takes long enough for a progress bar."""
NUM_EPOCHS_TRIED = 8
"""Epochs that are planned ahead to know their length where not epochs but steps are given."""


class PlannedPackingDataset(PackingDataset):
    """The map-style form: the plan of the epoch, decided before a single image is opened."""

    def __init__(  # noqa: PLR0913 - what it packs, then how often and for whom
        self,
        dataset: Any,
        template: Template,
        config: PackingConfig,
        *,
        seed: int = 0,
        num_ranks: int = 1,
        num_epochs: int = 1,
        num_packs: int | None = None,
    ) -> None:
        """Plan for `num_epochs`, or, where steps are given instead, for as many as `num_packs` packs take."""
        super().__init__(dataset, template, config)
        self.seed = seed
        self.num_ranks = num_ranks
        self.dataset.measure()
        self.dataset.draw_usable(self._can_be_packed)
        self._plan: Plan | None = None
        self._first: Plan | None = None  # of epoch 0, until ranks share it: a large plan is not made twice
        self._cuts: tuple[Cut, ...] = ()
        self._num_epochs, self._num_packs_wanted = max(1, num_epochs), num_packs
        self.num_packs = self._num_packs_of_longest_epoch()
        """Packs of every epoch, unless it is resumed; over all ranks."""
        self._num_failed_in_a_row = 0
        self._draws_at_random = False

    @property
    def plan(self) -> Plan:
        """The packs of the current epoch; indices are positions in the epoch's schedule."""
        if self._plan is None:
            first, self._first = self._first, None
            planned = first if first is not None and self.epoch == 0 else self._planned(is_logged=True)
            self._plan, self._cuts = shared(planned, self._cuts, self.num_ranks, num_packs=self.num_packs)
        return self._plan

    def unaligned_plan(self) -> Plan:
        """The packs of the current epoch before any is cut to give ranks and epochs equally many."""
        return self._planned()

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """How far the epoch had come when it was begun or resumed; the last cut is that of the present ranks."""
        assert self.plan is not None
        return self._cuts

    @property
    def num_steps_left(self) -> int:
        """Packs that each rank trains on in the current epoch, from where it was begun or resumed."""
        return (self.cuts[-1].num_packs - self.cuts[-1].num_consumed) // self.num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Mix, then plan anew when the packs are next asked for."""
        if epoch != self.epoch:
            self._plan, self._cuts = None, ()
        super().set_epoch(epoch)

    def resume(self, epoch: int, cuts: Sequence[Cut]) -> str:
        """Go on in an epoch of which some packs were trained on, by any number of ranks.

        Returns the digest of the packs that the last cut counts in, by which a saved plan is known again.
        """
        self.set_epoch(epoch)
        planned = self._planned(is_logged=True)
        try:
            digest = replayed(planned, cuts).digest()
            self._plan, self._cuts = shared(planned, cuts, self.num_ranks)
        except PlanError as error:
            raise StateMismatch(f"damaged: state.cuts are not of this plan: {error}") from error
        return digest

    def plan_with(self, sources: Sequence[RowSource]) -> None:
        """Plan anew, with the sizes that these sources have."""
        self.dataset.sources = tuple(sources)
        self.dataset.draw_usable(self._can_be_packed)
        self._plan, self._first, self._cuts = None, None, ()
        self.num_packs = self._num_packs_of_longest_epoch()

    def addresses_left(self, rank: int) -> Iterator[PackAddress]:
        """The packs of a rank in the current epoch, from where it was begun or resumed."""
        num_trained = self.cuts[-1].num_consumed // self.num_ranks
        return (self.address(index) for index in self.plan.for_rank(rank)[num_trained:])

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int | PackAddress) -> PackedSamples:
        if isinstance(index, PackAddress):
            return self.load(index)
        self.follow_epoch()
        return self.load(self.address(index))

    def __getstate__(self) -> dict[str, Any]:
        """Workers get addresses, so the plan stays at home."""
        return {**self.__dict__, "_plan": None, "_first": None}

    def address(self, index: int) -> PackAddress:
        """What pack `index` of the current epoch is made of."""
        return PackAddress(self.epoch, index, tuple(self.dataset.address(position) for position in self.plan[index]))

    @property
    def packed_length(self) -> list[int]:
        """Tokens of every pack, under the name ms-swift's statistics ask for."""
        return self.plan.num_tokens_per_pack.tolist()

    def left_out_by_plan(self) -> list[LeftOut]:
        """Scheduled rows of the epoch that are in no pack, with reasons."""
        sizes = self.dataset.scheduled_sizes()
        unreadable = np.flatnonzero(sizes.lengths == 0).tolist()
        left_out = [self.dataset.failed(self.dataset.address(position)) for position in unreadable]
        for reason, positions in self.plan.dropped.items():
            for position in positions.tolist():
                said = f"{sizes.lengths[position]} tokens, {sizes.images[position]} images"
                left_out.append(LeftOut(self._sample_id(position), reason, said))
        return left_out

    def warning_of_left_out(self) -> str | None:
        """What to do about the rows that the plan of the epoch leaves out, where they are too many."""
        num_left_out = Counter(left_out.reason for left_out in self.left_out_by_plan())
        return warning_of_left_out(num_left_out, num_rows=len(self.dataset))

    def load(self, address: PackAddress) -> PackedSamples:
        """Encode the samples of a pack. The true length decides: what does not fit is left out, with a reason."""
        found: list[tuple[Encoded, bool]] = []
        left_out: list[LeftOut] = []
        for where, sample in zip(address.samples, self._encoded(address), strict=True):
            if isinstance(sample, SampleError):
                left_out.append(self._failed(sample))
                continue
            self._num_failed_in_a_row = 0
            self.dataset.correct(where, sample)
            planned = self.dataset.planned_size(where)
            found.append((sample, planned is not None and sample["length"] > planned.length))
        kept, longer = self._fitting(found)
        return packed_samples(kept, address.epoch, address.number, self.config, left_out + longer)

    def _fitting(self, found: list[tuple[Encoded, bool]]) -> tuple[list[Encoded], list[LeftOut]]:
        """Those that fit beside each other, in their order. Samples that grew give way to those that did not."""
        keeps, left_out, num_tokens = [False] * len(found), [], 0
        for at in sorted(range(len(found)), key=lambda at: found[at][1]):
            sample, has_grown = found[at]
            is_alone = not any(keeps) and (self.config.packing_allow_single_long or not has_grown)
            if is_alone or num_tokens + sample["length"] <= self.config.packing_length:
                keeps[at] = True
                num_tokens += sample["length"]
                continue
            length, capacity = sample["length"], self.config.packing_length
            said = f"{length} tokens do not fit beside the {num_tokens} of its pack (packing_length {capacity})"
            left_out.append(LeftOut(sample["sample_id"], Reason.LONGER_THAN_PLANNED.value, said))
            logger.warning("%s: left out: %s", sample["sample_id"], said)
        return [sample for (sample, _), is_kept in zip(found, keeps, strict=True) if is_kept], left_out

    def _encoded(self, address: PackAddress) -> list[Encoded | SampleError]:
        """Encode in as many threads as this worker may use: images are decoded and resized outside of Python's lock.

        Threads draw random numbers in no order, so a template that draws any encodes one row after the other.
        """
        name = (self.seed, address.epoch, address.number)
        num_threads = min(len(address.samples), threads_per_worker())
        if num_threads > 1 and not self._draws_at_random:
            with RandomStream(*name) as stream, ThreadPoolExecutor(num_threads) as threads:
                encoded = list(threads.map(self.dataset.sample_or_error, address.samples))
            self._draws_at_random = stream.has_drawn
            if not self._draws_at_random:
                return encoded
        with RandomStream(*name):
            return [self.dataset.sample_or_error(where) for where in address.samples]

    def _sample_id(self, position: int) -> SampleId:
        return self.dataset.sample_id(self.dataset.address(position))

    def _failed(self, error: SampleError) -> LeftOut:
        self._num_failed_in_a_row += 1
        return counted_failure(error, self._num_failed_in_a_row, self.config.packing_max_failures)

    def _can_be_packed(self, sizes: LengthIndex) -> NDArray[np.bool_]:
        """Which rows can be in a pack. So all epochs have equally many samples, and none too few for the others' steps.

        A step needs one sample: no more steps than samples are ever asked for, because no epoch has more packs than
        samples, and packs can be cut down to one sample.
        """
        usable: NDArray[np.bool_] = sizes.lengths > 0
        if self.config.packing_allow_single_long:
            return usable
        usable &= ~must_be_alone(sizes.lengths, sizes.images, sizes.patches, self.config)
        return usable

    def _planned(self, *, is_logged: bool = False) -> Plan:
        """Plan the rows that can be encoded; the plan's indices are positions in the schedule."""
        sizes = self.dataset.scheduled_sizes()
        usable = np.flatnonzero(sizes.lengths > 0)
        if not len(usable):
            raise DataError(f"epoch {self.epoch}: none of the {len(sizes)} rows can be packed; the log has the reasons")
        made = plan(
            sizes.lengths[usable],
            self.config,
            images=sizes.images[usable],
            patches=sizes.patches[usable],
            seed=self.seed + self.epoch,
            label=(lambda item: str(self._sample_id(int(usable[item])))) if is_logged else None,
        )
        if not len(made):
            raise DataError(f"epoch {self.epoch} has no pack; all {len(usable)} rows were left out: {made.num_dropped}")
        return made if len(usable) == len(sizes) else made.renumbered(usable, sizes.columns[:3])

    def _num_packs_of_longest_epoch(self) -> int:
        """All epochs get as many packs as the one that needs most, so that steps are known from the start.

        Where steps are given, a few epochs are looked at; one that needs more than those has more.
        """
        num_epochs, num_packs = self._num_epochs, self._num_packs_wanted
        most = epoch = 0
        is_quick = len(self.dataset) * num_epochs < NUM_ROWS_SHOWN
        with tqdm(desc="Planning epochs", dynamic_ncols=True, disable=is_quick) as bar:
            while epoch < num_epochs if num_packs is None else not epoch or epoch * most < num_packs:
                if num_packs is not None and epoch == NUM_EPOCHS_TRIED:
                    break
                self.set_epoch(epoch)
                planned = self._planned(is_logged=epoch == 0)
                self._first = planned if epoch == 0 else self._first
                most = max(most, _rounded_up(len(planned), self.num_ranks))
                epoch += 1
                bar.update()
        self.set_epoch(0)
        return most


def threads_per_worker() -> int:
    """The cores of this machine, shared by its ranks and their dataloader workers."""
    worker = get_worker_info()
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (worker.num_workers if worker else 1)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // num_sharing)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
