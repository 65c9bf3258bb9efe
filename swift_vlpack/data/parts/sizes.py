"""The sizes of the parts of a row, which is all that a plan is made of."""

from __future__ import annotations

from swift_vlpack.core.epoch.cut_rows import PartSize
from swift_vlpack.core.packing.parts import Part
from swift_vlpack.data.parts.row_cutter import RowCutter
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded


def part_sizes(row: Encoded, cutter: RowCutter | None) -> tuple[PartSize, ...]:
    """Of an encoded row; none where it stays whole."""
    return () if cutter is None else tuple(PartSize.of(part, _supervised(row, part)) for part in cutter.parts(row))


def _supervised(row: Encoded, part: Part) -> int:
    """Tokens that are predicted: those with a label, but for what is repeated and the first, which nothing precedes."""
    labels = row.get("labels")
    predicted = [] if labels is None else list(labels)[part.start + max(1, part.num_repeated) : part.stop]
    return len(predicted) - predicted.count(NO_LABEL)
