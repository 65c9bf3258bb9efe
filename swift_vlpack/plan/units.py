"""Bring samples that begin with the same media together in a *unit*, which the packer places as one item.

>>> key, prefix, lengths = np.array([7, 0, 7, 7]), np.array([3, 0, 3, 3]), np.array([5, 9, 4, 6])
>>> together = stand_together(key, prefix, lengths, capacity=8, most=9)
>>> together.order.tolist(), together.shared.tolist()
([0, 2, 1, 3], [0, 3, 0, 0])

Samples 0 and 2 share 3 tokens and take 6 tokens together. With sample 3 the unit would take 9 tokens, more than a pack
of 8 holds. A unit is a run of samples in which each sample shares its first tokens with the sample before it. So one
column, `shared`, defines all units:

>>> units = Units.of(together.shared)
>>> units.starts.tolist(), units.counts.tolist()
([0, 2, 3], [2, 1, 1])

A pack may be cut in two within a unit. Then the second half repeats the prefix, so nothing about a sample depends on
where packs are cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_KEY = 0
"""The key of a sample that shares with no other."""


class Prefixes(NamedTuple):
    """The prefixes of the rows of a source."""

    key: NDArray[np.uint64]
    """Rows of one key begin with the same tokens and media; `NO_KEY` for rows that share with no other."""
    length: NDArray[np.int32]
    """The tokens of the prefix; 0 for rows that share with no other."""


class Together(NamedTuple):
    """An order of samples in which units stand together."""

    order: NDArray[np.int64]
    """The samples in their new order."""
    shared: NDArray[np.int32]
    """In the new order, the tokens that each sample shares with the one before it; 0 for the first of a unit."""


def stand_together(
    key: NDArray[Any],
    prefix: NDArray[Any],
    lengths: NDArray[Any],
    *,
    capacity: int,
    most: int,
    row: NDArray[Any] | None = None,
) -> Together:
    """Order samples so that samples that share a prefix are neighbours, in units that fit into a pack.

    A unit has at most `most` samples and `capacity` tokens; further samples with the same key make another unit. It
    has the images and patches of one of its samples. The unit takes the place of its sample with the lowest `row`,
    which the shuffle has put anywhere. (In the place of its first sample, large units would come to the front of every
    epoch.)
    """
    num = len(key)
    row = np.arange(num) if row is None else row
    can_share = np.flatnonzero((key != NO_KEY) & (lengths > prefix))
    can_share = can_share[np.argsort(key[can_share], kind="stable")]
    begins_unit = _first_of_units(key[can_share], prefix[can_share], lengths[can_share], capacity, most)
    unit = np.arange(num)  # by sample, the number of the sample whose place its unit takes
    shared = np.zeros(num, dtype=np.int32)
    if len(can_share):
        starts = np.flatnonzero(begins_unit)
        counts = np.diff(np.append(starts, len(can_share)))
        in_unit = np.repeat(np.arange(len(starts)), counts)
        lowest = can_share[np.lexsort((row[can_share], in_unit))[starts]]
        unit[can_share] = lowest[in_unit]
        shared[can_share] = np.where(begins_unit, 0, prefix[can_share])
    # Samples of a unit keep their order; only the first has `shared` 0.
    order = np.lexsort((np.arange(num), unit))
    return Together(order, shared[order])


def _first_of_units(
    key: NDArray[Any], prefix: NDArray[Any], lengths: NDArray[Any], capacity: int, most: int
) -> NDArray[np.bool_]:
    """Mark the samples that begin a unit, of samples in the order of their keys."""
    first = np.zeros(len(key), dtype=bool)
    key_of_unit, num_samples, num_tokens = None, 0, 0
    columns = zip(key.tolist(), prefix.tolist(), lengths.tolist(), strict=True)
    for at, (of_sample, num_shared, length) in enumerate(columns):
        own = length - num_shared
        if of_sample != key_of_unit or num_samples >= most or num_tokens + own > capacity:
            first[at], key_of_unit, num_samples, num_tokens = True, of_sample, 0, num_shared
        num_samples, num_tokens = num_samples + 1, num_tokens + own
    return first


class Units(NamedTuple):
    """The units of samples that stand together; a sample that shares with no other is a unit of its own."""

    starts: NDArray[np.int64]  # (num_units,)
    counts: NDArray[np.int64]  # (num_units,): samples

    @classmethod
    def of(cls, shared: NDArray[Any]) -> Units:
        """Find the units by the column of shared tokens."""
        starts = np.flatnonzero(shared == 0)
        return cls(starts, np.diff(np.append(starts, len(shared))))

    def samples(self, units: NDArray[Any]) -> NDArray[np.int32]:
        """Return the samples of these units, unit after unit.

        >>> Units.of(np.array([0, 3, 0, 0, 2])).samples(np.array([2, 0])).tolist()
        [3, 4, 0, 1]
        """
        first, counts = self.starts[units], self.counts[units]
        if len(self.starts) < self.counts.sum():  # otherwise each sample is a unit of its own
            ends = np.cumsum(counts)
            first = np.repeat(first - (ends - counts), counts)
            first += np.arange(len(first))
        samples: NDArray[np.int32] = first.astype(np.int32)
        return samples
