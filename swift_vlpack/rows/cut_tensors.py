"""A sample of some tokens of an encoded row: as if it had been encoded alone, with its own images and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swift_vlpack.errors import DataError
from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.contents import NO_LABEL, Contents, found
from swift_vlpack.rows.layout import GRID_OF, PER_TOKEN, PER_VIDEO, PIXELS_OF, VIDEO, Medium
from swift_vlpack.rows.samples import Encoded


class CannotBeCut(DataError):
    """A sample whose tensors are not what its tokens say."""


def cut_sample(sample: Encoded, span: Span, media: Sequence[Medium]) -> Encoded:
    """The tokens of a span, with what belongs to them; `media` are those of the whole sample, none of which is cut.

    What is repeated of the part before has no label. Nor has the first token, which nothing comes before, unless it is
    the first of the row too, of which the template decides.
    """
    num_tokens = len(sample["input_ids"])
    if not 0 <= span.start < span.stop <= num_tokens:
        raise CannotBeCut(f"tokens {span.start} to {span.stop} of a row of {num_tokens}")
    part = {name: value for name, value in sample.items() if not _is_of_tokens(name)}
    for name in PER_TOKEN:
        if sample.get(name) is not None:
            part[name] = _tokens(sample[name], span, name, num_tokens)
    for kind in GRID_OF:
        part.update(_media_tensors(sample, kind, span, media))
    if not any(_is_inside(medium, span) for medium in media):
        part.pop("mm_token_type_ids", None)  # as a text has none
    _mask(part, span)
    part["length"] = span.length
    if "lengths" in part:
        part["lengths"] = [span.length]
    part["contents"] = _contents(part, span, media)
    return part


def _is_of_tokens(name: str) -> bool:
    return name in PER_TOKEN or name in GRID_OF.values() or name in PIXELS_OF.values() or name == PER_VIDEO


def _tokens(value: Any, span: Span, name: str, num_tokens: int) -> Any:
    if len(value) != num_tokens:
        raise CannotBeCut(f"{len(value)} {name} for {num_tokens} tokens")
    cut = value[span.start : span.stop]
    # A view would keep, and send to other processes, the memory of the whole row.
    return cut.clone() if isinstance(cut, torch.Tensor) else cut


def _media_tensors(sample: Encoded, kind: str, span: Span, media: Sequence[Medium]) -> dict[str, Any]:
    """Grids and pixels of the media of one kind in a span; nothing where there is none of it."""
    of_kind = [medium for medium in media if medium.kind == kind]
    inside = [number for number, medium in enumerate(of_kind) if _is_inside(medium, span)]
    if not inside:
        return {}
    first, last = inside[0], inside[-1] + 1
    units = [sum(medium.units for medium in of_kind[:end]) for end in (first, last, len(of_kind))]
    made: dict[str, Any] = {}
    for name, (start, stop, whole) in ((GRID_OF[kind], (first, last, len(of_kind))), (PIXELS_OF[kind], units)):
        value = sample.get(name)
        if value is None:
            continue
        if len(value) != whole:
            raise CannotBeCut(f"{len(value)} rows of {name} for {whole} that its {kind}s have")
        made[name] = value[start:stop].clone()
    if kind == VIDEO and sample.get(PER_VIDEO) is not None:
        made[PER_VIDEO] = sample[PER_VIDEO][first:last]
    return made


def _is_inside(medium: Medium, span: Span) -> bool:
    """Whether a medium is in a span; one of which only a part is, is an error."""
    if medium.stop <= span.start or medium.start >= span.stop:
        return False
    if medium.start < span.start or medium.stop > span.stop:
        raise CannotBeCut(
            f"tokens {span.start} to {span.stop} would cut the {medium.kind} at {medium.start} to {medium.stop}"
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


def _contents(part: Encoded, span: Span, media: Sequence[Medium]) -> Contents:
    inside = [medium for medium in media if _is_inside(medium, span)]
    part.pop("contents", None)  # that of the row
    images, patches = sum(medium.is_image for medium in inside), sum(medium.patches for medium in inside)
    return Contents(images, patches, found(part).aspect if inside else 0.0)
