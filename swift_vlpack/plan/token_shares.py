"""Draw sources by their share of an epoch's tokens, where `ratio_by: tokens` asks for it.

An epoch has as many tokens as its sources have together, once. Of these, a source gets its ratio over the sum of all
ratios: a small one with a large ratio comes several times, a large one with a small ratio in part, other rows in every
epoch.

>>> token_targets([1000, 3000], [1, 1])
[2000, 2000]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.shuffle import permutation


class _Weighted(Protocol):
    """What is asked of a source here."""

    @property
    def name(self) -> str: ...

    @property
    def ratio(self) -> float: ...


def token_targets(num_tokens: Sequence[int], ratios: Sequence[float]) -> list[int]:
    """How many tokens of each source an epoch shall have; `num_tokens` are those that each has."""
    # A source without a token has nothing to give; the others share what it would have got.
    weights = [ratio if tokens else 0.0 for tokens, ratio in zip(num_tokens, ratios, strict=True)]
    total = sum(tokens for tokens, weight in zip(num_tokens, weights, strict=True) if weight)
    return [round(total * weight / sum(weights)) if weight else 0 for weight in weights]


def draw_by_tokens(
    sources: Sequence[_Weighted], lengths: Sequence[NDArray[np.integer[Any]]], seeds: Sequence[int], epoch: int
) -> list[NDArray[np.int64]]:
    """The rows of each source in an epoch, by number; `lengths` has 0 for those that cannot be trained."""
    targets = token_targets([int(own.sum()) for own in lengths], [source.ratio for source in sources])
    return [
        _draw(own, target, permutation(len(own), seed, source.name, epoch, "draw"))
        if target or not source.ratio
        else np.arange(len(own), dtype=np.int64)  # none of it can be trained: every row is counted as left out
        for source, own, target, seed in zip(sources, lengths, targets, seeds, strict=True)
    ]


def _draw(lengths: NDArray[np.integer[Any]], target: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every row as often as it fits whole, then rows in their drawn order till the tokens are closest to the target."""
    num_times, rest = divmod(target, max(1, int(lengths.sum())))
    everything = np.tile(np.arange(len(lengths), dtype=np.int64), num_times)
    return np.concatenate((everything, order[: _num_closest(lengths[order], rest)]))


def _num_closest(lengths: NDArray[np.integer[Any]], num_tokens: int) -> int:
    """How many of the first rows have the number of tokens that is closest; the fewer where two are equally close.

    >>> [_num_closest(np.array([5, 4, 3]), tokens) for tokens in (0, 2, 3, 7, 8, 12)]
    [0, 0, 1, 1, 2, 3]
    """
    if num_tokens == 0:
        return 0
    sums = np.cumsum(lengths, dtype=np.int64)
    at = int(np.searchsorted(sums, num_tokens))  # the row that reaches it
    before = int(sums[at - 1]) if at else 0
    return at + 1 if int(sums[at]) - num_tokens < num_tokens - before else at
