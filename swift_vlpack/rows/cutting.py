"""Cut an encoded row that is longer than a pack into parts, under `packing_overflow`, and make a sample of each part.

A part is a sample of its own: its tokens, with the images among them and no others. `plan/parts.py` decides where to
cut, from the runs of text and media of a row; this module cuts the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.parts import Cutting, Part, Span, parts_of
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.contents import (
    NO_LABEL,
    PER_MEDIUM,
    PER_TOKEN,
    Contents,
    MediaSpan,
    count_contents,
    media_spans,
    runs_of,
)
from swift_vlpack.rows.families import MediaTensors, MediaTokens
from swift_vlpack.rows.samples import Encoded, LeftOut, SampleError, SampleId
from swift_vlpack.words import counted

Numbers = NDArray[np.integer[Any]]


class CannotBeCut(DataError):
    """The tensors of a sample do not match its tokens."""


class Divider(Protocol):
    """Divide rows into parts, whose sizes the cache of lengths saves."""

    def have_parts(self, lengths: Numbers) -> NDArray[np.bool_]:
        """Tell which measured rows have parts in the cache."""

    def digest(self) -> str:
        """Return 12 hexadecimal digits under which the parts of rows are saved and found."""


@dataclass(frozen=True)
class RowCutter:
    """Cut the rows of one template.

    Lengths of whole rows do not depend on the cutter, so it is not part of their keys in the cache. Parts do, so they
    are saved under its `digest`.
    """

    cutting: Cutting
    """The options that decide where to cut."""
    tokens: MediaTokens
    """The template's tokens of images and videos, which must not be cut."""

    @classmethod
    def of(cls, template: Any, config: PackingConfig) -> RowCutter | None:
        """Make the cutter of a run; None if the options keep rows whole."""
        cutting = Cutting.of(config)
        return None if cutting is None else cls(cutting, MediaTokens.of(template))

    def parts(self, row: Encoded) -> list[Part]:
        """Return the parts of a row; none if it stays whole."""
        num_tokens = len(row["input_ids"])
        if num_tokens <= self.cutting.capacity:
            return []
        return parts_of(runs_of(num_tokens, media_spans(row, self.tokens)), self.cutting, num_tokens)

    def have_parts(self, lengths: Numbers) -> NDArray[np.bool_]:
        """Tell which measured rows have parts in the cache."""
        is_long: NDArray[np.bool_] = lengths > self.cutting.capacity
        return is_long

    def cut(self, row: Encoded, span: Span) -> Encoded:
        """Make a sample of the tokens of a span. Raises `SampleError` if the row's tensors do not match its tokens."""
        media = media_spans(row, self.tokens)
        sample_id = row["sample_id"]._replace(part=span.number)
        try:
            if media is None:
                raise CannotBeCut("it is not known which of its tokens are which image or sound")
            return {**cut_sample(row, span, media), "sample_id": sample_id}
        except CannotBeCut as error:
            raise SampleError(sample_id, Reason.CANNOT_BE_CUT.value, str(error)) from error

    def planned(self, row: Encoded, span: Span) -> Encoded:
        """Make the sample of a planned part. Raises `SampleError` if the row has changed and is now cut elsewhere."""
        parts = self.parts(row)
        now = parts[span.number] if span.number < len(parts) else None
        if now is None or now.reason is not None or now.span != span:
            sample_id = row["sample_id"]._replace(part=span.number)
            said = f"planned as tokens {span.start} to {span.stop}, but its row of {len(row['input_ids'])} tokens "
            raise SampleError(sample_id, Reason.LONGER_THAN_PLANNED.value, f"{said}is now cut elsewhere")
        return self.cut(row, span)

    def digest(self) -> str:
        """Return a digest of the options and tokens that decide where rows are cut."""
        return hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()


def in_parts(
    row: Encoded | SampleError, cutter: RowCutter | None
) -> Iterator[tuple[Span | None, Encoded | SampleError | LeftOut]]:
    """Yield (span, sample) for each part of an encoded row, or (None, row) if the row stays whole.

    `row` may be the error of a row that cannot be encoded, which is yielded unchanged. In place of a part that cutting
    leaves out, a `LeftOut` is yielded.
    """
    parts = [] if cutter is None or isinstance(row, SampleError) else cutter.parts(row)
    if cutter is None or isinstance(row, SampleError) or not parts:
        yield None, row
        return
    for part in parts:
        span = part.span
        if part.reason is not None:
            yield span, left_out_part(row["sample_id"], part)
            continue
        try:
            yield span, cutter.cut(row, span)
        except SampleError as error:
            yield span, LeftOut(error.sample_id, *error.fault, part.length, part.images)


def left_out_part(row: SampleId, part: Part) -> LeftOut:
    """Describe a part that cutting left out, for lists and counts."""
    assert part.reason is not None
    said = f"tokens {part.start} to {part.stop} of its row, {counted(part.images, 'image')}"
    return LeftOut(row._replace(part=part.number), part.reason.value, said, (), part.length, part.images)


def part_sizes(row: Encoded, cutter: RowCutter | None) -> tuple[Part, ...]:
    """Return the parts of a row with their sizes, for the plan; none if the row stays whole."""
    parts = [] if cutter is None else cutter.parts(row)
    return tuple(part._replace(supervised=_supervised(row, part)) for part in parts)


def _supervised(row: Encoded, part: Part) -> int:
    """Count the trained tokens of a part: not repeated tokens, and not the first token, which nothing precedes."""
    labels = row.get("labels")
    predicted = [] if labels is None else list(labels)[part.start + max(1, part.num_repeated) : part.stop]
    return len(predicted) - predicted.count(NO_LABEL)


def cut_sample(sample: Encoded, span: Span, media: Sequence[MediaSpan]) -> Encoded:
    """Make a sample of the tokens of a span. `media` are all media of the sample; the span must not cut any of them.

    Tokens repeated from the part before get no label, nor does the first token of a part, because nothing precedes it.
    The first token of the row keeps the label that it has.
    """
    num_tokens = len(sample["input_ids"])
    if not 0 <= span.start < span.stop <= num_tokens:
        raise CannotBeCut(f"tokens {span.start} to {span.stop} of a row of {num_tokens}")
    part = {name: value for name, value in sample.items() if name not in PER_TOKEN and name not in PER_MEDIUM}
    for name in PER_TOKEN:
        if sample.get(name) is not None:
            part[name] = _tokens(sample[name], span, name, num_tokens)
    for tensors in dict.fromkeys(medium.tensors for medium in media):
        part.update(_media_tensors(sample, tensors, span, [medium for medium in media if medium.tensors == tensors]))
    if not any(_is_inside(medium, span) for medium in media):
        part.pop("mm_token_type_ids", None)  # templates give none to a row of text
    _mask(part, span)
    part["length"] = span.length
    if "lengths" in part:
        part["lengths"] = [span.length]
    part["contents"] = _contents(part, span, media)
    return part


def _tokens(value: Any, span: Span, name: str, num_tokens: int) -> Any:
    if len(value) != num_tokens:
        raise CannotBeCut(f"{len(value)} {name} for {num_tokens} tokens")
    cut = value[span.start : span.stop]
    # Copy, because a view would keep the memory of the whole row, and send all of it to other processes.
    return cut.clone() if isinstance(cut, torch.Tensor) else cut


def _media_tensors(sample: Encoded, tensors: MediaTensors, span: Span, media: Sequence[MediaSpan]) -> dict[str, Any]:
    """Cut the grids and pixels of the media inside a span. `media` are all media of these tensors, in order."""
    inside = [number for number, medium in enumerate(media) if _is_inside(medium, span)]
    if not inside:
        return {}
    first, last = inside[0], inside[-1] + 1
    units = [sum(medium.units for medium in media[:end]) for end in (first, last, len(media))]
    made: dict[str, Any] = {}
    for name, (start, stop, whole) in ((tensors.grid, (first, last, len(media))), (tensors.pixels, units)):
        value = None if name is None else sample.get(name)
        if name is None or value is None:
            continue
        if len(value) != whole:
            raise CannotBeCut(f"{len(value)} rows of {name} for {whole} that its {tensors.kind}s have")
        made[name] = value[start:stop].clone()
    if tensors.beside is not None and sample.get(tensors.beside) is not None:
        made[tensors.beside] = sample[tensors.beside][first:last]
    return made


def _is_inside(medium: MediaSpan, span: Span) -> bool:
    """Tell whether a medium is inside a span. Raises `CannotBeCut` if the span would cut it."""
    if medium.stop <= span.start or medium.start >= span.stop:
        return False
    if medium.start < span.start or medium.stop > span.stop:
        raise CannotBeCut(
            f"tokens {span.start} to {span.stop} would cut the {medium.tensors.kind} at {medium.start} to {medium.stop}"
        )
    return True


def _mask(part: Encoded, span: Span) -> None:
    num_masked = max(int(span.start > 0), span.num_repeated)
    for name, nothing in (("labels", NO_LABEL), ("loss_scale", 0.0)):
        value = part.get(name)
        if value is None or not num_masked:
            continue
        if isinstance(value, torch.Tensor):
            value[:num_masked] = nothing
        else:
            part[name] = [nothing] * num_masked + list(value[num_masked:])


def _contents(part: Encoded, span: Span, media: Sequence[MediaSpan]) -> Contents:
    inside = [medium for medium in media if _is_inside(medium, span)]
    part.pop("contents", None)  # drop the counts of the row, otherwise `count_contents` would be skipped
    images, patches = sum(medium.is_image for medium in inside), sum(medium.patches for medium in inside)
    return Contents(images, patches, count_contents(part).aspect if inside else 0.0)
