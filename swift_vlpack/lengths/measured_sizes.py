"""Hold the sizes of a rank's rows: load them from the cache, add what is measured, and save that to the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.environment import Reads
from swift_vlpack.lengths.known_keys import RowKeys
from swift_vlpack.lengths.length_file import BY_HEADER, FROM_HEADERS, KEY, SIZE, VOUCHED, Sizes
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.lengths.trust import Trust
from swift_vlpack.plan.parts import Part
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import REASONS
from swift_vlpack.rows.cutting import Divider
from swift_vlpack.rows.faults import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCaches:
    """The results that earlier starts and other sources saved. A length pass reads them and adds its own."""

    cache: LengthCache
    trust: Trust
    """The kinds of rows whose headers proved right."""
    reads: Reads = field(default_factory=Reads)
    """Environment variables that this pass read while it encoded rows. They are in the key from the next start on."""


class Findings(NamedTuple):
    """The results of one rank besides sizes. Rows are named by their index in the source."""

    faults: dict[int, Fault]
    parts: dict[int, tuple[Part, ...]]
    with_surplus_tags: list[int]
    num_remembered: int


class MeasuredSizes:
    """The sizes of one rank's rows, filled in as rows are looked up or measured."""

    def __init__(self, rows: RankRows, caches: LengthCaches) -> None:
        self.sizes: NDArray[np.void] = np.zeros(len(rows), SIZE)
        self.keys = np.zeros(len(rows), KEY)
        self.stamps = np.zeros(len(rows), np.uint32)
        """Stamp of each row's files at present. A cached size with another stamp is out of date."""
        self._is_known: NDArray[np.bool_] = np.zeros(len(rows), dtype=bool)
        self._has_surplus_tags = np.zeros(len(rows), dtype=bool)
        self._faults: dict[int, Fault] = {}  # by index in the source
        self._parts: dict[int, tuple[Part, ...]] = {}  # by position
        self._num_remembered = 0
        self._rows = rows
        self._caches = caches

    # -- look up ------------------------------------------------------------------------------------------------------

    def take_keys(self, found: RowKeys) -> None:
        """Store the keys of some rows. `look_up` needs the keys of all rows."""
        self.keys[found.positions], self.stamps[found.positions] = found.rows["key"], found.rows["stamp"]
        self._has_surplus_tags[found.positions] = found.rows["has_surplus_tags"]

    def look_up(self, *, is_strict: bool, divider: Divider | None = None) -> bool:
        """Load what the cache has for these rows: sizes, failures and, with `divider`, the parts of rows.

        With `is_strict`, failed rows stay unknown, so that they are encoded again and stop the run.
        Returns True if an earlier start found that headers of this source are wrong.
        """
        saved = self._caches.cache.load()
        self._is_known, self.sizes = saved.of(self.keys)
        # A row whose files were changed has another stamp, and is measured again.
        self._is_known &= self.sizes["stamp"] == self.stamps
        if self._caches.trust.is_revoked:
            self._is_known &= self.sizes["proof"] != VOUCHED
        if is_strict:
            self._is_known &= self.sizes["reason"] == 0
        self._look_up_faults()
        if divider is not None:
            self._look_up_parts(divider)
        self._num_remembered = int(self._is_known.sum())
        return saved.num_differing > 0

    def _look_up_faults(self) -> None:
        failed = np.flatnonzero(self._is_known & (self.sizes["reason"] > 0))
        faults = self._caches.cache.load_faults() if len(failed) else {}
        for position in failed.tolist():
            if (fault := faults.get(self.keys[position].tobytes())) is not None:
                self._faults[self._rows.index(position)] = fault

    def _look_up_parts(self, divider: Divider) -> None:
        """Load the parts of cut rows. A row without cached parts, or longer than its parts, is measured again."""
        have_parts = divider.have_parts(*(self.sizes[name] for name in ("length", "images", "patches")))
        is_cut = np.flatnonzero(self._is_known & have_parts)
        saved = self._caches.cache.load_parts() if len(is_cut) else {}
        for position in is_cut.tolist():
            parts = saved.get(self.keys[position].tobytes(), ())
            if max((part.stop for part in parts), default=0) == self.sizes["length"][position]:
                self._parts[position] = parts
            else:
                self._is_known[position] = False

    def take_exported(self, exported: Sizes, divider: Divider | None) -> int:
        """Take and save the sizes of an export for rows that have none. Returns how many; rows with parts stay unknown.

        Trust in them is that of sizes which kinds of rows vouch for: a difference in any source ends it.
        """
        unknown = self.unknown()
        if divider is not None:
            have_parts = divider.have_parts(*(exported[name][unknown] for name in ("length", "images", "patches")))
            unknown = unknown[~have_parts]
        chunk = Chunk(unknown, exported[unknown], np.ones(len(unknown), dtype=bool))
        self.take(chunk)
        self.save([chunk])
        return len(unknown)

    # -- choose rows --------------------------------------------------------------------------------------------------

    def unknown(self) -> Positions:
        """Return the rows that have no size yet."""
        return np.flatnonzero(~self._is_known)

    def known(self) -> Positions:
        """Return the rows that have a size, or a reason why they have none."""
        return np.flatnonzero(self._is_known)

    def drawn(self, num_rows: int) -> Positions:
        """Draw at most `num_rows` of the rows that have no size yet."""
        unknown = self.unknown()
        # The seed is the source's name, so that every start draws the same rows, and other sources draw other rows.
        return unknown[permutation(len(unknown), "lengths", self._rows.source.name)[:num_rows]]

    def unproven(self, positions: Positions) -> Positions:
        """Select the rows that have no size yet, or a size that was only read from image headers.

        Also select sizes that trusted kinds vouch for. The trust may come from an earlier start on this very source,
        which was killed or had fewer rows, so it proves nothing about the extremes of all rows.
        """
        return positions[~self._is_known[positions] | np.isin(self.sizes["proof"][positions], FROM_HEADERS)]

    def num_failed(self, reason: str) -> int:
        """Return how many rows cannot be encoded for this reason."""
        return int((self.sizes["reason"] == REASONS.index(reason)).sum())

    def findings(self) -> Findings:
        """Return the results other than sizes, which all ranks exchange."""
        return Findings(
            faults=self._faults,
            parts={self._rows.index(position): parts for position, parts in self._parts.items()},
            with_surplus_tags=self._rows.indices[self._has_surplus_tags].tolist(),
            num_remembered=self._num_remembered,
        )

    # -- store results ------------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Store the results of a chunk. Header sizes become VOUCHED if all their kinds are trusted already."""
        if chunk.facts is not None:
            vouched = np.array([self._caches.trust.is_remembered(row.kinds) for row in chunk.facts], dtype=bool)
            chunk.sizes["proof"][vouched & (chunk.sizes["proof"] == BY_HEADER)] = VOUCHED
        self._caches.reads.add(chunk.reads)
        chunk.sizes["stamp"] = self.stamps[chunk.positions]
        self.sizes[chunk.positions] = chunk.sizes
        self._is_known[chunk.positions] = True
        self._faults |= chunk.faults
        self._parts |= chunk.parts

    def save(self, chunks: list[Chunk]) -> None:
        """Save the results of chunks to the cache, and the kinds that are trusted now."""
        cache = self._caches.cache
        for chunk in chunks:
            positions = chunk.positions[chunk.is_saved]
            cache.append(self.keys[positions], chunk.sizes[chunk.is_saved])
            cut = [position for position in positions.tolist() if position in chunk.parts]
            cache.append_parts(self.keys[cut], [chunk.parts[position] for position in cut])
            failed = [position for position in positions.tolist() if self._rows.index(position) in chunk.faults]
            cache.append_faults(self.keys[failed], [chunk.faults[self._rows.index(at)] for at in failed])
        self._caches.trust.save()

    def save_difference(self, chunk: Chunk, waiting: list[Chunk]) -> None:
        """Save that headers are wrong, and the results of the rows that were encoded in full.

        `chunk` has the difference; `waiting` are chunks that were not saved yet.
        """
        # Save the difference first: a process that is killed in between must not leave sizes that look checked.
        self._caches.trust.revoke(str(chunk.difference))
        self.save([chunk])
        for other in waiting:
            other.is_saved[np.isin(other.sizes["proof"], FROM_HEADERS)] = False
        self.save(waiting)

    def forget_headers(self) -> None:
        """Drop the sizes that were only read from image headers: their rows become unknown again."""
        self._is_known &= ~np.isin(self.sizes["proof"], FROM_HEADERS)
        self._num_remembered = min(self._num_remembered, int(self._is_known.sum()))
        self._parts = {position: parts for position, parts in self._parts.items() if self._is_known[position]}


def joined(shares: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Join the sizes of n ranks in row order; rank r has the rows r, r + n, ..."""
    sizes = np.zeros(sum(map(len, shares)), SIZE)
    for rank, share in enumerate(shares):
        sizes[rank :: len(shares)] = share
    return sizes
