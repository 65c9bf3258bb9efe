"""Which rows are encoded both ways, which is how trust in image headers is earned, and what waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths import trust
from swift_vlpack.lengths.length_file import BY_HEADER, VOUCHED, Sizes
from swift_vlpack.lengths.rank_rows import Chunk, Positions, Seen

NUM_ROWS_DRAWN = 64
"""Rows of a source, out of those whose size is not known yet, that are compared at most beside the first of each kind:
a fault that shows in a tenth of the rows hides from all of them once in a thousand times."""
NUM_AT_EACH_END = 1
"""Rows at either end of length, patches and aspect that are compared afterwards: where limits of a template bite."""
SHARE_COMPARED = 1 / 64
"""Of the pixels of all images, so many may be decoded for more than the first row of every kind: decoding is what the
pass is there to avoid, and a sixty-fourth of it is lost in the noise of the rest."""
_NUM_SPARE = 8
"""Rows of each kind that may stand in for broken ones; a kind of which so many are broken proves nothing."""


class Checks:
    """Which rows to encode both ways: the first of every kind, and of others as many as there are pixels to spend."""

    def __init__(self, drawn: Positions, num_compared: Counter[str]) -> None:
        """`drawn` are rows to compare whatever their kinds; `num_compared` are rows of each kind found equal before."""
        self._drawn = set(drawn.tolist())
        self._first_drawn = int(drawn[0]) if len(drawn) else -1
        self._num_compared = num_compared
        self._num_pixels = self._num_pixels_compared = 0
        self._spare: dict[str, list[tuple[int, Seen]]] = {}
        self.kinds: dict[int, tuple[str, ...]] = {}
        """Of the rows that were chosen."""

    def chosen(self, chunk: Chunk) -> list[int]:
        """Those of the rows that were just measured."""
        assert chunk.seen is not None
        self._num_pixels += sum(seen.pixels for seen in chunk.seen)
        is_quick = np.isin(chunk.sizes["proof"], (BY_HEADER, VOUCHED)).tolist()
        rows = zip(chunk.positions.tolist(), chunk.seen, is_quick, strict=True)
        chosen = []
        for position, seen, by_header in rows:
            # A row whose header says nothing was encoded in full anyway: compared only where it was drawn.
            if not by_header and not (seen.is_silent and position in self._drawn):
                continue
            if self._takes(position, seen):
                chosen.append(position)
            elif by_header:
                self._keep(position, seen)
        return chosen

    def _keep(self, position: int, seen: Seen) -> None:
        """For the case that those which were chosen turn out to be broken."""
        for kind in seen.kinds:
            spare = self._spare.setdefault(kind, [])
            if len(spare) < _NUM_SPARE:
                spare.append((position, seen))

    def _takes(self, position: int, seen: Seen) -> bool:
        least = min((self._num_compared[kind] for kind in seen.kinds), default=trust.NUM_PER_KIND)
        is_wanted = least < trust.NUM_PER_KIND
        is_due = position == self._first_drawn or (is_wanted and least == 0)
        is_paid = self._num_pixels_compared + seen.pixels <= SHARE_COMPARED * self._num_pixels
        if not is_due and not (is_paid and (is_wanted or position in self._drawn)):
            return False
        self._num_pixels_compared += seen.pixels
        self._num_compared.update(seen.kinds)
        self.kinds[position] = seen.kinds
        return True

    def instead_of(self, position: int) -> list[int]:
        """The row cannot be encoded in full, so another one of each of its kinds has to be, if there is one."""
        kinds = self.kinds.get(position, ())
        # Taken back, so that another row of the kinds may be chosen in its place.
        self._num_compared.subtract(kinds)
        chosen = []
        for kind in kinds:
            while self._num_compared[kind] < 1 and self._spare.get(kind):
                other, seen = self._spare[kind].pop(0)
                if other not in self.kinds and self._takes(other, seen):
                    chosen.append(other)
        return chosen


class Unconfirmed:
    """Rows that were measured, till those of them that are compared were found equal: only then they are remembered.

    A pass that is killed in between must not leave sizes behind that the next one takes for checked.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[list[Chunk], set[int]]] = []

    def add(self, chunk: Chunk, chosen: list[int]) -> list[Chunk]:
        """A chunk that was measured, of which some rows are to be compared; what can be remembered now."""
        self._entries.append(([chunk], set(chosen)))
        return self._ready()

    def confirm(self, chunk: Chunk, instead: list[int]) -> list[Chunk]:
        """Rows that were found equal, or for which others are compared instead; what can be remembered now."""
        positions = set(chunk.positions.tolist())
        for chunks, missing in self._entries:
            if missing & positions:
                chunks.append(chunk)  # behind what it is of: of two records the later one counts
                missing -= positions
                missing |= set(instead)
        return self._ready()

    def all(self) -> list[Chunk]:
        """Everything that waits."""
        return [chunk for chunks, _ in self._entries for chunk in chunks]

    def _ready(self) -> list[Chunk]:
        ready = [chunk for chunks, missing in self._entries if not missing for chunk in chunks]
        self._entries = [entry for entry in self._entries if entry[1]]
        return ready


def extremes(sizes: Sizes) -> NDArray[np.int64]:
    """Rows at both ends of length, patches and aspect, as far as they have a size and not all are equal."""
    usable = np.flatnonzero(sizes["length"])

    def ends() -> Iterator[NDArray[np.int64]]:
        for column in ("length", "patches", "aspect"):
            order = usable[np.argsort(sizes[column][usable], kind="stable")]
            # Where all are equal, no row is an end.
            if len(order) and sizes[column][order[0]] != sizes[column][order[-1]]:
                yield order[:NUM_AT_EACH_END]
                yield order[max(0, len(order) - NUM_AT_EACH_END) :]

    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *ends()]))
