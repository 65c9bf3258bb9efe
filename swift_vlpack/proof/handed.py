"""Read from the inputs of a forward how they tell the model where samples start, and say why that is not enough.

A batch can mark samples by boundaries (`cu_seq_lens_q`), by positions that begin again, by a 4-D mask, or by a mask
that numbers the samples. Each form is read by some kinds of attention only, and under conditions. Nothing warns when a
form is not read.

>>> why_not_apart(Handed(positions=Positions.RUN_ON), "sdpa")
'positions run over the whole row and begin again at no sample, and nothing else in the batch tells where samples start'
>>> why_not_apart(Handed(positions=Positions.RUN_ON, mask=Mask.OF_SAMPLES), "sdpa")
'attention_mask numbers the samples, and attention sdpa reads it as a mask of padding: tokens see all that is not 0'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from swift_vlpack.attention.attention import keeps_samples_apart
from swift_vlpack.proof.proof_model import Slot
from swift_vlpack.proof.same_inputs import ENDS, NUMBERS_OF_SAMPLES
from swift_vlpack.rows.families import text_config_of

_BOUNDARIES = (ENDS, "cu_seqlens", *NUMBERS_OF_SAMPLES)
_HIDDEN = -1000.0
"""A mask that is added to scores hides a token if it adds less than this; real masks add far less."""


class Positions(Enum):
    """Kinds of `position_ids`, by what they say about the samples of a batch."""

    NONE = "the batch has none"
    BEGIN_AGAIN = "they begin again at every sample"
    BEGIN_AGAIN_AT_SOME = "they begin again at some samples only"
    RUN_ON = "they run over the whole row"
    FLAT = "they begin again, but are 2-D, and the model has three axes"
    THREE_AXES = "they have three axes, without the text positions by which transformers finds samples"


class Mask(Enum):
    """Kinds of `attention_mask`, by what they say about the samples of a batch."""

    NONE = "the batch has none"
    OF_PADDING = "ones, and zeros for padding"
    OF_SAMPLES = "the number of the sample of each token"
    OF_PAIRS = "4-D: no token of one sample may see another sample"
    OF_PAIRS_THAT_LEAKS = "4-D: tokens may see other samples"
    ANOTHER = "something else, such as boundaries"


@dataclass(frozen=True, slots=True)
class Handed:
    """The inputs by which a batch tells the model where its samples start."""

    positions: Positions = Positions.NONE
    mask: Mask = Mask.NONE
    boundaries: str = ""
    """Name of an input with boundaries, or with the number of each token's sample; empty if there is none."""
    has_cache: bool = False
    """True if the model makes a cache, also in training."""
    leak: tuple[int, int] | None = None
    """(reader, seen): two samples, counted from 0; the mask lets tokens of `reader` see tokens of `seen`."""


def handed_in(inputs: Mapping[str, Any], slots: Sequence[Slot], config: Any) -> Handed:
    """Read the inputs of a forward. `config` is that of the model."""
    mask, leak = _mask_of(inputs.get("attention_mask"), slots)
    uses_cache = inputs.get("use_cache")
    return Handed(
        positions=_positions_of(inputs.get("position_ids"), slots, has_axes=_has_axes(config)),
        mask=mask,
        boundaries=next((name for name in _BOUNDARIES if inputs.get(name) is not None), ""),
        has_cache=bool(getattr(text_config_of(config), "use_cache", False) if uses_cache is None else uses_cache),
        leak=leak,
    )


def why_not_apart(handed: Handed, attention: str) -> str | None:
    """Say why samples see each other, as far as the inputs of the batch explain it; None if they do not."""
    return next(_reasons(handed, attention), None)


def _reasons(handed: Handed, attention: str) -> Iterator[str]:
    """Yield reasons. First those that hold whatever else is in the batch."""
    name = f"attention {attention}"
    if handed.leak is not None:
        reader, seen = (number + 1 for number in handed.leak)
        yield f"the 4-D attention_mask lets tokens of sample {reader} of the sequence see sample {seen}"
    if handed.mask is Mask.OF_PAIRS:
        yield f"the 4-D attention_mask keeps samples apart, and {name} does not read it"
    if handed.mask is Mask.OF_SAMPLES:
        yield (
            f"attention_mask numbers the samples, and {name} reads it as a mask of padding: tokens see all that is "
            "not 0"
        )
    if handed.mask is Mask.ANOTHER:
        yield f"attention_mask is neither 2-D nor 4-D, and {name} reads nothing else (boundaries, for a patched one?)"
    if handed.boundaries == ENDS and keeps_samples_apart(attention):
        return  # this attention reads boundaries, so the cause is something else
    yield from _of_positions(handed, is_flash="flash" in attention)
    if handed.boundaries:
        yield f"boundaries are in {handed.boundaries}, which {name} does not read (flash-attn and vlpack read {ENDS})"
    if handed.positions is Positions.RUN_ON:
        yield (
            "positions run over the whole row and begin again at no sample, and nothing else in the batch tells where "
            "samples start"
        )
    if handed.positions is Positions.NONE:
        yield "nothing in the batch tells where samples start: no positions, no boundaries, no mask of samples"


def _of_positions(handed: Handed, *, is_flash: bool) -> Iterator[str]:
    """Yield the reasons why attention did not read positions that begin again."""
    begins = "positions begin again at every sample"
    if handed.positions is Positions.BEGIN_AGAIN_AT_SOME:
        yield "positions begin again at some samples only: the others go on with the sample before them"
    if handed.positions is Positions.THREE_AXES:
        yield (
            "position_ids have three axes (time, height, width), and transformers finds samples by a fourth one only, "
            "the text positions in front of them"
        )
    if handed.positions not in (Positions.BEGIN_AGAIN, Positions.FLAT):
        return
    if handed.mask is Mask.OF_PADDING:
        yield (
            f"{begins}, but transformers looks at them only where there is no attention_mask: leave it out of packed "
            "batches"
        )
    if handed.has_cache and not is_flash:
        yield (
            f"{begins}, but transformers looks at them only without a cache: set model.config.use_cache to False, or "
            "take an attention that reads boundaries (cu_seq_lens_q)"
        )
    if handed.positions is Positions.FLAT:
        yield (
            f"{begins}, but position_ids are 2-D, and this model finds samples by the first of four axes only: text, "
            "time, height, width"
        )


def _has_axes(config: Any) -> bool:
    """Tell whether rotary embeddings of the model have positions on three axes (time, height, width)."""
    return "mrope_section" in (getattr(text_config_of(config), "rope_parameters", None) or {})


def _positions_of(given: Any, slots: Sequence[Slot], *, has_axes: bool) -> Positions:
    if not isinstance(given, torch.Tensor):
        return Positions.NONE
    if given.dim() == 3 and len(given) != 4:
        return Positions.THREE_AXES
    rows = given[0] if given.dim() == 3 else given.reshape(-1, given.shape[-1])
    later = [slot for slot in slots if any(one.row == slot.row and one.start < slot.start for one in slots)]
    rows = rows.expand(max((slot.row for slot in slots), default=0) + 1, -1) if len(rows) == 1 else rows
    # transformers takes each step that is not 1 for the start of a sample.
    begins = [int(rows[slot.row, slot.start] - rows[slot.row, slot.start - 1]) != 1 for slot in later]
    if all(begins):
        return Positions.FLAT if has_axes and given.dim() == 2 else Positions.BEGIN_AGAIN
    return Positions.BEGIN_AGAIN_AT_SOME if any(begins) else Positions.RUN_ON


def _mask_of(given: Any, slots: Sequence[Slot]) -> tuple[Mask, tuple[int, int] | None]:
    """Return the kind of a mask, and the first pair of samples (reader, seen) that it fails to keep apart."""
    if not isinstance(given, torch.Tensor):
        return Mask.NONE, None
    if given.dim() == 2:
        numbers = {int(number) for slot in slots for number in slot.of(given).unique()}
        return (Mask.OF_SAMPLES if numbers - {0, 1} else Mask.OF_PADDING), None
    if given.dim() != 4:
        return Mask.ANOTHER, None
    # Masks that are added to scores have large negative numbers for what is hidden; others are 0 or False there.
    allowed = given > _HIDDEN if given.is_floating_point() else given != 0
    pairs = ((one, other) for one in range(len(slots)) for other in range(len(slots)) if one != other)
    for one, other in pairs:
        here, there = slots[one], slots[other]
        if here.row == there.row and bool(allowed[here.row % len(allowed), :, here.tokens, there.tokens].any()):
            return Mask.OF_PAIRS_THAT_LEAKS, (one, other)
    return Mask.OF_PAIRS, None
