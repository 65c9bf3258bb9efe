"""The parts of all rows of a source that are longer than a pack, as arrays; every other row is a sample as it is.

>>> cut = CutRows.of({4: [PartSize(0, 8, 0, 1, 20, 3), PartSize(8, 10, 0, 0, 0, 2, 1)]})
>>> cut.num_parts(np.array([3, 4])).tolist()
[1, 2]
>>> of_part_code(cut.parts(4)[1].reason)
<Reason.OVERFLOW: 'overflow'>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.parts import Part
from swift_vlpack.reasons import of_part_code, part_code_of


class PartSize(NamedTuple):
    """Where a part of a row is and what it holds, as numbers; its own number is its place among the parts."""

    start: int
    stop: int
    num_repeated: int
    images: int
    patches: int
    supervised: int
    reason: int = 0
    """`part_code` of the reason (`reasons.py`); 0 for a part to be packed."""

    @classmethod
    def of(cls, part: Part, supervised: int) -> PartSize:
        """With its tokens that are predicted."""
        reason = part_code_of(part.reason)
        return cls(part.start, part.stop, part.num_repeated, part.images, part.patches, supervised, reason)

    def part(self, number: int) -> Part:
        """The part itself."""
        return Part(number, *self[:5], of_part_code(self.reason))


@dataclass(frozen=True, eq=False)
class CutRows:
    """The parts of the rows of one source that are cut."""

    rows: NDArray[np.int64]
    """Which rows these are, in order."""
    offsets: NDArray[np.int64]
    """(num_rows + 1,): the parts of `rows[i]` are those from `offsets[i]` to `offsets[i + 1]`."""
    columns: NDArray[np.int64]
    """(7, num_parts): the fields of `PartSize`."""

    @classmethod
    def of(cls, parts: Mapping[int, Sequence[PartSize]]) -> CutRows:
        """From the parts of each row that is cut."""
        rows = sorted(parts)
        flat = [part for row in rows for part in parts[row]]
        columns = np.array(flat, dtype=np.int64).reshape(-1, len(PartSize._fields)).T.copy()
        return cls(np.array(rows, dtype=np.int64), np.cumsum([0, *(len(parts[row]) for row in rows)]), columns)

    @property
    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        """All that it is."""
        return self.rows, self.offsets, self.columns

    def __len__(self) -> int:
        return len(self.rows)

    def num_parts(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Of each of some rows; 1 of one that is not cut."""
        place = self._places(rows)
        counts: NDArray[np.int64] = np.where(place >= 0, np.diff(self.offsets, append=0)[place], 1)
        return counts

    def first_parts(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """The column of the first part of each of some rows; -1 of one that is not cut."""
        place = self._places(rows)
        firsts: NDArray[np.int64] = np.where(place >= 0, self.offsets[place], -1)
        return firsts

    def parts(self, row: int) -> list[PartSize]:
        """The parts of a row; none of one that is not cut."""
        place = int(self._places(np.array([row]))[0])
        if place < 0:
            return []
        inside = self.columns[:, self.offsets[place] : self.offsets[place + 1]]
        return [PartSize(*column) for column in inside.T.tolist()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CutRows):
            return NotImplemented
        return all(np.array_equal(one, another) for one, another in zip(self.arrays, other.arrays, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _places(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        if not len(self.rows):
            return np.full(len(rows), -1)
        place = np.searchsorted(self.rows, rows)
        found = np.minimum(place, len(self.rows) - 1)
        places: NDArray[np.int64] = np.where(self.rows[found] == rows, found, -1)
        return places
