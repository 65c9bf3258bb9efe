"""Compare the planned sizes of some rows with the sizes that encoding gives, for `vlpack verify`.

The rows are the largest and the smallest of each kind and some drawn ones, the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address, SampleError
from swift_vlpack.rows.sizes import LengthIndex, RowSize

NUM_ROWS_OF_A_KIND = 16
"""Rows of each kind (text, one image, several images, video) to encode in every source. The smallest and largest of
each kind are added, because the limits of a template take effect there."""


class Differing(NamedTuple):
    """A row whose encoded size is not the planned one."""

    row: str
    """The file and line of the row."""
    planned: RowSize
    encoded: RowSize

    def __str__(self) -> str:
        both = zip(RowSize._fields, self.planned, self.encoded, strict=True)
        return f"{self.row}: " + ", ".join(
            f"{name} {encoded} where {planned} were planned" for name, planned, encoded in both if encoded != planned
        )


@dataclass(frozen=True, slots=True)
class SourceLengths:
    """The result for one source, which `vlpack verify` reports."""

    source: str
    num_rows: int
    num_compared: int = 0
    differing: tuple[Differing, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Rows that have a length and cannot be encoded; training leaves them out and counts them."""
    without_headers: str | None = None
    """Why every row was encoded in full; None if image headers were trusted."""
    is_planned: bool = True

    @property
    def check(self) -> str:
        """Return the result in a word.

        `equal` or `differing`; `fallback` if all sizes are equal, but the length pass had to encode every row in full;
        `as read` for a stream, which has no planned sizes.
        """
        if not self.is_planned:
            return "as read"
        if self.differing:
            return "differing"
        return "fallback" if self.without_headers else "equal"


def checked_lengths(dataset: Any) -> list[SourceLengths]:
    """Encode some rows of every source and compare their sizes with the planned ones."""
    of_sources = [_checked(dataset, number) for number in range(len(dataset.sources))]
    return of_sources or [SourceLengths("stream", 0, is_planned=False)]


def _checked(dataset: FusionCaptionDataset, number: int) -> SourceLengths:
    source = dataset.sources[number]
    if source.sizes is None:
        return SourceLengths(source.name, len(source.rows), is_planned=False)
    differing, unreadable = [], []
    rows = rows_to_compare(source.sizes, source.name)
    for row in rows:
        with RandomStream("proof", number, row):  # the draws of the proof of isolation, so that both see one sample
            sample = dataset.sample_or_error(Address(number, row))
        if isinstance(sample, SampleError):
            unreadable.append(f"{source.where(row)}: {sample.reason}: {sample.detail}")
            continue
        planned = RowSize(*source.sizes.columns[:, row].tolist())
        if (encoded := size_of(sample)) != planned:
            differing.append(Differing(source.where(row), planned, encoded))
    return SourceLengths(
        source=source.name,
        num_rows=len(source.rows),
        num_compared=len(rows) - len(unreadable),
        differing=tuple(differing),
        unreadable=tuple(unreadable),
        without_headers=source.sizes.without_headers,
    )


def rows_to_compare(sizes: LengthIndex, name: str) -> list[int]:
    """Choose rows of each kind: the smallest and largest by tokens, images and patches, and some drawn at random."""
    usable = np.flatnonzero(sizes.lengths)
    chosen: dict[int, None] = {}
    for kind in _kinds(sizes, usable):
        ends = [int(kind[np.argsort(of[kind], kind="stable")[at]]) for of in _columns(sizes) for at in (0, -1)]
        drawn = kind[permutation(len(kind), "verify", name)[:NUM_ROWS_OF_A_KIND]]
        chosen |= dict.fromkeys([*ends, *drawn.tolist()])
    return sorted(chosen)


def _columns(sizes: LengthIndex) -> tuple[NDArray[np.int64], ...]:
    return sizes.lengths, sizes.images, sizes.patches


def _kinds(sizes: LengthIndex, usable: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    images, patches = sizes.images[usable], sizes.patches[usable]
    has_video = (images == 0) & (patches > 0)
    for is_kind in ((images == 0) & ~has_video, images == 1, images > 1, has_video):
        if is_kind.any():
            yield usable[is_kind]
