"""Say from the inputs of a forward why a model does not see where its samples start.

A batch can mark samples by boundaries (`cu_seq_lens_q`), by positions that begin again, by a 4-D mask, or by a mask
that numbers the samples. Each form is read by some kinds of attention only, and under conditions. Nothing warns when a
form is not read.

>>> from types import SimpleNamespace
>>> positions, samples = torch.arange(4)[None], [Slot(0, 0, 2), Slot(0, 2, 2)]
>>> why_not_apart({"position_ids": positions}, samples, SimpleNamespace(), "sdpa")
'positions run over the whole row and begin again at no sample, and nothing else in the batch tells where samples start'
>>> numbers = torch.tensor([[1, 1, 2, 2]])
>>> why_not_apart({"position_ids": positions, "attention_mask": numbers}, samples, SimpleNamespace(), "sdpa")
'attention_mask numbers the samples, and attention sdpa reads it as a mask of padding: tokens see all that is not 0'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from swift_vlpack.attention.attention import keeps_samples_apart
from swift_vlpack.proof.runner import Slot
from swift_vlpack.proof.same_inputs import ENDS, NUMBERS_OF_SAMPLES
from swift_vlpack.rows.families import text_config_of

_BOUNDARIES = (ENDS, "cu_seqlens", *NUMBERS_OF_SAMPLES)
_HIDDEN = -1000.0
"""A mask that is added to scores hides a token if it adds less than this; real masks add far less."""


def why_not_apart(inputs: Mapping[str, Any], slots: Sequence[Slot], config: Any, attention: str) -> str | None:
    """Say why samples see each other, as far as the inputs of the batch explain it; None if they do not.

    `config` is that of the model.
    """
    return next(_reasons(inputs, slots, config, attention), None)


def _reasons(inputs: Mapping[str, Any], slots: Sequence[Slot], config: Any, attention: str) -> Iterator[str]:
    """Yield reasons. First those that hold whatever else is in the batch."""
    name, mask, positions = f"attention {attention}", inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, torch.Tensor):
        yield from _of_mask(mask, slots, name)
    boundaries = next((name for name in _BOUNDARIES if inputs.get(name) is not None), "")
    if boundaries == ENDS and keeps_samples_apart(attention):
        return  # this attention reads boundaries, so the cause is something else
    if isinstance(positions, torch.Tensor):
        yield from _of_positions(positions, slots, inputs, config, is_flash="flash" in attention)
    if boundaries:
        yield f"boundaries are in {boundaries}, which {name} does not read (flash-attn and vlpack read {ENDS})"
    if not isinstance(positions, torch.Tensor):
        yield "nothing in the batch tells where samples start: no positions, no boundaries, no mask of samples"
    elif (begins := _begins(positions, slots)) and not any(begins):
        yield (
            "positions run over the whole row and begin again at no sample, and nothing else in the batch tells where "
            "samples start"
        )


def _of_mask(mask: torch.Tensor, slots: Sequence[Slot], name: str) -> Iterator[str]:
    if mask.dim() == 4 and (leak := _leak(mask, slots)) is not None:
        reader, seen = (number + 1 for number in leak)
        yield f"the 4-D attention_mask lets tokens of sample {reader} of the sequence see sample {seen}"
    elif mask.dim() == 4:
        yield f"the 4-D attention_mask keeps samples apart, and {name} does not read it"
    elif mask.dim() != 2:
        yield f"attention_mask is neither 2-D nor 4-D, and {name} reads nothing else (boundaries, for a patched one?)"
    elif {int(number) for slot in slots for number in slot.of(mask).unique()} - {0, 1}:
        yield (
            f"attention_mask numbers the samples, and {name} reads it as a mask of padding: tokens see all that is "
            "not 0"
        )


def _leak(mask: torch.Tensor, slots: Sequence[Slot]) -> tuple[int, int] | None:
    """Return the first pair of samples (reader, seen), counted from 0, that a mask fails to keep apart."""
    # Masks that are added to scores have large negative numbers for what is hidden; others are 0 or False there.
    allowed = mask > _HIDDEN if mask.is_floating_point() else mask != 0
    for one, here in enumerate(slots):
        for other, there in enumerate(slots):
            is_other = one != other and here.row == there.row
            if is_other and bool(allowed[here.row % len(allowed), :, here.tokens, there.tokens].any()):
                return one, other
    return None


def _of_positions(
    positions: torch.Tensor, slots: Sequence[Slot], inputs: Mapping[str, Any], config: Any, *, is_flash: bool
) -> Iterator[str]:
    """Yield the reasons why attention did not read positions that begin again."""
    if positions.dim() == 3 and len(positions) != 4:
        yield (
            "position_ids have three axes (time, height, width), and transformers finds samples by a fourth one only, "
            "the text positions in front of them"
        )
        return
    begins, text_config = _begins(positions, slots), text_config_of(config)
    if not all(begins):
        if any(begins):
            yield "positions begin again at some samples only: the others go on with the sample before them"
        return
    again = "positions begin again at every sample"
    if isinstance(inputs.get("attention_mask"), torch.Tensor):
        yield (
            f"{again}, but transformers looks at them only where there is no attention_mask: leave it out of packed "
            "batches"
        )
    uses_cache = inputs.get("use_cache")
    if (getattr(text_config, "use_cache", False) if uses_cache is None else uses_cache) and not is_flash:
        yield (
            f"{again}, but transformers looks at them only without a cache: set model.config.use_cache to False, or "
            "take an attention that reads boundaries (cu_seq_lens_q)"
        )
    if positions.dim() == 2 and "mrope_section" in (getattr(text_config, "rope_parameters", None) or {}):
        yield (
            f"{again}, but position_ids are 2-D, and this model finds samples by the first of four axes only: text, "
            "time, height, width"
        )


def _begins(positions: torch.Tensor, slots: Sequence[Slot]) -> list[bool]:
    """Tell of each sample that follows another in its row whether positions begin again there."""
    rows = positions[0] if positions.dim() == 3 else positions.reshape(-1, positions.shape[-1])
    later = [slot for slot in slots if any(one.row == slot.row and one.start < slot.start for one in slots)]
    rows = rows.expand(max((slot.row for slot in slots), default=0) + 1, -1) if len(rows) == 1 else rows
    # transformers takes each step that is not 1 for the start of a sample.
    return [int(rows[slot.row, slot.start] - rows[slot.row, slot.start - 1]) != 1 for slot in later]
