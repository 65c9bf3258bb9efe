"""The rows of a source that one rank measures, and what became of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.comm import Comm
from swift_vlpack.lengths.environment import Reads
from swift_vlpack.lengths.length_file import SIZE, Sizes
from swift_vlpack.plan.cut_rows import PartSize
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.samples import SampleError, SampleId
from swift_vlpack.rows.source import Row, RowSource, with_system

Positions = NDArray[np.int64]
"""Places among the rows of a rank."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """Every n-th row of a source, n ranks being there: neighbours, often alike in size, go to different ranks."""

    source: RowSource
    indices: NDArray[np.int64]
    """Which rows of the source these are."""

    @classmethod
    def of(cls, source: RowSource, comm: Comm) -> RankRows:
        """Those of this rank."""
        return cls(source, np.arange(comm.rank, len(source.rows), comm.num_ranks))

    def __len__(self) -> int:
        return len(self.indices)

    def at(self, positions: Positions) -> list[Row]:
        """Some rows, as the template gets them."""
        rows = rows_at(self.source.rows, self.indices[positions].tolist())
        return [with_system(row, self.source.system) for row in rows]

    def index(self, position: int) -> int:
        """The index of a row in its source."""
        return int(self.indices[position])

    def sample_id(self, position: int) -> SampleId:
        """The name of a row."""
        return self.source.sample_id(self.index(position))


def rows_at(rows: Any, indices: list[int]) -> list[Row]:
    """Rows by index; at once where the data set can."""
    if not hasattr(rows, "column_names"):
        return [rows[index] for index in indices]
    # `datasets` gives many rows at once as columns, in one read.
    columns = rows[indices]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the header of a row says beside its size."""

    kinds: tuple[str, ...] = ()
    pixels: int = 0
    """Of all its images, as they are in their files."""
    is_silent: bool = False
    """Whether it says nothing and never will, so that the row had to be encoded in full."""
    parts: tuple[PartSize, ...] = ()
    """Of a row that is cut; also where it was encoded in full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became of some rows."""

    positions: Positions
    sizes: Sizes
    is_new: NDArray[np.bool_]
    """Which of them are to be remembered."""
    faults: dict[int, Fault] = field(default_factory=dict)
    """What is wrong with rows that cannot be encoded, by index in the source."""
    difference: str | None = None
    """The first row of which headers and full encoding say different things, in words; it is the last of the chunk."""
    seen: tuple[Seen, ...] | None = None
    """Of rows that were measured; None of rows that were compared."""
    parts: dict[int, tuple[PartSize, ...]] = field(default_factory=dict)
    """Of rows that are cut, by position."""
    reads: Reads = field(default_factory=Reads)
    """Environment variables that were read meanwhile."""

    @classmethod
    def empty(cls, positions: Positions) -> Chunk:
        """Before anything is known."""
        return cls(positions, np.zeros(len(positions), SIZE), np.ones(len(positions), dtype=bool))

    def put(self, at: int, size: Any, error: SampleError | None, index: int, parts: tuple[PartSize, ...] = ()) -> None:
        """What became of one row; a failure that may pass is tried again at the next start."""
        self.sizes[at] = size
        if parts:
            self.parts[int(self.positions[at])] = parts
        if error is not None:
            self.faults[index] = error.fault
            self.is_new[at] = error.is_lasting

    def up_to(self, at: int, difference: str) -> Chunk:
        """The rows that were compared when one was found to differ."""
        done = slice(at + 1)
        return Chunk(
            self.positions[done], self.sizes[done], self.is_new[done], self.faults, difference, parts=self.parts
        )


def positions_of(positions: list[int]) -> Positions:
    """As numpy has them, also where there are none."""
    return np.array(positions, dtype=np.int64)


def faults_by_index(shares: list[Mapping[int, Fault]]) -> dict[int, Fault]:
    """Of all ranks."""
    return {index: fault for share in shares for index, fault in share.items()}
