"""Compare the planned sizes of some rows with the sizes that encoding gives, for `vlpack verify`.

The rows are the largest and the smallest of each kind and some drawn ones, the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address, SampleError
from swift_vlpack.rows.sizes import RowSize, rows_to_compare


@dataclass(frozen=True, slots=True)
class SourceLengths:
    """The result for one source, which `vlpack verify` reports."""

    source: str
    num_rows: int | None = None
    """Number of rows with planned sizes; None for a stream, which has none."""
    num_compared: int = 0
    differing: tuple[str, ...] = ()
    """Rows whose encoded size is not the planned one, by file and line, with both sizes."""
    unreadable: tuple[str, ...] = ()
    """Rows that have a length and cannot be encoded; training leaves them out and counts them."""
    without_headers: str | None = None
    """Why every row was encoded in full; None if image headers were trusted."""

    @property
    def check(self) -> str:
        """Return the result in a word.

        `equal` or `differing`; `fallback` if all sizes are equal, but the length pass had to encode every row in full;
        `as read` if there are no planned sizes.
        """
        if self.num_rows is None:
            return "as read"
        return "differing" if self.differing else "fallback" if self.without_headers else "equal"


def checked_lengths(dataset: Any) -> list[SourceLengths]:
    """Encode some rows of every source and compare their sizes with the planned ones."""
    return [_checked(dataset, number) for number in range(len(dataset.sources))] or [SourceLengths("stream")]


def _checked(dataset: FusionCaptionDataset, number: int) -> SourceLengths:
    source = dataset.sources[number]
    if source.sizes is None:
        return SourceLengths(source.name)
    differing, unreadable = [], []
    rows = rows_to_compare(source.sizes, source.name)
    for row in rows:
        with RandomStream("proof", number, row):  # the draws of the proof of isolation, so that both see one sample
            sample = dataset.sample_or_error(Address(number, row))
        planned = RowSize(*source.sizes.columns[:, row].tolist())
        if isinstance(sample, SampleError):
            unreadable.append(f"{source.where(row)}: {sample.reason}: {sample.detail}")
        elif (encoded := size_of(sample)) != planned:
            differing.append(f"{source.where(row)}: {_in_words(planned, encoded)}")
    num_compared = len(rows) - len(unreadable)
    said = tuple(differing), tuple(unreadable), source.sizes.without_headers
    return SourceLengths(source.name, len(source.rows), num_compared, *said)


def _in_words(planned: RowSize, encoded: RowSize) -> str:
    both = zip(RowSize._fields, planned, encoded, strict=True)
    return ", ".join(f"{name} {now} where {then} were planned" for name, then, now in both if now != then)
