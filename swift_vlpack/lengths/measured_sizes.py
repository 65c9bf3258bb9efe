"""Hold the sizes of a rank's rows: look them up in the cache, add what is measured, and save that to the cache.

The size of a row is unknown, unchecked or known. It is *unchecked* from when it was taken from a header until
`believe_headers`: it is used, but it may have to go.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.lengths.cache import Details, LengthCache
from swift_vlpack.lengths.length_file import BY_HEADER, KEY, SIZE, Sizes, has_media
from swift_vlpack.lengths.rank_rows import Chunk, Positions, RankRows
from swift_vlpack.lengths.rows_work import RowKeys
from swift_vlpack.plan.parts import Part
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import REASONS
from swift_vlpack.rows.cutting import Divider
from swift_vlpack.rows.faults import Fault

NUM_AGAIN_OF_EACH = 2
"""Remembered texts, rows with media, and other rows that are drawn to be looked at again at a start."""
_UNKNOWN, _UNCHECKED, _KNOWN = range(3)
_NUM_OF_APPEND = 1 << 16  # rows, so that a million rows are not copied at once


class Findings(NamedTuple):
    """The results of one rank besides sizes. Rows are named by their index in the source."""

    faults: dict[int, Fault]
    parts: dict[int, tuple[Part, ...]]
    with_surplus_tags: list[int]
    num_remembered: int
    """Rows that this start had not to measure."""


class MeasuredSizes:
    """The sizes of one rank's rows, filled in as rows are looked up or measured."""

    def __init__(self, rows: RankRows, cache: LengthCache) -> None:
        self.sizes: NDArray[np.void] = np.zeros(len(rows), SIZE)
        self.keys = np.zeros(len(rows), KEY)
        self._state = np.full(len(rows), _UNKNOWN, np.uint8)
        self._has_surplus_tags = np.zeros(len(rows), dtype=bool)
        self._names_url = np.zeros(len(rows), dtype=bool)
        self._faults: dict[int, Fault] = {}  # by index in the source
        self._parts: dict[int, tuple[Part, ...]] = {}  # by position
        self._num_remembered = len(rows)
        self._rows = rows
        self._cache = cache

    # -- look up ------------------------------------------------------------------------------------------------------

    def take_keys(self, found: RowKeys) -> None:
        """Store the keys of some rows. `look_up` needs the keys of all rows."""
        self.keys[found.positions] = found.keys
        self._has_surplus_tags[found.positions] = found.has_surplus_tags
        self._names_url[found.positions] = found.names_url

    def look_up(self, *, is_strict: bool, divider: Divider | None = None) -> bool:
        """Load what the cache has for these rows: sizes, failures and, with `divider`, the parts of rows.

        With `is_strict`, failed rows stay unknown, so that they are encoded again and stop the run.
        Returns True if an earlier start found that headers of this source are wrong.
        """
        checked = self._cache.load()
        for saved, state in ((self._cache.load_unchecked(), _UNCHECKED), (checked, _KNOWN)):
            is_there, sizes = saved.of(self.keys)
            self.sizes[is_there], self._state[is_there] = sizes[is_there], state
        if is_strict:
            self._state[self.sizes["reason"] > 0] = _UNKNOWN
        self._look_up_details(divider)
        return checked.num_differing > 0

    def _look_up_details(self, divider: Divider | None) -> None:
        """Load errors and parts. A cut row without cached parts, or longer than its parts, is measured again."""
        is_cut = np.zeros(len(self.keys), bool) if divider is None else divider.have_parts(self.sizes["length"])
        wanted = np.flatnonzero((self._state > _UNKNOWN) & (is_cut | (self.sizes["reason"] > 0)))
        saved = self._cache.load_details() if len(wanted) else {}
        for position in wanted.tolist():
            details = saved.get(self.keys[position].tobytes(), Details())
            if details.fault is not None and self.sizes["reason"][position]:
                self._faults[self._rows.index(position)] = details.fault
            elif is_cut[position]:
                self._parts[position] = details.parts
                if max((part.stop for part in details.parts), default=0) != self.sizes["length"][position]:
                    self._state[position] = _UNKNOWN

    # -- choose rows --------------------------------------------------------------------------------------------------

    def to_measure(self) -> Positions:
        """Return the rows that have no size; all others count as remembered."""
        unknown = np.flatnonzero(self._state == _UNKNOWN)
        self._num_remembered = min(self._num_remembered, len(self._rows) - len(unknown))
        return unknown

    def unchecked(self, positions: Positions) -> Positions:
        """Select the rows whose size was taken from headers and has to prove right."""
        return positions[self._state[positions] == _UNCHECKED]

    def unproven(self, positions: Positions) -> Positions:
        """Select the rows that have no size, or an unchecked one."""
        return positions[self._state[positions] != _KNOWN]

    def drawn(self, num_rows: int) -> Positions:
        """Draw at most `num_rows` of the unproven rows."""
        unproven = self.unproven(np.arange(len(self._rows)))
        # The seed is the source's name, so that every start draws the same rows, and other sources draw other rows.
        return unproven[permutation(len(unproven), "lengths", self._rows.source.name)[:num_rows]]

    def to_look_at_again(self) -> tuple[Positions, Positions]:
        """Choose remembered rows to measure again. Returns (those to encode in full, those to measure by headers).

        The longest row, the one of most patches, and drawn ones, which differ at each start: some texts, some with
        media, and some of all. None names a URL. Texts are encoded in full, because some changes are in what headers
        pass by. To decode large media takes seconds, so of those only one more, of the fewest patches, is decoded.
        """
        sizes, chance = self.sizes, random.SystemRandom()  # leaves the random numbers of training alone
        known = left = np.flatnonzero((self._state > _UNKNOWN) & ~self._names_url & (sizes["length"] > 0))
        of_media = has_media(sizes)
        chosen = {int(known[sizes[name][known].argmax()]) for name in ("length", "patches") if len(known)}
        for is_of_kind in (~of_media, of_media, None):
            left = left[~np.isin(left, list(chosen))]
            of_kind = left if is_of_kind is None else left[is_of_kind[left]]
            drawn = chance.sample(range(len(of_kind)), min(NUM_AGAIN_OF_EACH, len(of_kind)))
            chosen.update(of_kind[drawn].tolist())
        rows, media = np.array(sorted(chosen), np.int64), known[of_media[known]]
        smallest = media[[sizes["patches"][media].argmin()]] if len(media) else media
        return np.union1d(rows[~of_media[rows]], smallest), np.setdiff1d(rows[of_media[rows]], smallest)

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
        """Store the results of a chunk. Save those that need no check."""
        positions = chunk.positions
        self.sizes[positions] = chunk.sizes
        self._faults |= chunk.faults
        self._parts |= chunk.parts
        is_of_header = chunk.sizes["proof"] == BY_HEADER
        self._state[positions] = np.where(chunk.is_saved & is_of_header, _UNCHECKED, _KNOWN)
        if chunk.faults or chunk.parts:
            self._save_details(positions[chunk.is_saved])
        self._cache.append(*self._records(positions[chunk.is_saved & ~is_of_header]))

    def save_unchecked(self, positions: Positions) -> None:
        """Save the unchecked sizes among these, for the next start if this one is killed."""
        self._cache.append(*self._records(self.unchecked(positions)), is_checked=False)

    def believe_headers(self) -> None:
        """Save the unchecked sizes: compared rows have shown that headers are right."""
        positions = np.flatnonzero(self._state == _UNCHECKED)
        for start in range(0, len(positions), _NUM_OF_APPEND):
            self._cache.append(*self._records(positions[start : start + _NUM_OF_APPEND]))
        self._state[positions] = _KNOWN

    def forget_unchecked(self) -> None:
        """Remove what `save_unchecked` has saved: by now it is believed, or it is wrong."""
        self._cache.forget_unchecked()

    def forget_headers(self) -> None:
        """Drop the sizes that were only read from image headers: their rows become unknown again."""
        self._state[self.sizes["proof"] == BY_HEADER] = _UNKNOWN
        self._parts = {position: parts for position, parts in self._parts.items() if self._state[position]}

    def forget(self) -> None:
        """Drop all sizes that earlier starts saved, here and on disk."""
        self._state[:] = _UNKNOWN
        self._parts.clear()
        self._faults.clear()
        self._cache.forget()

    def _records(self, positions: Positions) -> tuple[NDArray[np.void], Sizes]:
        return self.keys[positions], self.sizes[positions]

    def _save_details(self, positions: Positions) -> None:
        given = {}
        for at in positions.tolist():
            details = Details(self._faults.get(self._rows.index(at)), self._parts.get(at, ()))
            if details != Details():
                given[at] = details
        self._cache.append_details(self.keys[list(given)], given.values())


def joined(shares: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Join the sizes of n ranks in row order; rank r has the rows r, r + n, ..."""
    sizes = np.zeros(sum(map(len, shares)), SIZE)
    for rank, share in enumerate(shares):
        sizes[rank :: len(shares)] = share
    return sizes
