"""What is known of a rank's rows: taken over from earlier starts, added to as rows are measured, written down."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.core.account.reasons import REASONS
from swift_vlpack.core.epoch.cut_rows import PartSize
from swift_vlpack.core.shuffle import permutation
from swift_vlpack.data.lengths.cache import KnownSizes
from swift_vlpack.data.lengths.inputs import Known
from swift_vlpack.data.lengths.length_file import BY_HEADER, KEY, SIZE, VOUCHED
from swift_vlpack.data.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.data.parts.row_cutter import RowCutter
from swift_vlpack.data.rows.faults import Fault

_BY_HEADERS = (BY_HEADER, VOUCHED)


class Found:
    """The sizes of a rank's rows, as they become known."""

    def __init__(self, rows: RankRows, known: Known) -> None:
        self.sizes = np.zeros(len(rows), SIZE)
        self.faults: dict[int, Fault] = {}
        """By index in the source."""
        self.num_remembered = 0
        """Rows whose size an earlier start found."""
        self.parts: dict[int, tuple[PartSize, ...]] = {}
        """Of rows that are cut, by position."""
        self.keys = np.zeros(len(rows), KEY)
        self.stamps = np.zeros(len(rows), np.uint32)
        """Of their files, as they are now."""
        self.has_surplus_tags = np.zeros(len(rows), dtype=bool)
        self._is_known = np.zeros(len(rows), dtype=bool)
        self._rows = rows
        self._known = known

    def unknown(self) -> Positions:
        """The rows that have no size yet."""
        return np.flatnonzero(~self._is_known)

    def drawn(self, num_rows: int) -> Positions:
        """Some rows that have no size yet, always the same ones of them."""
        unknown = self.unknown()
        # By a seed of the source's name: the same rows at every start, and other ones in other sources.
        return unknown[permutation(len(unknown), "lengths", self._rows.source.name)[:num_rows]]

    def unproven(self, positions: Positions) -> Positions:
        """Those of the rows that have no size yet, or one that none but headers say.

        Trust in the kinds of a row is no proof of it: this source may have earned it itself, at a start that was
        killed or had fewer rows.
        """
        return positions[~self._is_known[positions] | np.isin(self.sizes["proof"][positions], _BY_HEADERS)]

    def num_failed(self, reason: str) -> int:
        """Rows that cannot be encoded for this reason."""
        return int((self.sizes["reason"] == REASONS.index(reason)).sum())

    def with_surplus_tags(self) -> list[int]:
        """Rows with more tags than media, by index in the source."""
        return [self._rows.index(position) for position in np.flatnonzero(self.has_surplus_tags).tolist()]

    def parts_by_index(self) -> dict[int, tuple[PartSize, ...]]:
        """Of rows that are cut, by index in the source."""
        return {self._rows.index(position): parts for position, parts in self.parts.items()}

    def take_over(self, remembered: KnownSizes, *, is_strict: bool, cutter: RowCutter | None = None) -> None:
        """What earlier starts found; the keys have to be there. Of rows that are cut, their parts too."""
        self._is_known, self.sizes = remembered.of(self.keys)
        # Something was done to their files, so what they are is looked up again; all else stays known.
        self._is_known &= self.sizes["stamp"] == self.stamps
        if self._known.trust.is_revoked:
            self._is_known &= self.sizes["proof"] != VOUCHED
        if is_strict:
            self._is_known &= self.sizes["reason"] == 0  # tried again, to stop the run
        failed = np.flatnonzero(self._is_known & (self.sizes["reason"] > 0))
        told = self._known.cache.told() if len(failed) else {}
        for position in failed.tolist():
            if (fault := told.get(self.keys[position].tobytes())) is not None:
                self.faults[self._rows.index(position)] = fault
        if cutter is not None:
            self._take_over_parts(cutter)
        self.num_remembered = int(self._is_known.sum())

    def _take_over_parts(self, cutter: RowCutter) -> None:
        """A row whose parts nobody remembers, or that has grown since, is measured anew."""
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
        """What became of some rows. Of kinds that were compared in another source this one relies on that."""
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
        """Write down what is new of them, and which kinds are trusted since."""
        for chunk in chunks:
            positions = chunk.positions[chunk.is_new]
            self._known.cache.append(self.keys[positions], chunk.sizes[chunk.is_new])
            cut = [position for position in positions.tolist() if position in chunk.parts]
            self._known.cache.tell_parts(self.keys[cut], [chunk.parts[position] for position in cut])
            failed = [position for position in positions.tolist() if self._rows.index(position) in chunk.faults]
            self._known.cache.tell(self.keys[failed], [chunk.faults[self._rows.index(at)] for at in failed])
        self._known.trust.save()

    def remember_difference(self, chunk: Chunk, waiting: list[Chunk]) -> None:
        """Write down that headers differ, and of the rows at hand only those that were encoded in full."""
        # The difference first: a process that is killed behind it must not leave sizes that look checked.
        self._known.trust.revoke(str(chunk.difference))
        self.remember([chunk])
        for other in waiting:
            other.is_new[np.isin(other.sizes["proof"], _BY_HEADERS)] = False
        self.remember(waiting)

    def forget_headers(self) -> None:
        """What was said by headers alone is not known."""
        self._is_known &= ~np.isin(self.sizes["proof"], _BY_HEADERS)
        self.num_remembered = min(self.num_remembered, int(self._is_known.sum()))
        self.parts = {position: parts for position, parts in self.parts.items() if self._is_known[position]}


def joined(shares: list[NDArray[np.void]]) -> NDArray[np.void]:
    """The sizes of all rows, of which rank r has the rows r, r + n, ..."""
    sizes = np.zeros(sum(map(len, shares)), SIZE)
    for rank, share in enumerate(shares):
        sizes[rank :: len(shares)] = share
    return sizes
