"""Hold the packs of one epoch in a few arrays (`Plan`), and share them among ranks in equal steps (`Plan.align`).

`planner.plan` makes a plan from lengths; steps.py has the rules by which packs are cut in two and matched in cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import PlanError
from swift_vlpack.plan.items import is_single_long
from swift_vlpack.plan.steps import Balance, balance_of, balanced_order, cost_of_samples, packs_to_split, spread_empty
from swift_vlpack.plan.strategies import lower_bound
from swift_vlpack.plan.units import Units
from swift_vlpack.reasons import Reason
from swift_vlpack.words import counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Sequence[list[int]]):
    """The packs of an epoch: `plan[i]` lists the item indices of pack i."""

    config: PackingConfig
    lengths: NDArray[np.int32]  # (num_items,)
    images: NDArray[np.int32]
    patches: NDArray[np.int32]
    shared: NDArray[np.int32]
    """The tokens that each item shares with the item numbered before it, if that is before it in its pack, too."""
    members: NDArray[np.int32]  # item indices, pack after pack
    offsets: NDArray[np.int64]  # (num_packs + 1,): pack i is members[offsets[i]:offsets[i + 1]]
    dropped: dict[str, NDArray[np.int32]]
    """Item indices that are in no pack, by reason. Those of `underfilled` form a pack that `align` may bring back."""
    method: str
    """The strategy that made the packs, or `best_fit over the epoch` if that needed fewer packs than `exact`."""
    seed: int = 0
    num_ranks: int = 1
    """Ranks take the packs in turn: rank `p % num_ranks` trains pack p."""
    batches: NDArray[np.int64] | None = None
    """The number of packs that a rank trains in each step; None if every step takes as many as are accumulated."""

    def __repr__(self) -> str:
        return (
            f"<Plan: {counted(len(self), 'pack')} of {self.config.packing_length} tokens by {self.method}, "
            f"{counted(len(self.members), 'item')}, mean fill {self.mean_fill:.1%}>"
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of a plan of {len(self)} packs")
        index %= len(self)
        inside: list[int] = self.members[self.offsets[index] : self.offsets[index + 1]].tolist()
        return inside

    def __iter__(self) -> Iterator[list[int]]:
        return (self[i] for i in range(len(self)))

    @property
    def num_samples_per_pack(self) -> NDArray[np.int64]:
        """Count the samples of each pack."""
        return np.diff(self.offsets)

    @cached_property
    def num_tokens_per_pack(self) -> NDArray[np.int64]:
        """Count the tokens of each pack; a prefix that several of its samples share counts once."""
        # Use 64 bits: ten million samples of a thousand tokens are more than 2^31.
        return self._sum_per_pack(self.lengths[self.members].astype(np.int64) - self.shared_of_members)

    @cached_property
    def shared_of_members(self) -> NDArray[np.int32]:
        """Return, by member, the tokens that it shares with the member before it in its pack."""
        if not self.shared.any():  # most plans: no need to look at neighbours
            return np.broadcast_to(np.int32(0), len(self.members))
        follows = np.concatenate(([False], np.diff(self.members) == 1))[: len(self.members)]
        follows[self.offsets[:-1][self.offsets[:-1] < len(follows)]] = False
        shared: NDArray[np.int32] = np.where(follows, self.shared[self.members], 0)
        return shared

    def shared_in(self, pack: int) -> tuple[int, ...]:
        """Return, for each sample of a pack, the tokens that it shares with the one before it; empty if none does."""
        inside: list[int] = self.shared_of_members[self.offsets[pack] : self.offsets[pack + 1]].tolist()
        return tuple(inside) if any(inside) else ()

    @property
    def images_of_members(self) -> NDArray[np.int32]:
        """Return the images that each member does not share with the member before it in its pack."""
        return self._unshared(self.images)

    @property
    def patches_of_members(self) -> NDArray[np.int32]:
        """Return the vision patches that each member does not share with the member before it in its pack."""
        return self._unshared(self.patches)

    def _unshared(self, media: NDArray[np.int32]) -> NDArray[np.int32]:
        made: NDArray[np.int32] = np.where(self.shared_of_members > 0, 0, media[self.members])
        return made

    @property
    def num_padding(self) -> int:
        """Count the padding that `packing_pad_to` adds to packs with a sample."""
        return int((-self.num_tokens_per_pack % self.config.sequence_multiple).sum())

    @cached_property
    def cost_per_pack(self) -> NDArray[np.float64]:
        """Return the cost of each pack under the cost model."""
        return self._sum_per_pack(self._costs_of_members())

    @property
    def num_dropped(self) -> dict[str, int]:
        """Count the items that are in no pack, by reason."""
        return {reason: len(items) for reason, items in self.dropped.items()}

    @cached_property
    def is_single_long(self) -> NDArray[np.bool_]:
        """Return a mask of the packs that consist of one item which exceeds a capacity."""
        over: NDArray[np.bool_] = is_single_long(self.lengths, self.images, self.patches, self.config)
        # Limit the index, because empty packs at the end begin after the last member. `is_alone` rules them out.
        first = self.members[np.minimum(self.offsets[:-1], max(0, len(self.members) - 1))]
        is_alone: NDArray[np.bool_] = self.num_samples_per_pack == 1
        alone_and_over: NDArray[np.bool_] = is_alone & over[first]
        return alone_and_over

    @property
    def mean_fill(self) -> float:
        """Return the mean filled share of packs that are neither empty nor a single long sample."""
        counted = ~self.is_single_long & (self.num_samples_per_pack > 0)
        fills = self.num_tokens_per_pack[counted] / self.config.packing_length
        return float(fills.mean()) if len(fills) else 0.0

    @cached_property
    def lower_bound(self) -> int:
        """Return a number of packs that no strategy can go below for the items in the plan."""
        lengths = self.lengths[self.members]
        if len(lengths):
            # A unit is one item of the bound: its samples can only be apart by repeating their prefix.
            shared = self.shared_of_members
            lengths = np.add.reduceat(lengths - shared, np.flatnonzero(shared == 0))
        return lower_bound(lengths, self.config.packing_length)

    @property
    def num_packs_per_rank(self) -> int:
        """Return the number of packs that each rank trains. Only for an aligned plan."""
        return len(self) // self.num_ranks

    @property
    def num_empty(self) -> int:
        """Return the number of packs without a sample, which complete the last steps and train with a loss of 0."""
        return int((self.num_samples_per_pack == 0).sum())

    @property
    def balance(self) -> Balance:
        """Return how well the packs of a step are matched in cost."""
        costs = self.cost_per_pack
        if self.batches is not None:  # ranks wait for each other at the end of a step, not after each pack
            first = np.concatenate(([0], np.cumsum(self.batches)[:-1]))
            costs = np.add.reduceat(costs.reshape(-1, self.num_ranks), first).ravel()
        return balance_of(costs, self._costs_of_members(), self.num_ranks)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are equal if packs, their order, ranks and remainder are equal."""
        # Include the number of ranks: with another number, the same order of packs makes other steps.
        parts = hashlib.sha256(str(self.num_ranks).encode())
        if self.batches is not None:
            parts.update(self.batches.astype("<i8").tobytes())
        if self.config.shares_media:
            parts.update(self.shared.astype("<i4").tobytes())
        for numbers in (self.offsets.astype("<i8"), self.members.astype("<i4"), self.remainder.astype("<i4")):
            parts.update(numbers.tobytes())
        return parts.hexdigest()[:16]

    @property
    def remainder(self) -> NDArray[np.int32]:
        """Return the underfilled pack that `packing_drop_last` leaves out; `align` may bring it back."""
        return self.dropped.get(Reason.UNDERFILLED.value, np.empty(0, dtype=np.int32))

    def with_remainder(self) -> Plan:
        """Return the plan with the remainder as its last pack, if there is one."""
        if not len(self.remainder):
            return self
        # Sort by place in the epoch, like the samples of every other pack.
        members = np.concatenate((self.members, np.sort(self.remainder)))
        kept = {reason: items for reason, items in self.dropped.items() if reason != Reason.UNDERFILLED.value}
        return replace(self, members=members, offsets=np.append(self.offsets, len(members)), dropped=kept)

    def for_rank(self, rank: int) -> range:
        """Return the numbers of the packs that `rank` trains, in order."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank {rank} of a plan for {self.num_ranks} ranks; align(num_ranks) comes first")
        return range(rank, len(self), self.num_ranks)

    def align(self, num_ranks: int, *, num_packs: int | None = None) -> Plan:
        """Give every rank the same number of packs, without repeating or dropping a sample.

        `num_packs` asks for more packs than that, so that several epochs can have equal length. Missing packs come, in
        this order, from the remainder, from packs that are cut in two, and, if no pack of two samples is left to cut,
        from empty packs; every step has at least one sample. With `packing_balance` the packs of a step are matched in
        cost.
        """
        if num_ranks < 1:
            raise PlanError(f"num_ranks must be at least 1, got {num_ranks}")
        if self.batches is not None:
            raise PlanError("packing_batch=samples packs each step for its ranks: give num_ranks to plan() instead")
        target = -(-len(self) // num_ranks) * num_ranks if num_packs is None else num_packs
        if target % num_ranks:
            raise PlanError(f"{target} packs cannot be shared equally by {num_ranks} ranks; ask for a multiple")
        if target < len(self):
            raise PlanError(f"the epoch has {len(self)} packs already and cannot become {target}; ask for more")
        grown = self.with_remainder() if target > len(self) else self
        if len(grown.members) < target // num_ranks:
            raise PlanError(
                f"{len(grown.members)} samples cannot fill {target // num_ranks} steps of {num_ranks} ranks; "
                "ask for fewer packs"
            )
        # Repeat, because one pass can at most double the packs, and a pack of three samples may be cut twice.
        while len(grown) < target:
            cut = packs_to_split(grown.num_samples_per_pack, grown.cost_per_pack, target - len(grown))
            grown = grown._cut_in_two(cut) if len(cut) else grown._with_empty(target - len(grown))
        return grown._in_steps(num_ranks)

    def _in_steps(self, num_ranks: int) -> Plan:
        aligned = self
        if self.config.packing_balance and num_ranks > 1:
            order = balanced_order(aligned.cost_per_pack, num_ranks, self.seed, "balance", num_ranks)
            aligned = aligned.reordered(order)
        # Spread empty packs after balancing, which would gather them in the same steps, because all cost 0.
        if aligned.num_empty:
            aligned = aligned.reordered(spread_empty(aligned.num_samples_per_pack == 0, num_ranks))
        return replace(aligned, num_ranks=num_ranks)

    def _cut_in_two(self, packs: NDArray[np.int64]) -> Plan:
        """Cut each of `packs` into two halves with tokens as equal as possible. Halves keep their place and order."""
        cuts, shared = [], self.shared_of_members
        own = self.lengths[self.members] - shared
        for pack in packs:
            first, last = int(self.offsets[pack]), int(self.offsets[pack + 1])
            # Leave out the last sum: a cut after the last sample would leave an empty half.
            tokens = np.cumsum(own[first:last])[:-1]
            # A second half that begins within a unit repeats its prefix.
            both = self.num_tokens_per_pack[pack] + shared[first + 1 : last]
            cuts.append(first + 1 + int(np.abs(2 * tokens - both).argmin()))
        return replace(self, offsets=np.sort(np.concatenate((self.offsets, np.array(cuts, dtype=np.int64)))))

    def _with_empty(self, num_more: int) -> Plan:
        return replace(self, offsets=np.concatenate((self.offsets, np.full(num_more, len(self.members)))))

    def reordered(self, order: NDArray[np.int64]) -> Plan:
        """Return the packs with these numbers, in this order."""
        counts = self.num_samples_per_pack[order]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        where = np.arange(offsets[-1]) + np.repeat(self.offsets[order] - offsets[:-1], counts)
        return replace(self, members=self.members[where], offsets=offsets)

    def rest(self, num_consumed: int) -> Plan:
        """Return the packs that are left after the first ones were trained, without empty packs, to be shared again."""
        if not 0 <= num_consumed <= len(self):
            raise PlanError(f"{num_consumed} packs of a plan of {len(self)} packs cannot have been trained on")
        left = np.flatnonzero(self.num_samples_per_pack[num_consumed:]) + num_consumed
        return replace(self.reordered(left), num_ranks=1)

    def _costs_of_members(self) -> NDArray[np.float64]:
        whole = cost_of_samples(self.lengths[self.members], self.patches_of_members)
        return whole - cost_of_samples(self.shared_of_members, 0)

    def of_samples(self, units: Units, columns: NDArray[Any], shared: NDArray[np.int32]) -> Plan:
        """Return the same packs over the samples of units, where the items of this plan are the units.

        `columns` has length, images and patches of the samples.
        """
        lengths, images, patches = columns.astype(np.int32, copy=False)
        counts = np.concatenate(([0], np.cumsum(units.counts[self.members])))
        return replace(
            self,
            lengths=lengths,
            images=images,
            patches=patches,
            members=units.samples(self.members),
            offsets=counts[self.offsets],
            dropped={reason: units.samples(items) for reason, items in self.dropped.items()},
            shared=shared,
        )

    def _sum_per_pack(self, values: NDArray[Any]) -> NDArray[Any]:
        # Take differences of one running total: a loop over a million packs would take seconds.
        total = np.concatenate((np.zeros(1, values.dtype), np.cumsum(values)))
        sums: NDArray[Any] = total[self.offsets[1:]] - total[self.offsets[:-1]]
        return sums
