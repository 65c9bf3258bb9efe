"""Pack each optimizer step by itself, so that it trains the samples that un-packed training would train in it.

    order of the un-packed batches  ->  the samples of each step  ->  packs, dealt to the ranks of the step

Two ranks with batches of two samples make steps of four; the last step has the two samples that are left:

>>> size = UnpackedStep(batch_size=2, accumulation=1, num_ranks=2)
>>> config = PackingConfig(packing_length=10, packing_strategy="exact", packing_batch="samples")
>>> lengths, batch = np.array([6, 3, 4, 2, 5, 5]), np.array([0, 0, 1, 1, 2, 2])
>>> packs = pack_steps(lengths, batch, size, config=config, num_ranks=2)
>>> list(packs), packs.batches.tolist()  # one sequence a rank in each step
([[0, 3], [1, 2], [4], [5]], [1, 1])

The number of sequences differs from step to step, but within a step it is equal for all ranks. Fewest sequences come
first: ranks get equal shares of the samples only if no rank needs more sequences for its share than with the tightest
packs of the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.buffer import use_of_caps
from swift_vlpack.plan.items import is_left_out, must_be_alone
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.registry import strategy_named
from swift_vlpack.plan.steps import cost_of_samples
from swift_vlpack.plan.strategies import Caps, Groups
from swift_vlpack.reasons import Reason
from swift_vlpack.words import counted

IN_NO_STEP = -1
"""The un-packed batch of a sample that un-packed training leaves out of an epoch."""


class UnpackedStep(NamedTuple):
    """An optimizer step of un-packed training: on every rank, `accumulation` batches of `batch_size` samples."""

    batch_size: int
    accumulation: int
    num_ranks: int

    @property
    def num_samples(self) -> int:
        """Return the number of samples of a whole step, over all ranks."""
        return self.batch_size * self.accumulation * self.num_ranks

    @property
    def num_batches(self) -> int:
        """Return the number of batches of a whole step, over all ranks."""
        return self.accumulation * self.num_ranks


UnpackedBatches = Callable[[int, NDArray[np.integer[Any]], UnpackedStep], tuple[NDArray[np.int64], NDArray[np.int32]]]
"""Function of (epoch, lengths of all rows, step). Returns rows in the order of their batches, and the number of the
batch of each row: `step * num_batches + batch_of_rank * num_ranks + rank`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnpackedRows:
    """The rows that un-packed training would draw from, in its own order, and how it puts them into batches."""

    source: NDArray[np.int32]
    """The number of the source of each row."""
    row: NDArray[np.int64]
    """The number of each row in its source."""
    is_deleted_if_failing: NDArray[np.bool_]
    """True for rows that are deleted before the draw if they cannot be encoded; others are drawn, then replaced."""
    lengths_of_cache: NDArray[np.int64]
    """The lengths of rows of a cached data set, by which un-packed training groups them; 0 for other rows."""
    batches: UnpackedBatches


def steps_are_other(num_failed: int) -> str:
    """Say that steps no longer keep the samples of un-packed training.

    >>> steps_are_other(1)
    'the steps are no longer those of un-packed training, which decodes all images before it draws: 1 row failed only \
when it was loaded'
    """
    rows = f"{counted(num_failed, 'row')} failed only when {'it was' if num_failed == 1 else 'they were'} loaded"
    return f"the steps are no longer those of un-packed training, which decodes all images before it draws: {rows}"


def pack_steps(  # noqa: PLR0913 - columns of the data, then for whom they are packed
    lengths: NDArray[np.integer[Any]],
    batch: NDArray[np.integer[Any]],
    size: UnpackedStep,
    *,
    config: PackingConfig,
    num_ranks: int,
    images: NDArray[np.integer[Any]] | None = None,
    patches: NDArray[np.integer[Any]] | None = None,
    samples: NDArray[np.integer[Any]] | None = None,
    seed: int = 0,
) -> Plan:
    """Pack each step of an epoch for `num_ranks` ranks. The un-packed run may have another number of ranks.

    `batch` has the un-packed batch of each item, and `samples` its number of samples (else 1). A length of 0 is a row
    that cannot be encoded, so its step has one sample less.
    """
    nothing = np.zeros(len(lengths), dtype=np.int32)
    images, patches = (nothing if column is None else column for column in (images, patches))
    samples = nothing + 1 if samples is None else samples
    left_out = is_left_out(lengths, images, patches, config) & (lengths > 0)
    in_steps = np.flatnonzero((batch >= 0) & (lengths > 0) & ~left_out)
    in_steps = in_steps[np.argsort(batch[in_steps] // size.num_batches, kind="stable")]
    step = batch[in_steps] // size.num_batches
    num_steps = int(batch.max(initial=IN_NO_STEP)) // size.num_batches + 1
    ends = np.searchsorted(step, np.arange(num_steps), side="right").tolist()
    packer = _StepPacker(lengths, images, patches, samples, config, num_ranks)
    members: list[int] = []
    counts: list[int] = []
    batches: list[int] = []
    first = 0
    for end in ends:
        of_ranks = packer.packed(in_steps[first:end])
        batches.append(len(of_ranks[0]))
        for packs in zip(*of_ranks, strict=True):
            for pack in packs:
                members.extend(pack)
                counts.append(len(pack))
        first = end
    is_long = lengths >= config.packing_length
    dropped = {
        Reason.OVERSIZE.value: np.flatnonzero(left_out & is_long & (batch >= 0)),
        Reason.OVER_CAP.value: np.flatnonzero(left_out & ~is_long & (batch >= 0)),
        Reason.UNPACKED_LEAVES_OUT.value: np.flatnonzero((batch < 0) & (lengths > 0)),
    }
    return Plan(
        config=config,
        lengths=lengths.astype(np.int32, copy=False),
        images=images.astype(np.int32, copy=False),
        patches=patches.astype(np.int32, copy=False),
        shared=nothing,
        members=np.array(members, dtype=np.int32),
        offsets=np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
        dropped={reason: some.astype(np.int32) for reason, some in dropped.items() if len(some)},
        method=f"{config.packing_strategy} in each step",
        seed=seed,
        num_ranks=num_ranks,
        batches=np.array(batches, dtype=np.int64),
    )


class _StepPacker:
    """Pack the samples of one step after the other. Holds the sizes of all samples."""

    def __init__(
        self,
        lengths: NDArray[Any],
        images: NDArray[Any],
        patches: NDArray[Any],
        num_samples: NDArray[Any],
        config: PackingConfig,
        num_ranks: int,
    ) -> None:
        self._lengths, self._costs, self._num_ranks = lengths, cost_of_samples(lengths, patches), num_ranks
        self._is_alone = must_be_alone(lengths, images, patches, config)
        self._uses = np.stack(use_of_caps(num_samples, images, patches, config), axis=1) if config.has_caps else None
        self._limits = tuple(config.caps.values())
        self._config = config
        self._strategy = strategy_named(config.packing_strategy)

    def packed(self, samples: NDArray[np.int64]) -> list[Groups]:
        """Return the packs of each rank, equally many on all ranks. A rank without a sample gets an empty pack."""
        numbers = samples.tolist()
        costs = dict(zip(numbers, self._costs[samples].tolist(), strict=True))
        tightest = self._packs(samples)
        fewest = max(1, -(-len(tightest) // self._num_ranks))
        of_ranks = [tightest]
        if self._num_ranks > 1:
            if self._config.packing_balance:
                of_ranks = [self._packs(np.array(share, dtype=np.int64)) for share in self._shares(numbers, costs)]
            if not self._config.packing_balance or max(map(len, of_ranks)) > fewest:
                of_ranks = self._dealt(tightest, costs, fewest)
        for packs in of_ranks:
            if self._config.packing_balance:  # most expensive first, so that ranks train similar packs at a time
                packs.sort(key=lambda pack: -sum(costs[number] for number in pack))
            grow(packs, fewest, costs)
        return of_ranks

    def _packs(self, samples: NDArray[np.int64]) -> Groups:
        """Let the strategy pack the samples that may share a pack. Each of the others is a pack."""
        is_alone = self._is_alone[samples]
        shared = samples[~is_alone]
        packs: Groups = [[number] for number in samples[is_alone].tolist()]
        if len(shared):
            caps = None if self._uses is None else Caps(self._limits, list(map(tuple, self._uses[shared].tolist())))
            groups = self._strategy(self._lengths[shared].tolist(), self._config.packing_length, caps)
            numbers = shared.tolist()
            packs += [sorted([numbers[index] for index in group]) for group in groups]
        return packs

    def _shares(self, numbers: Sequence[int], costs: dict[int, float]) -> Groups:
        return [sorted(share) for share in deal(numbers, [costs[number] for number in numbers], self._num_ranks)]

    def _dealt(self, packs: Groups, costs: dict[int, float], most: int) -> list[Groups]:
        """Deal packs to the ranks, at most `most` packs to each."""
        if not self._config.packing_balance:
            return [packs[rank :: self._num_ranks] for rank in range(self._num_ranks)]
        of_packs = [sum(costs[number] for number in pack) for pack in packs]
        dealt = deal(range(len(packs)), of_packs, self._num_ranks, most)
        return [[packs[index] for index in share] for share in dealt]


def deal(items: Sequence[int], costs: Sequence[float], num_ranks: int, most: int | None = None) -> list[list[int]]:
    """Deal items to ranks, the most expensive first, each to the rank that has least; at most `most` items to a rank.

    >>> deal([0, 1, 2, 3], [5.0, 4.0, 3.0, 2.0], 2)
    [[0, 3], [1, 2]]
    >>> deal([0, 1, 2, 3], [9.0, 1.0, 1.0, 1.0], 2, most=2)
    [[0, 3], [1, 2]]
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    for at in sorted(range(len(items)), key=lambda at: (-costs[at], at)):
        total, rank = heapq.heappop(ranks)
        dealt[rank].append(items[at])
        if len(dealt[rank]) != most:
            heapq.heappush(ranks, (total + costs[at], rank))
    return dealt


def grow(packs: Groups, num_packs: int, costs: dict[int, float]) -> None:
    """Cut the packs with most samples in two until there are `num_packs`; if none can be cut, add empty packs.

    >>> packs = [[0, 1, 2], [3]]
    >>> grow(packs, 3, {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0})
    >>> packs
    [[0, 1], [2], [3]]
    """
    while len(packs) < num_packs:
        at = max(range(len(packs)), key=lambda at: len(packs[at]), default=-1)
        if at < 0 or len(packs[at]) < 2:
            packs.extend([] for _ in range(num_packs - len(packs)))
            return
        pack = packs[at]
        sums = np.cumsum([costs[number] for number in pack])
        cut = int(np.abs(2 * sums[:-1] - sums[-1]).argmin()) + 1
        packs[at : at + 1] = [pack[:cut], pack[cut:]]


# -- the steps of an epoch, in numbers --------------------------------------------------------------------------------


class KeptSteps(NamedTuple):
    """The steps of an epoch that keep their samples, in numbers that are known before training."""

    num_samples: int
    """Samples of a whole step, over all ranks, as un-packed."""
    num_sequences: float
    """Mean sequences of a step, over all ranks."""
    padding_saved: float
    """Share of the tokens of the un-packed batches, padding included, that packs do not compute."""

    def __str__(self) -> str:
        return (
            f"the same {counted(self.num_samples, 'sample')} as un-packed, in {self.num_sequences:.1f} sequences; "
            f"padding saved: {self.padding_saved:.1%} of the tokens of padded batches"
        )


def kept_steps(packs: Plan, batch: NDArray[np.integer[Any]], size: UnpackedStep) -> KeptSteps:
    """Count the sequences of a step, and the tokens that un-packed batches pad.

    >>> size = UnpackedStep(batch_size=2, accumulation=1, num_ranks=1)
    >>> config = PackingConfig(packing_length=100, packing_batch="samples")
    >>> lengths, batch = np.array([10, 30, 20, 20]), np.array([0, 0, 1, 1])
    >>> kept_steps(pack_steps(lengths, batch, size, config=config, num_ranks=1), batch, size)
    KeptSteps(num_samples=2, num_sequences=1.0, padding_saved=0.2)
    """
    assert packs.batches is not None
    num_sequences = round(float(packs.batches.mean()) * packs.num_ranks, 4)
    return KeptSteps(size.num_samples, num_sequences, padding_saved(packs, batch))


def padding_saved(packs: Plan, batch: NDArray[np.integer[Any]]) -> float:
    """Return the share of the tokens of padded batches that packs do not compute; `batch` has the one of each item."""
    lengths, numbers = packs.lengths[packs.members], batch[packs.members]
    longest = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(longest, numbers, lengths)
    num_padded = int(longest[numbers].sum())
    return round(1 - int(packs.num_tokens_per_pack.sum()) / max(1, num_padded), 4)
