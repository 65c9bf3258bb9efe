"""The sizes of the parts of a row, which is all that a plan is made of."""

from __future__ import annotations

from itertools import accumulate

from swift_vlpack.plan.cut_rows import PartSize
from swift_vlpack.plan.parts import Part
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.contents import NO_LABEL, contents_of
from swift_vlpack.rows.layout import media_of, runs_of
from swift_vlpack.rows.row_cutter import RowCutter
from swift_vlpack.rows.samples import Encoded


def part_sizes(row: Encoded, cutter: RowCutter | None) -> tuple[PartSize, ...]:
    """Of an encoded row; none where it stays whole. For windows: the runs of text and media of a row that has any."""
    if cutter is None:
        return ()
    parts = _runs(row, cutter) if cutter.lays_end_to_end else cutter.parts(row)
    return tuple(PartSize.of(part, _supervised(row, part)) for part in parts)


def _runs(row: Encoded, cutter: RowCutter) -> list[Part]:
    """Text and media, one behind the other; all in one where that is not known, and none of a text."""
    held, num_tokens = contents_of(row), len(row["input_ids"])
    if not held.images and not held.patches:
        return []
    runs = runs_of(num_tokens, media_of(row, cutter.words))
    if runs is None:
        return [Part(0, 0, num_tokens, 0, held.images, held.patches, Reason.CANNOT_BE_CUT)]
    ends = list(accumulate(run.length for run in runs))
    return [
        Part(number, end - run.length, end, 0, run.images, run.patches)
        for number, (run, end) in enumerate(zip(runs, ends, strict=True))
    ]


def _supervised(row: Encoded, part: Part) -> int:
    """Tokens that are predicted: those with a label, but for what is repeated and the first, which nothing precedes."""
    labels = row.get("labels")
    predicted = [] if labels is None else list(labels)[part.start + max(1, part.num_repeated) : part.stop]
    return len(predicted) - predicted.count(NO_LABEL)
