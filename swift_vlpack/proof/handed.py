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

from collections.abc import Mapping, Sequence
from itertools import permutations
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
    name, mask, positions = f"attention {attention}", inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, torch.Tensor) and (wrong := _of_mask(mask, slots, name)):
        return wrong
    boundaries = next((name for name in _BOUNDARIES if inputs.get(name) is not None), "")
    if boundaries == ENDS and keeps_samples_apart(attention):
        return None  # this attention reads boundaries, so the cause is something else
    begins = _begins(positions, slots) if isinstance(positions, torch.Tensor) else []
    if any(begins) and not all(begins):
        return "positions begin again at some samples only: the others go on with the sample before them"
    unread = _why_unread(inputs, config, is_flash="flash" in attention) if any(begins) else ""
    if unread:
        return f"positions begin again at every sample, and transformers does not look at them: {unread}"
    if boundaries:
        return f"boundaries are in {boundaries}, which {name} does not read (flash-attn and vlpack read {ENDS})"
    if not isinstance(positions, torch.Tensor):
        return "nothing in the batch tells where samples start: no positions, no boundaries, no mask of samples"
    if begins and not any(begins):
        return (
            "positions run over the whole row and begin again at no sample, and nothing else in the batch tells where "
            "samples start"
        )
    return None


def _of_mask(mask: torch.Tensor, slots: Sequence[Slot], name: str) -> str | None:
    if mask.dim() == 4:
        # Masks that are added to scores have large negative numbers for what is hidden; others are 0 or False there.
        allowed = mask > _HIDDEN if mask.is_floating_point() else mask != 0
        for (one, here), (other, there) in permutations(enumerate(slots, start=1), 2):
            if here.row == there.row and bool(allowed[here.row % len(allowed), :, here.tokens, there.tokens].any()):
                return f"the 4-D attention_mask lets tokens of sample {one} of the sequence see sample {other}"
        return f"the 4-D attention_mask keeps samples apart, and {name} does not read it"
    if mask.dim() != 2:
        return f"attention_mask is neither 2-D nor 4-D, and {name} reads nothing else (boundaries, for a patched one?)"
    if {int(number) for slot in slots for number in slot.of(mask).unique()} - {0, 1}:
        return (
            f"attention_mask numbers the samples, and {name} reads it as a mask of padding: tokens see all that is "
            "not 0"
        )
    return None


def _why_unread(inputs: Mapping[str, Any], config: Any, *, is_flash: bool) -> str:
    """Say why transformers does not find samples by positions that begin again; empty if it does."""
    text_config, uses_cache, positions = text_config_of(config), inputs.get("use_cache"), inputs["position_ids"]
    if positions.dim() == 3 and len(positions) != 4:
        return "they have three axes (time, height, width), and it takes a fourth in front of them, the text positions"
    if isinstance(inputs.get("attention_mask"), torch.Tensor):
        return "it does so only where there is no attention_mask; leave it out of packed batches"
    if (getattr(text_config, "use_cache", False) if uses_cache is None else uses_cache) and not is_flash:
        return "it does so only without a cache; set model.config.use_cache to False"
    if positions.dim() == 2 and "mrope_section" in (getattr(text_config, "rope_parameters", None) or {}):
        return "they are 2-D, and it takes the first of four axes of this model: text, time, height, width"
    return ""


def _begins(positions: torch.Tensor, slots: Sequence[Slot]) -> list[bool]:
    """Tell of each sample that follows another in its row whether positions begin again there."""
    rows = positions[0] if positions.dim() == 3 else positions.reshape(-1, positions.shape[-1])
    later = [slot for slot in slots if any(one.row == slot.row and one.start < slot.start for one in slots)]
    rows = rows.expand(max((slot.row for slot in slots), default=0) + 1, -1) if len(rows) == 1 else rows
    # transformers takes each step that is not 1 for the start of a sample.
    return [int(rows[slot.row, slot.start] - rows[slot.row, slot.start - 1]) != 1 for slot in later]
