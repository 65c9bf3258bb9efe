"""Define the size of a row, which is all that a plan needs to know about it, and the sizes of a source.

>>> index = LengthIndex.of([RowSize(30, images=1, patches=64, supervised=9), RowSize(0)], {1: "file_missing"})
>>> index.lengths.tolist(), index.fault(1).reason
([30, 0], 'file_missing')
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.parts import CutRows
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.faults import Fault
from swift_vlpack.words import counted


class RowSize(NamedTuple):
    """The size of one row; all 0 if it cannot be encoded."""

    length: int
    """Tokens, after images are expanded."""
    images: int = 0
    patches: int = 0
    """Vision patches of images and videos."""
    supervised: int = 0
    """Tokens that are predicted. The loss is a mean over these."""


NUM_COLUMNS = len(RowSize._fields)
NUM_ROWS_OF_A_KIND = 16
"""Rows of each kind (text, one image, several images, video) to compare in every source. The smallest and largest of
each kind are added, because the limits of a template take effect there."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthIndex:
    """The sizes of a source's rows, in columns, and the reasons why some rows have none."""

    columns: NDArray[np.int64]  # (4, num_rows): the fields of `RowSize`
    failures: Mapping[int, str]
    """The reason for every row of length 0, by index."""
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """Error and files of these rows, if they are known."""
    without_headers: str | None = None
    """Why every row was encoded in full; None if image headers were trusted."""
    num_remembered: int = 0
    """Number of rows whose size came from the cache."""
    surplus_tags: Sequence[int] = ()
    """Indices of rows with more tags (`<image>`) in their texts than media; surplus tags are trained as words."""
    cut: CutRows | None = None
    """The parts of rows that are longer than a pack; None if rows are not cut."""
    is_from_header: NDArray[np.bool_] | None = None
    """Mask of rows whose pixels were never decoded, now or at an earlier start; None if that is not known."""

    @classmethod
    def of(
        cls,
        sizes: Iterable[RowSize],
        failures: Mapping[int, str] | None = None,
        faults: Mapping[int, Fault] | None = None,
        cut: CutRows | None = None,
    ) -> LengthIndex:
        """Make an index from the size of each row."""
        rows = np.array(list(sizes), dtype=np.int64).reshape(-1, NUM_COLUMNS)
        return cls(rows.T.copy(), failures or {}, faults or {}, cut=cut)

    def fault(self, index: int) -> Fault:
        """Return why the row at `index` has no size."""
        return self.faults.get(index) or Fault(
            self.failures.get(index, Reason.ENCODE_FAILED), "found at an earlier start"
        )

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} of them without a size" if self.failures else ""
        return f"<LengthIndex: {counted(len(self), 'row')}, {int(self.lengths.sum())} tokens{failed}>"

    def __len__(self) -> int:
        return self.columns.shape[1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, after its images are expanded."""
        return self.columns[0]

    @property
    def images(self) -> NDArray[np.int64]:
        """Images of each row."""
        return self.columns[1]

    @property
    def patches(self) -> NDArray[np.int64]:
        """Vision patches of each row, of images and videos."""
        return self.columns[2]

    @property
    def supervised(self) -> NDArray[np.int64]:
        """Tokens of each row that are predicted."""
        return self.columns[3]


def rows_to_compare(sizes: LengthIndex, name: str, num_drawn: int = NUM_ROWS_OF_A_KIND) -> list[int]:
    """Choose rows of each kind: the smallest and largest by tokens, images and patches, and some drawn at random."""
    chosen: set[int] = set()
    for kind in _kinds(sizes):
        for column in (sizes.lengths, sizes.images, sizes.patches):
            chosen.update(kind[np.argsort(column[kind], kind="stable")[[0, -1]]].tolist())
        chosen.update(kind[permutation(len(kind), "verify", name)[:num_drawn]].tolist())
    return sorted(chosen)


def _kinds(sizes: LengthIndex) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each kind: texts, one image, several images, video."""
    images, is_video = sizes.images, (sizes.images == 0) & (sizes.patches > 0)
    for is_kind in ((images == 0) & ~is_video, images == 1, images > 1, is_video):
        if len(rows := np.flatnonzero(is_kind & (sizes.lengths > 0))):
            yield rows
