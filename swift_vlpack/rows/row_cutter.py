"""What becomes of an encoded row under `packing_overflow`: its parts, and each of them as a sample."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.parts import NOTHING, Cutting, Part, Run, Span, Taken, parts_of, window_parts
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.contents import contents_of
from swift_vlpack.rows.cut_tensors import CannotBeCut, cut_sample
from swift_vlpack.rows.layout import MediaWords, media_of, runs_of
from swift_vlpack.rows.samples import Encoded, LeftOut, SampleError, SampleId
from swift_vlpack.words import counted

Numbers = NDArray[np.integer[Any]]
ATTRIBUTE = "vlpack_row_cutter"
"""Of a template whose rows may be cut. It changes no length of a row, so it is no part of their key."""


@dataclass(frozen=True)
class RowCutter:
    """Cuts the rows of one template."""

    cutting: Cutting
    words: MediaWords

    @property
    def lays_end_to_end(self) -> bool:
        """Whether where a row is cut depends on what came before it."""
        return self.cutting.how == WINDOW

    def parts(self, row: Encoded, taken: Taken = NOTHING) -> list[Part]:
        """The parts of a row; none where it stays whole. `taken`: what the pack holds that the row begins in."""
        num_tokens = len(row["input_ids"])
        if self.lays_end_to_end:
            held = contents_of(row)
            whole = Run(num_tokens, held.images, held.patches)
            return window_parts(self._runs(row, whole), self.cutting, whole, taken)
        if num_tokens <= self.cutting.capacity:
            return []
        return parts_of(runs_of(num_tokens, media_of(row, self.words)), self.cutting, num_tokens)

    def _runs(self, row: Encoded, whole: Run) -> list[Run] | None:
        """Of a row of which nobody counts media there is no more to know than that it is one run."""
        return runs_of(whole.length, media_of(row, self.words)) if whole.images or whole.patches else [whole]

    def have_parts(self, lengths: Numbers, images: Numbers, patches: Numbers) -> NDArray[np.bool_]:
        """Of which rows parts are remembered, where they were measured: those that are cut, or that have media."""
        has_media: NDArray[np.bool_] = (images > 0) | (patches > 0)
        return has_media if self.lays_end_to_end else lengths > self.cutting.capacity

    def cut(self, row: Encoded, span: Span) -> Encoded:
        """Some tokens of a row as a sample; `SampleError` where its tensors are not what its tokens say."""
        media = media_of(row, self.words)
        sample_id = row["sample_id"]._replace(part=span.number)
        try:
            if media is None:
                raise CannotBeCut("it is not known which of its tokens are which image or sound")
            return {**cut_sample(row, span, media), "sample_id": sample_id}
        except CannotBeCut as error:
            raise SampleError(sample_id, Reason.CANNOT_BE_CUT.value, str(error)) from error

    def planned(self, row: Encoded, span: Span) -> Encoded:
        """The part that a plan has; an error where the row is cut otherwise now."""
        if self.lays_end_to_end:
            return self._planned_in_window(row, span)
        parts = self.parts(row)
        now = parts[span.number] if span.number < len(parts) else None
        if now is None or now.reason is not None or now.span != span:
            sample_id = row["sample_id"]._replace(part=span.number)
            said = f"planned were tokens {span.start} to {span.stop}, and its row of {len(row['input_ids'])} tokens "
            raise SampleError(sample_id, Reason.LONGER_THAN_PLANNED.value, f"{said}is cut otherwise now")
        return self.cut(row, span)

    def _planned_in_window(self, row: Encoded, span: Span) -> Encoded:
        sample_id, num_tokens = row["sample_id"]._replace(part=span.number), len(row["input_ids"])
        if num_tokens != span.row_length:
            said = f"its row has {num_tokens} tokens, planned were {span.row_length}"
            raise SampleError(sample_id, Reason.LONGER_THAN_PLANNED.value, said)
        return self.cut(row, span)

    def digest(self) -> str:
        """Of all that decides where a row is cut, beside the row."""
        return hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()


def cutter_of(template: Any) -> RowCutter | None:
    """How the rows of a template are cut; None where they are not."""
    cutter: RowCutter | None = getattr(template, ATTRIBUTE, None)
    return cutter


def for_training(template: Any, config: PackingConfig) -> Any:
    """The template that encodes rows to train on; the same one where they are not cut.

    Of a row that is to be cut all tokens are wanted, so the copy has no `max_length`, by which ms-swift would raise or
    truncate. Evaluation goes on with the original.
    """
    cutting = Cutting.of(config)
    if cutting is None:
        return template
    own = copy.copy(template)
    if getattr(template, "truncation_strategy", None) not in ("left", "right"):  # which only `drop` is used with
        own.max_length = None
    setattr(own, ATTRIBUTE, RowCutter(cutting, MediaWords.of(template)))
    return own


def in_parts(
    row: Encoded | SampleError, cutter: RowCutter | None, taken: Taken = NOTHING
) -> Iterator[tuple[Span | None, Encoded | SampleError | LeftOut]]:
    """The samples of a row that was read: itself, or its parts and where they are; of those left out, why."""
    parts = [] if cutter is None or isinstance(row, SampleError) else cutter.parts(row, taken)
    if cutter is None or isinstance(row, SampleError) or not parts:
        yield None, row
        return
    row_length = len(row["input_ids"]) if cutter.lays_end_to_end else 0
    for part in parts:
        span = part.span._replace(row_length=row_length)
        if part.reason is not None:
            yield span, left_out_part(row["sample_id"], part)
            continue
        try:
            yield span, cutter.cut(row, span)
        except SampleError as error:
            yield span, LeftOut(error.sample_id, *error.fault, part.length, part.images)


def left_out_part(row: SampleId, part: Part) -> LeftOut:
    """A part that cutting left out, as it is listed and counted."""
    assert part.reason is not None
    said = f"tokens {part.start} to {part.stop} of its row, {counted(part.images, 'image')}"
    return LeftOut(row._replace(part=part.number), part.reason.value, said, (), part.length, part.images)
