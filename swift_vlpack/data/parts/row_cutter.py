"""What becomes of an encoded row under `packing_overflow`: its parts, and each of them as a sample."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift_vlpack.core.account.reasons import Reason
from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.packing.parts import Cutting, Part, Span, parts_of
from swift_vlpack.core.words import counted
from swift_vlpack.data.parts.cut import CannotBeCut, cut_sample
from swift_vlpack.data.parts.layout import MediaWords, media_of, runs_of
from swift_vlpack.data.rows.samples import Encoded, LeftOut, SampleError, SampleId

ATTRIBUTE = "vlpack_row_cutter"
"""Of a template whose rows may be cut. It changes no length of a row, so it is no part of their key."""


@dataclass(frozen=True)
class RowCutter:
    """Cuts the rows of one template."""

    cutting: Cutting
    words: MediaWords

    def parts(self, row: Encoded) -> list[Part]:
        """The parts of a row; none where it stays whole."""
        num_tokens = len(row["input_ids"])
        if num_tokens <= self.cutting.capacity:
            return []
        return parts_of(runs_of(num_tokens, media_of(row, self.words)), self.cutting, num_tokens)

    def cut(self, row: Encoded, span: Span) -> Encoded:
        """Some tokens of a row as a sample; `SampleError` where its tensors are not what its tokens say."""
        media = media_of(row, self.words)
        assert media is not None, "a row whose media are not known has no part that is trained"
        sample_id = row["sample_id"]._replace(part=span.number)
        try:
            return {**cut_sample(row, span, media), "sample_id": sample_id}
        except CannotBeCut as error:
            raise SampleError(sample_id, Reason.CANNOT_BE_CUT.value, str(error)) from error

    def planned(self, row: Encoded, span: Span) -> Encoded:
        """The part that a plan has; an error where the row is cut otherwise now."""
        parts = self.parts(row)
        now = parts[span.number] if span.number < len(parts) else None
        if now is None or now.reason is not None or now.span != span:
            sample_id = row["sample_id"]._replace(part=span.number)
            said = f"planned were tokens {span.start} to {span.stop}, and its row of {len(row['input_ids'])} tokens "
            raise SampleError(sample_id, Reason.LONGER_THAN_PLANNED.value, f"{said}is cut otherwise now")
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
    row: Encoded | SampleError, cutter: RowCutter | None
) -> Iterator[tuple[int | None, Encoded | SampleError | LeftOut]]:
    """The samples of a row that was read: itself, or its parts by number; of those that cutting left out, why."""
    parts = [] if cutter is None or isinstance(row, SampleError) else cutter.parts(row)
    if cutter is None or isinstance(row, SampleError) or not parts:
        yield None, row
        return
    for part in parts:
        if part.reason is not None:
            yield part.number, left_out_part(row["sample_id"], part)
            continue
        try:
            yield part.number, cutter.cut(row, part.span)
        except SampleError as error:
            yield part.number, LeftOut(error.sample_id, *error.fault, part.length, part.images)


def left_out_part(row: SampleId, part: Part) -> LeftOut:
    """A part that cutting left out, as it is listed and counted."""
    assert part.reason is not None
    said = f"tokens {part.start} to {part.stop} of its row, {counted(part.images, 'image')}"
    return LeftOut(row._replace(part=part.number), part.reason.value, said, (), part.length, part.images)
