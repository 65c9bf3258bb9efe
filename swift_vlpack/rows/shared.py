"""Hold which rows share a prefix, as the length pass found out, and why other rows do not. Numbers only, no rows.

>>> SharedPrefixes(np.array([7, 0, 7], np.uint64), np.array([30, 0, 30], np.int32)).rows_per_prefix.tolist()
[2]
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.units import NO_KEY, Prefixes


class Alone(IntEnum):
    """Causes why a row shares with no other row although another row has its medium."""

    NOTHING_SHARED = 0
    OTHER_TOKENS = 1
    OTHER_MEDIA = 2
    CANNOT = 3

    @property
    def text(self) -> str:
        """Return the cause in words."""
        return _CAUSES[self][0]

    @property
    def way_out(self) -> str:
        """Return what a person can do about it."""
        return _CAUSES[self][1]


_CAUSES = {
    Alone.NOTHING_SHARED: ("no other row has its media", ""),
    Alone.OTHER_TOKENS: (
        "have other tokens before the medium",
        "put <image> first in the question, and give all rows the same system prompt, tools and pixel limits",
    ),
    Alone.OTHER_MEDIA: (
        "share some of their media only",
        "give rows about one image the same media, in the same order",
    ),
    Alone.CANNOT: (
        "cannot share their medium",
        'docs/branches.md lists under "Rows that cannot share" what prevents it, and the way out of each',
    ),
}


class AloneCount(NamedTuple):
    """The number of rows of a source that cannot share for one cause, with an example."""

    cause: Alone
    num_rows: int
    example: int
    """Index of one of the rows."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """The prefixes of a source's rows. Rows with equal keys, in one source or in several, share their prefix."""

    key: NDArray[np.uint64]  # (num_rows,)
    """`NO_KEY` for a row that shares with no other row."""
    length: NDArray[np.int32]  # (num_rows,)
    """Tokens of the prefix; 0 for a row that shares with no other row."""
    alone: tuple[AloneCount, ...] = ()
    """Rows that share with no other row although another row has the same medium, by cause."""

    def __len__(self) -> int:
        return len(self.key)

    @property
    def of_rows(self) -> Prefixes:
        """Return the part that a plan needs."""
        return Prefixes(self.key, self.length)

    @property
    def num_sharing(self) -> int:
        """Count the rows that share."""
        return int(np.count_nonzero(self.key))

    @property
    def rows_per_prefix(self) -> NDArray[np.int64]:
        """Count the rows of each prefix, in no order."""
        return np.unique(self.key[self.key != NO_KEY], return_counts=True)[1]


def counted_causes(causes: NDArray[np.uint8]) -> tuple[AloneCount, ...]:
    """Count the causes of a source's rows, with the first row of each; the most frequent cause first."""
    found = []
    for cause in np.unique(causes[causes > 0]).tolist():
        rows = np.flatnonzero(causes == cause)
        found.append(AloneCount(Alone(cause), len(rows), int(rows[0])))
    return tuple(sorted(found, key=lambda one: -one.num_rows))
