"""Choose the rows that are encoded both ways, to see whether image headers can be trusted.

A kind is a property that a template may treat in a special way (`rank_rows.kinds_of`). While a source is measured,
`Checks` chooses the first rows of every kind, and those that were drawn by a seed. The `extremes` in size follow. Sizes
from headers are believed when all of these agree, and not before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, Sizes, has_media
from swift_vlpack.lengths.rank_rows import Chunk, Positions

NUM_PER_KIND = 2
"""Rows to compare of each kind: one match may be a rounding coincidence, or its pixels may be broken."""
NUM_ROWS_DRAWN = 64
"""Most rows to draw and compare, whatever their kinds. If a tenth of all rows were wrong, 64 drawn rows would miss that
in one of a thousand cases (0.9 ** 64)."""
SHARE_DECODED = 1 / 64
"""Share of the rows of a source that are compared for being drawn although they have media: the pass exists to avoid
decoding. Drawn texts cost little."""


def num_to_draw(num_rows: int, num_ranks: int = 1) -> tuple[int, int]:
    """Return how many rows of a source each rank draws, and how many of them are compared if they have media.

    >>> [num_to_draw(num_rows) for num_rows in (1, 1000, 100_000)], num_to_draw(100_000, num_ranks=8)
    ([(64, 1), (64, 16), (64, 64)], (8, 8))
    """
    num_decoded = min(NUM_ROWS_DRAWN, int(num_rows * SHARE_DECODED) + 1)
    # All ranks together draw as many rows as a single rank would.
    return -(-NUM_ROWS_DRAWN // num_ranks), -(-num_decoded // num_ranks)


class Checks:
    """Choose from measured rows."""

    def __init__(self, drawn: Positions, decoded: Positions) -> None:
        """Take the rows to compare whatever their kinds: `drawn` if they have no media, `decoded` if they have."""
        self._drawn, self._decoded = set(drawn.tolist()), set(decoded.tolist())
        self._num_chosen = Counter[str]()
        self._kinds: dict[int, tuple[str, ...]] = {}  # of the chosen rows
        self._taken: set[int] = set()  # rows that were compared
        self._waiting: deque[tuple[Positions, set[int]]] = deque()  # measured rows, and those of them that were chosen

    def choose(self, chunk: Chunk) -> list[int]:
        """Return the rows of a chunk that have to be encoded in full as well."""
        chosen = []
        assert chunk.kinds is not None
        proofs, failed = chunk.sizes["proof"].tolist(), (chunk.sizes["reason"] > 0).tolist()
        media = has_media(chunk.sizes).tolist()
        for position, proof, is_failed, is_of_media, kinds in zip(
            chunk.positions.tolist(), proofs, failed, media, chunk.kinds, strict=True
        ):
            is_new = proof == BY_HEADER and any(self._num_chosen[kind] < NUM_PER_KIND for kind in kinds)
            # A drawn row counts even if its header gave no size: then headers say too little of this source.
            is_drawn = position in (self._decoded if is_of_media else self._drawn) and not is_failed
            if is_new or is_drawn:
                self._num_chosen.update(kinds)
                self._kinds[position] = kinds
                chosen.append(position)
        self._waiting.append((chunk.positions, set(chosen)))
        return chosen

    def take(self, chunk: Chunk) -> None:
        """Take compared rows. One whose pixels are broken is no evidence: another row of its kinds takes its place."""
        for position, proof in zip(chunk.positions.tolist(), chunk.sizes["proof"].tolist(), strict=True):
            self._taken.add(position)
            if proof != AGREED:
                self._num_chosen.subtract(self._kinds.pop(position, ()))

    def done(self) -> Iterator[Positions]:
        """Yield the rows of each chunk of which all chosen rows were compared: a later start need not compare them."""
        while self._waiting and self._waiting[0][1] <= self._taken:
            yield self._waiting.popleft()[0]


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


def without_headers(sizes: Sizes) -> NDArray[np.int64]:
    """Return a row to compare if headers gave no size to any row with media, or to any row if none has media.

    Such a source is encoded in full anyway; the comparison says so, and why.
    """
    usable = sizes["length"] > 0
    of_media = usable & has_media(sizes)
    rows = np.flatnonzero(of_media if of_media.any() else usable)
    return rows[: int(not np.isin(sizes["proof"][rows], (BY_HEADER, AGREED)).any())]
