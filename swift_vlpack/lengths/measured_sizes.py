"""Hold the sizes of a rank's rows: load them from the cache, add what is measured, and save that to the cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths.cache import Details, LengthCache
from swift_vlpack.lengths.length_file import BY_HEADER, KEY, SIZE
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.lengths.rows_work import RowKeys
from swift_vlpack.plan.parts import Part
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import REASONS
from swift_vlpack.rows.cutting import Divider
from swift_vlpack.rows.faults import Fault


class Findings(NamedTuple):
    """The results of one rank besides sizes. Rows are named by their index in the source."""

    faults: dict[int, Fault]
    parts: dict[int, tuple[Part, ...]]
    with_surplus_tags: list[int]
    num_remembered: int


class MeasuredSizes:
    """The sizes of one rank's rows, filled in as rows are looked up or measured."""

    def __init__(self, rows: RankRows, cache: LengthCache) -> None:
        self.sizes: NDArray[np.void] = np.zeros(len(rows), SIZE)
        self.keys = np.zeros(len(rows), KEY)
        self._is_known: NDArray[np.bool_] = np.zeros(len(rows), dtype=bool)
        self._has_surplus_tags = np.zeros(len(rows), dtype=bool)
        self._faults: dict[int, Fault] = {}  # by index in the source
        self._parts: dict[int, tuple[Part, ...]] = {}  # by position
        self._num_remembered = 0
        self._rows = rows
        self._cache = cache
        self._is_unsaved: NDArray[np.bool_] = np.zeros(len(rows), dtype=bool)

    # -- look up ------------------------------------------------------------------------------------------------------

    def take_keys(self, found: RowKeys) -> None:
        """Store the keys of some rows. `look_up` needs the keys of all rows."""
        self.keys[found.positions] = found.keys
        self._has_surplus_tags[found.positions] = found.has_surplus_tags

    def look_up(self, *, is_strict: bool, divider: Divider | None = None) -> bool:
        """Load what the cache has for these rows: sizes, failures and, with `divider`, the parts of rows.

        With `is_strict`, failed rows stay unknown, so that they are encoded again and stop the run.
        Returns True if an earlier start found that headers of this source are wrong.
        """
        saved = self._cache.load()
        self._is_known, self.sizes = saved.of(self.keys)
        if is_strict:
            self._is_known &= self.sizes["reason"] == 0
        self._look_up_details(divider)
        self._num_remembered = int(self._is_known.sum())
        return saved.num_differing > 0

    def _look_up_details(self, divider: Divider | None) -> None:
        """Load errors and parts. A cut row without cached parts, or longer than its parts, is measured again."""
        is_cut = np.zeros(len(self.keys), bool) if divider is None else divider.have_parts(self.sizes["length"])
        wanted = np.flatnonzero(self._is_known & (is_cut | (self.sizes["reason"] > 0)))
        saved = self._cache.load_details() if len(wanted) else {}
        for position in wanted.tolist():
            details = saved.get(self.keys[position].tobytes(), Details())
            if details.fault is not None and self.sizes["reason"][position]:
                self._faults[self._rows.index(position)] = details.fault
            elif is_cut[position]:
                self._parts[position] = details.parts
                stop = max((part.stop for part in details.parts), default=0)
                self._is_known[position] = stop == self.sizes["length"][position]

    # -- choose rows --------------------------------------------------------------------------------------------------

    def unknown(self) -> Positions:
        """Return the rows that have no size yet."""
        return np.flatnonzero(~self._is_known)

    def drawn(self, num_rows: int) -> Positions:
        """Draw at most `num_rows` of the rows that have no size yet."""
        unknown = self.unknown()
        # The seed is the source's name, so that every start draws the same rows, and other sources draw other rows.
        return unknown[permutation(len(unknown), "lengths", self._rows.source.name)[:num_rows]]

    def remembered(self, num_rows: int) -> Positions:
        """Draw some of the rows that an earlier start could encode."""
        usable = np.flatnonzero(self._is_known & (self.sizes["length"] > 0))
        return usable[permutation(len(usable), "again", self._rows.source.name)[:num_rows]]

    def forget(self) -> None:
        """Drop all sizes that earlier starts saved."""
        self._is_known[:] = False
        self._num_remembered = 0
        self._parts.clear()
        self._faults.clear()

    def unproven(self, positions: Positions) -> Positions:
        """Select the rows that have no size, or one that this start took from headers: what is saved was checked."""
        return positions[~self._is_known[positions] | self._is_unsaved[positions]]

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
        """Store the results of a chunk. Those that need no check are saved at once, the others by `save_headers`."""
        positions = chunk.positions
        self.sizes[positions] = chunk.sizes
        self._is_known[positions] = True
        self._faults |= chunk.faults
        self._parts |= chunk.parts
        is_checked = chunk.sizes["proof"] != BY_HEADER
        self._save(positions[chunk.is_saved & is_checked])
        self._is_unsaved[positions] = chunk.is_saved & ~is_checked

    def save_headers(self) -> None:
        """Save the sizes that were read from headers, which have proved right."""
        self._save(np.flatnonzero(self._is_unsaved & self._is_known))

    def _save(self, positions: Positions) -> None:
        self._cache.append(self.keys[positions], self.sizes[positions])
        rows = [(at, self._faults.get(self._rows.index(at)), self._parts.get(at, ())) for at in positions.tolist()]
        given = {at: Details(fault, parts) for at, fault, parts in rows if fault is not None or parts}
        self._cache.append_details(self.keys[list(given)], given.values())

    def forget_headers(self) -> None:
        """Drop the sizes that were only read from image headers: their rows become unknown again."""
        self._is_known &= self.sizes["proof"] != BY_HEADER
        self._num_remembered = min(self._num_remembered, int(self._is_known.sum()))
        self._parts = {position: parts for position, parts in self._parts.items() if self._is_known[position]}


def joined(shares: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Join the sizes of n ranks in row order; rank r has the rows r, r + n, ..."""
    sizes = np.zeros(sum(map(len, shares)), SIZE)
    for rank, share in enumerate(shares):
        sizes[rank :: len(shares)] = share
    return sizes
