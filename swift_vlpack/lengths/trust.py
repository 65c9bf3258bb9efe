"""Choose the rows that are encoded both ways, to see whether image headers can be trusted.

A kind is a property that a template may treat in a special way (`rank_rows.kinds_of`). While a source is measured,
`Checks` chooses the first rows of every kind, and those that were drawn by a seed. The `extremes` in size follow. Sizes
from headers are saved when all of these agree, and not before: what is saved was checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, Sizes
from swift_vlpack.lengths.rank_rows import Chunk, Positions

NUM_PER_KIND = 2
"""Rows to compare of each kind: one match may be a rounding coincidence, or its pixels may be broken."""
NUM_ROWS_DRAWN = 64
"""Most rows to draw and compare, whatever their kinds. If a tenth of all rows were wrong, 64 drawn rows would miss that
in one of a thousand cases (0.9 ** 64)."""
SHARE_DRAWN = 1 / 16
"""Share of the rows of a small source to draw: the pass exists to avoid decoding."""


def num_to_draw(num_rows: int) -> int:
    """Return how many rows of a source to draw.

    >>> [num_to_draw(num_rows) for num_rows in (1, 100, 10_000)]
    [1, 7, 64]
    """
    return min(NUM_ROWS_DRAWN, int(num_rows * SHARE_DRAWN) + 1)


class Checks:
    """Choose from measured rows."""

    def __init__(self, drawn: Positions) -> None:
        self._drawn = set(drawn.tolist())
        self._num_chosen = Counter[str]()
        self._kinds: dict[int, tuple[str, ...]] = {}  # of the chosen rows

    def choose(self, chunk: Chunk) -> list[int]:
        """Return the rows of a chunk that have to be encoded in full as well."""
        chosen = []
        assert chunk.kinds is not None
        proofs = chunk.sizes["proof"].tolist()
        for position, proof, kinds in zip(chunk.positions.tolist(), proofs, chunk.kinds, strict=True):
            is_new = any(self._num_chosen[kind] < NUM_PER_KIND for kind in kinds)
            if proof == BY_HEADER and (is_new or position in self._drawn):
                self._num_chosen.update(kinds)
                self._kinds[position] = kinds
                chosen.append(position)
        return chosen

    def take(self, chunk: Chunk) -> None:
        """Take compared rows. One whose pixels are broken is no evidence: another row of its kinds takes its place."""
        for position, proof in zip(chunk.positions.tolist(), chunk.sizes["proof"].tolist(), strict=True):
            if proof != AGREED:
                self._num_chosen.subtract(self._kinds.pop(position, ()))


def extremes(sizes: Sizes) -> NDArray[np.int64]:
    """Find the rows at both ends of length, patches and aspect, because the limits of a template take effect there.

    >>> sizes = np.zeros(4, [("length", int), ("patches", int), ("aspect", float)])
    >>> sizes["length"] = [30, 10, 0, 20]  # the third cannot be encoded
    >>> extremes(sizes).tolist()
    [0, 1]
    """
    usable = np.flatnonzero(sizes["length"])

    def ends() -> Iterator[int]:
        for column in ("length", "patches", "aspect"):
            order = usable[np.argsort(sizes[column][usable], kind="stable")]
            # If all rows are equal in this column, none is extreme.
            if len(order) and sizes[column][order[0]] != sizes[column][order[-1]]:
                yield from (order[0], order[-1])

    return np.unique(np.fromiter(ends(), np.int64))
