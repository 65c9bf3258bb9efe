"""Divide the rows of a source among ranks, and hold the results of measuring some of them.

Rank r of n ranks measures the rows r, r + n, r + 2n, ... A *position* counts the rows of one rank; an *index* counts
the rows of the source.

>>> class SecondOfFour:
...     rank, num_ranks = 1, 4
>>> RankRows.of(RowSource(name="captions", rows=[{}] * 10), SecondOfFour).indices.tolist()
[1, 5, 9]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.comm import Comm
from swift_vlpack.lengths.length_file import SIZE, Sizes
from swift_vlpack.plan.parts import Part
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.media import content_of
from swift_vlpack.rows.samples import SampleError, SampleId
from swift_vlpack.rows.source import Row, RowSource, rows_at, with_system

_MANY_IMAGES = 3
"""Number of images from which rows are of one kind. A template may treat one or two images in a special way."""

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """Every n-th row of a source: the rows of one rank.

    Not a block of rows, because neighbours are often alike in size, and one rank would get all the large ones.
    """

    source: RowSource
    indices: NDArray[np.int64]

    @classmethod
    def of(cls, source: RowSource, comm: Comm) -> RankRows:
        """Select the rows this rank measures."""
        return cls(source, np.arange(comm.rank, len(source.rows), comm.num_ranks))

    def __len__(self) -> int:
        return len(self.indices)

    def at(self, positions: Positions) -> list[Row]:
        """Read rows, each with the system prompt of the source."""
        rows = rows_at(self.source.rows, self.indices[positions].tolist())
        return [with_system(row, self.source.system) for row in rows]

    def index(self, position: int) -> int:
        """Return a row's index in the source."""
        return int(self.indices[position])

    def sample_id(self, position: int) -> SampleId:
        """Return the name that logs and reports use for a row."""
        return self.source.sample_id(self.index(position))


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """The size of one row, or the reason why it has none."""

    size: Any  # one record of `SIZE`
    error: SampleError | None = None
    kinds: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    """Parts of a row that is cut, or its sequences."""
    is_saved: bool = True
    """False for a failure that may pass, so that the next start tries the row again, and for a size whose parts a later
    start would not look for."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Results for some rows, as a worker process returns them."""

    positions: Positions
    sizes: Sizes
    is_saved: NDArray[np.bool_]
    faults: dict[int, Fault]
    """Why rows cannot be encoded, by index in the source."""
    parts: dict[int, tuple[Part, ...]]
    """Parts of the rows that are cut, by position."""
    kinds: tuple[tuple[str, ...], ...] | None = None
    """The kinds of each row that was measured; None if the rows were compared."""
    difference: str | None = None
    """The difference in words: the last row of the chunk, and its size in both ways. None if all rows agree."""

    @classmethod
    def of(cls, rows: RankRows, positions: Positions, measured: Sequence[Measured], **more: Any) -> Chunk:
        """Collect the results of the first `len(measured)` of these rows."""
        done, sizes = positions[: len(measured)], np.zeros(len(measured), SIZE)
        for at, one in enumerate(measured):
            sizes[at] = one.size
        each = list(zip(done.tolist(), measured, strict=True))
        return cls(
            done,
            sizes,
            is_saved=np.array([one.is_saved for one in measured], dtype=bool),
            faults={rows.index(position): one.error.fault for position, one in each if one.error is not None},
            parts={position: one.parts for position, one in each if one.parts},
            **more,
        )


# -- kinds ------------------------------------------------------------------------------------------------------------


def kinds_of(row: Mapping[str, Any], length: int, image_kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of a row: properties that a template may treat in a special way.

    The kinds are its columns; the number and form (path, URL, bytes) of its images or, for a text, its length class;
    and format, mode, size class and aspect class of each image. A size from headers is trusted if rows of all these
    kinds agreed.

    >>> kinds_of({"messages": [{}], "images": ["a.jpg"], "tools": None}, 400, ["JPEG RGB 2^19 1:1"])
    ('columns images,messages', '1 images as path', 'JPEG RGB 2^19 1:1')
    >>> kinds_of({"messages": [{}], "images": []}, 400, [])
    ('columns messages', 'text 2^9')
    """
    columns = ",".join(sorted(str(name) for name, value in row.items() if _is_given(value)))
    images = row.get("images")
    listed = list(images) if isinstance(images, (list, tuple)) else []
    image_kinds = sorted(set(image_kinds))
    if not image_kinds and not listed:
        return f"columns {columns}", f"text 2^{length.bit_length()}"
    forms = ",".join(sorted({_form(image) for image in listed}))
    return f"columns {columns}", f"{min(len(listed), _MANY_IMAGES)} images as {forms}", *image_kinds


def _is_given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _form(image: Any) -> str:
    image = content_of(image)
    if isinstance(image, str):
        return "url" if image.startswith("http") else "data" if image.startswith("data:") else "path"
    return type(image).__name__
