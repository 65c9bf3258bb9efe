"""Give all ranks equally many packs, by splitting packs, and match the costs of a step's packs, by sorting them.

`Plan.align` applies these pure functions over arrays.

>>> balanced_order(np.array([9.0, 1.0, 5.0, 8.0, 2.0, 6.0]), 2, "seed").reshape(-1, 2).tolist()  # steps of two ranks
[[4, 1], [5, 2], [3, 0]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.shuffle import permutation

STEPS_MATCHED = 64
"""Number of steps among whose packs costs are matched.

More steps match better: with giants among the samples, ranks wait for 10 % of the time with 16 steps, and for 2 % with
64 (docs/scale.md). With fewer steps, a pack stays nearer to its place in the mix.
"""


PER_SQUARE, PER_PATCH = 1.4e-5, 0.1
"""The cost of a token that sees another one, and of a vision patch, in costs of a token.

These are the forward operations of a 7B model (28 layers, width 3584, vision tower of 0.67B), divided by those of one
token: 2 x 7e9 for a token, 2 x 28 x 3584 for two tokens that see each other, 2 x 0.67e9 for a patch.
"""


def cost_of_samples(lengths: NDArray[Any], patches: NDArray[Any] | int) -> NDArray[np.float64]:
    """Return the cost of training each sample, in tokens; a pack costs the sum of its samples."""
    sizes = lengths.astype(np.float64)
    cost: NDArray[np.float64] = sizes + PER_SQUARE * sizes**2 + PER_PATCH * patches
    return cost


@dataclass(frozen=True, slots=True)
class Balance:
    """Measures of how well the ranks of a step are matched in cost, over all steps."""

    slowest_to_mean: float
    """Cost of the slowest rank, summed over steps, divided by the mean of all ranks; 1.0 is perfect."""
    floor: float
    """The least `slowest_to_mean` of any order of these packs, because some samples cost more than a mean pack."""
    num_giants: int
    """The number of samples that alone cost more than a mean pack."""


def balance_of(costs: NDArray[Any], sample_costs: NDArray[Any], num_ranks: int) -> Balance:
    """Measure packs in the order of steps: every `num_ranks` consecutive packs are a step."""
    mean = float(costs.mean()) if len(costs) else 0.0
    if mean == 0.0:
        return Balance(1.0, 1.0, 0)
    slowest = costs.reshape(-1, num_ranks).max(axis=1)
    best = np.sort(costs)[::-1][::num_ranks]  # the slowest ranks of all steps if packs were sorted by cost
    return Balance(float(slowest.mean() / mean), float(best.mean() / mean), int((sample_costs > mean).sum()))


def balanced_order(costs: NDArray[Any], num_ranks: int, *name: object) -> NDArray[np.int64]:
    """Reorder packs among `STEPS_MATCHED` steps, so that the packs of a step cost about the same.

    To sort these packs by cost and cut them into steps minimises the sum of the slowest ranks. Then the steps are
    shuffled, and the ranks inside of each step, so that no rank always has the most expensive pack.
    """
    order = np.arange(len(costs), dtype=np.int64)
    num_packs = STEPS_MATCHED * num_ranks
    for number, start in enumerate(range(0, len(costs), num_packs)):
        inside = order[start : start + num_packs]
        # The direction of the sort does not matter: it only has to make packs of similar cost neighbours.
        by_cost = inside[np.argsort(-costs[inside], kind="stable")].reshape(-1, num_ranks)
        steps = by_cost[permutation(len(by_cost), *name, "steps", number)]
        keys = permutation(steps.size, *name, "ranks", number).reshape(steps.shape)
        order[start : start + num_packs] = np.take_along_axis(steps, np.argsort(keys, axis=1), axis=1).ravel()
    return order


def spread_empty(is_empty: NDArray[np.bool_], num_ranks: int) -> NDArray[np.int64]:
    """Return an order that spreads empty packs over the steps, from the last step on, so that no step is empty.

    >>> spread_empty(np.array([False, False, False, True, False, True]), 3).tolist()
    [0, 1, 3, 2, 4, 5]
    """
    num_steps = len(is_empty) // num_ranks
    num_empty = int(is_empty.sum())
    per_step = np.full(num_steps, num_empty // num_steps)
    per_step[num_steps - num_empty % num_steps :] += 1
    column = np.arange(num_ranks)
    slot_is_empty = (column[None, :] >= num_ranks - per_step[:, None]).ravel()
    order = np.empty(len(is_empty), dtype=np.int64)
    order[slot_is_empty] = np.flatnonzero(is_empty)
    order[~slot_is_empty] = np.flatnonzero(~is_empty)
    return order


def packs_to_split(num_samples: NDArray[Any], costs: NDArray[Any], num_more: int) -> NDArray[np.int64]:
    """Choose `num_more` packs to cut in two: the most expensive ones with at least two samples."""
    candidates = np.flatnonzero(num_samples >= 2)
    dearest = candidates[np.argsort(-costs[candidates], kind="stable")]
    return np.sort(dearest[:num_more])
