"""Measure rows that become several sequences, such as a pair of answers.

ms-swift's `lengths` of a row has a number for each sequence. The cache of lengths has one size for a row, the sum. The
sequences are stored as parts of the row, like the parts of a cut row:

>>> class Pairs:  # stands for ms-swift's template in the mode rlhf
...     mode, task_type = "rlhf", "causal_lm"
...     def encode(self, row, return_length=False):
...         tokens = {f"{name}_input_ids": row[name].split() for name in ("chosen", "rejected")}
...         return {**tokens, "lengths": [len(one) for one in tokens.values()]}
>>> encoder = SequencesEncoder(Pairs())
>>> sample = encoder.sample({"chosen": "a cat on a mat", "rejected": "a dog"}, SampleId("pairs", 0))
>>> sample["length"], [part[1:3] for part in encoder.part_sizes(sample)]
(7, [(0, 5), (5, 7)])
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.parts import Part
from swift_vlpack.rows.contents import Contents, count_contents, num_images_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import GRIDS, PIXELS
from swift_vlpack.rows.samples import Encoded, SampleId
from swift_vlpack.rows.sizes import LengthIndex
from swift_vlpack.rows.source import Row

OF_SEVERAL = ("rlhf", "kto")
"""Modes of ms-swift's templates in which a row is several sequences."""
_PREFIXES = ("chosen_", "rejected_")
"""How ms-swift names the tensors of the sequences of a row."""


@dataclass(frozen=True)
class SequencesOfRows:
    """Tell the cache of lengths which rows have parts: all rows of a template that makes several sequences of a row.

    Other templates make one sequence. A few of these add numbers of their own to `lengths`; such rows are not cached.
    """

    are_several: bool

    def have_parts(self, lengths: NDArray[Any]) -> NDArray[np.bool_]:
        """Tell which measured rows have parts in the cache."""
        return np.full(np.shape(lengths), self.are_several)

    def digest(self) -> str:
        """Return a digest that no cutter has."""
        return hashlib.blake2b(b"sequences", digest_size=6).hexdigest()


@dataclass(frozen=True, eq=False)
class SequencesEncoder(RowEncoder):
    """Encodes rows as the template does, to measure them. A classifier's labels are left out, which are no tokens."""

    @property
    def divider(self) -> SequencesOfRows:
        """Return the object that knows which rows have parts."""
        return SequencesOfRows(self.template.mode in OF_SEVERAL)

    def part_sizes(self, row: Encoded) -> tuple[Part, ...]:
        """Return the sequences of a row as parts; none if the row is a single sequence."""
        lengths = row["lengths"]
        if not self.divider.are_several and len(lengths) == 1:
            return ()
        ends = [0, *np.cumsum(lengths).tolist()]
        return tuple(Part(number, start, stop) for number, (start, stop) in enumerate(pairwise(ends)))

    def sample(self, row: Row, sample_id: SampleId, *, strict: bool = False, is_watched: bool = False) -> Encoded:
        """Encode a row, add what is measured, and drop its labels."""
        sample = super().sample(row, sample_id, strict=strict, is_watched=is_watched)
        if self.template.task_type != "causal_lm":
            sample.pop("labels", None)
        return sample

    def _length(self, sample: Encoded) -> int:
        return int(sum(sample["lengths"]))

    def _contents(self, sample: Encoded, row: Row) -> Contents:
        found = [count_contents(one, row, patch_size=self._patch_size) for one in _sequences(sample)]
        if not found:
            return super()._contents(sample, row)
        # The sequences of a row share its images, so count the images of the row and not of its sequences.
        has_vision = any(one != Contents() for one in found)
        return Contents(
            images=num_images_of(row) if has_vision else 0,
            patches=sum(one.patches for one in found),
            aspect=max(one.aspect for one in found),
        )


def _sequences(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the vision tensors of each sequence, which ms-swift names with a prefix (`chosen_`)."""
    for prefix in _PREFIXES:
        if f"{prefix}input_ids" in sample:
            yield {name: sample.get(prefix + name) for name in (*GRIDS, *PIXELS)}


def lengths_of_sequences(sizes: LengthIndex) -> list[list[int]]:
    """Return `lengths` of every row, as ms-swift's encoding gives it; an empty list for a row that cannot be encoded.

    >>> from swift_vlpack.plan.parts import CutRows
    >>> from swift_vlpack.rows.sizes import RowSize
    >>> cut = CutRows.of({1: [Part(0, 0, 5), Part(1, 5, 7)]})
    >>> lengths_of_sequences(LengthIndex.of([RowSize(3), RowSize(7), RowSize(0)], {2: "file_missing"}, cut=cut))
    [[3], [5, 2], []]
    """
    lengths = [[length] if length else [] for length in sizes.lengths.tolist()]
    if sizes.cut is not None:
        rows, offsets, columns = sizes.cut.arrays
        of_parts = (columns[1] - columns[0]).tolist()
        for row, (start, stop) in zip(rows.tolist(), pairwise(offsets.tolist()), strict=True):
            lengths[row] = of_parts[start:stop] if lengths[row] else []
    return lengths
