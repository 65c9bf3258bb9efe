"""Hold the sizes of a rank's rows: loaded from the length cache, completed by measuring, saved to the cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths.cache import KnownSizes
from swift_vlpack.lengths.inputs import Known
from swift_vlpack.lengths.length_file import BY_HEADER, KEY, SIZE, VOUCHED
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.plan.cut_rows import PartSize
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import REASONS
from swift_vlpack.rows.cutting import RowCutter
from swift_vlpack.rows.faults import Fault

_BY_HEADERS = (BY_HEADER, VOUCHED)


class Found:
    """The sizes of one rank's rows, filled in as rows are looked up or measured."""

    def __init__(self, rows: RankRows, known: Known) -> None:
        self.sizes = np.zeros(len(rows), SIZE)
        self.faults: dict[int, Fault] = {}
        """Why rows cannot be encoded, by index in the source."""
        self.num_remembered = 0
        """Number of rows whose size came from the cache."""
        self.parts: dict[int, tuple[PartSize, ...]] = {}
        """Parts of the rows that are cut, by position."""
        self.keys = np.zeros(len(rows), KEY)
        self.stamps = np.zeros(len(rows), np.uint32)
        """Stamp of each row's files as they are now; a cached size with another stamp is out of date."""
        self.has_surplus_tags = np.zeros(len(rows), dtype=bool)
        self._is_known = np.zeros(len(rows), dtype=bool)
        self._rows = rows
        self._known = known

    def unknown(self) -> Positions:
        """Return the rows that have no size yet."""
        return np.flatnonzero(~self._is_known)

    def drawn(self, num_rows: int) -> Positions:
        """Draw at most `num_rows` of the rows that have no size yet."""
        unknown = self.unknown()
        # Seeded by the source's name: every start draws the same rows, and each source draws others.
        return unknown[permutation(len(unknown), "lengths", self._rows.source.name)[:num_rows]]

    def unproven(self, positions: Positions) -> Positions:
        """Select the rows that have no size yet, or a size that was only read from image headers.

        Sizes vouched for by trusted kinds are selected, too. The trust may come from this very source, from a start
        that was killed or had fewer rows, so it proves nothing about these rows.
        """
        return positions[~self._is_known[positions] | np.isin(self.sizes["proof"][positions], _BY_HEADERS)]

    def num_failed(self, reason: str) -> int:
        """Return how many rows cannot be encoded for this reason."""
        return int((self.sizes["reason"] == REASONS.index(reason)).sum())

    def with_surplus_tags(self) -> list[int]:
        """Return the rows with more tags than media, by index in the source."""
        return [self._rows.index(position) for position in np.flatnonzero(self.has_surplus_tags).tolist()]

    def parts_by_index(self) -> dict[int, tuple[PartSize, ...]]:
        """Return the parts of the rows that are cut, by index in the source."""
        return {self._rows.index(position): parts for position, parts in self.parts.items()}

    def take_over(self, remembered: KnownSizes, *, is_strict: bool, cutter: RowCutter | None = None) -> None:
        """Load what the cache has for these rows: sizes, failures and, with `cutter`, the parts of cut rows.

        `keys` and `stamps` must be set before. With `is_strict`, failed rows stay unknown.
        """
        self._is_known, self.sizes = remembered.of(self.keys)
        # Another stamp: the files were changed, so these rows are measured again.
        self._is_known &= self.sizes["stamp"] == self.stamps
        if self._known.trust.is_revoked:
            self._is_known &= self.sizes["proof"] != VOUCHED
        if is_strict:
            self._is_known &= self.sizes["reason"] == 0  # try failed rows again, so that a failure stops the run
        failed = np.flatnonzero(self._is_known & (self.sizes["reason"] > 0))
        told = self._known.cache.told() if len(failed) else {}
        for position in failed.tolist():
            if (fault := told.get(self.keys[position].tobytes())) is not None:
                self.faults[self._rows.index(position)] = fault
        if cutter is not None:
            self._take_over_parts(cutter)
        self.num_remembered = int(self._is_known.sum())

    def _take_over_parts(self, cutter: RowCutter) -> None:
        """Load the parts of cut rows. Rows without cached parts, or longer than their parts, are measured again."""
        have_parts = cutter.have_parts(*(self.sizes[name] for name in ("length", "images", "patches")))
        is_cut = np.flatnonzero(self._is_known & have_parts)
        told = self._known.cache.told_parts() if len(is_cut) else {}
        for position in is_cut.tolist():
            parts = told.get(self.keys[position].tobytes(), ())
            if max((part.stop for part in parts), default=0) == self.sizes["length"][position]:
                self.parts[position] = parts
            else:
                self._is_known[position] = False

    def take(self, chunk: Chunk) -> None:
        """Store the results of a chunk. Header sizes become VOUCHED if another source has compared their kinds."""
        if chunk.seen is not None:
            vouched = np.array([self._known.trust.is_remembered(seen.kinds) for seen in chunk.seen], dtype=bool)
            chunk.sizes["proof"][vouched & (chunk.sizes["proof"] == BY_HEADER)] = VOUCHED
        self._known.reads.add(chunk.reads)
        chunk.sizes["stamp"] = self.stamps[chunk.positions]
        self.sizes[chunk.positions] = chunk.sizes
        self._is_known[chunk.positions] = True
        self.faults |= chunk.faults
        self.parts |= chunk.parts

    def remember(self, chunks: list[Chunk]) -> None:
        """Save the new results of chunks to the cache, and which kinds are trusted now."""
        for chunk in chunks:
            positions = chunk.positions[chunk.is_new]
            self._known.cache.append(self.keys[positions], chunk.sizes[chunk.is_new])
            cut = [position for position in positions.tolist() if position in chunk.parts]
            self._known.cache.tell_parts(self.keys[cut], [chunk.parts[position] for position in cut])
            failed = [position for position in positions.tolist() if self._rows.index(position) in chunk.faults]
            self._known.cache.tell(self.keys[failed], [chunk.faults[self._rows.index(at)] for at in failed])
        self._known.trust.save()

    def remember_difference(self, chunk: Chunk, waiting: list[Chunk]) -> None:
        """Save that headers are wrong, and the results of the rows that were encoded in full.

        `chunk` found the difference; `waiting` are chunks that were not saved yet.
        """
        # Save the difference first: a process killed between the two must not leave sizes that look checked.
        self._known.trust.revoke(str(chunk.difference))
        self.remember([chunk])
        for other in waiting:
            other.is_new[np.isin(other.sizes["proof"], _BY_HEADERS)] = False
        self.remember(waiting)

    def forget_headers(self) -> None:
        """Drop the sizes that were only read from image headers: their rows become unknown again."""
        self._is_known &= ~np.isin(self.sizes["proof"], _BY_HEADERS)
        self.num_remembered = min(self.num_remembered, int(self._is_known.sum()))
        self.parts = {position: parts for position, parts in self.parts.items() if self._is_known[position]}


def joined(shares: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Join the sizes of n ranks in row order; rank r has the rows r, r + n, ..."""
    sizes = np.zeros(sum(map(len, shares)), SIZE)
    for rank, share in enumerate(shares):
        sizes[rank :: len(shares)] = share
    return sizes
