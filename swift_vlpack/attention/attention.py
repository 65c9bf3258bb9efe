"""Attention that cannot cross the samples of a packed sequence: any device, no flash-attn, no L x L mask.

`register` adds it to the attention implementations of transformers, under the name `vlpack`. A layer calls it with the
boundaries of its sequence, and every sample is computed as if it were alone: with its part of the model's mask, and
with every argument of the layer (soft cap, sinks, bias).

>>> layer = torch.nn.Identity()
>>> query = key = value = torch.randn(1, 2, 5, 8)  # two heads, five tokens: a sample of three, a sample of two
>>> packed, _ = segmented_attention(layer, query, key, value, None, cu_seq_lens_q=torch.tensor([0, 3, 5]))
>>> alone, _ = segmented_attention(layer, *[one[:, :, 3:] for one in (query, key, value)], None)
>>> torch.equal(packed[:, 3:], alone)
True

Without boundaries (padded evaluation, generation, vision towers) transformers' own attention computes the call. The
cost grows with the sum of the squared lengths of samples, not with the square of the sequence's length. A call goes
through `packed_sequence` (collects its boundaries, mask and arguments) -> `kernels` (compute it; `choose_kernel` picks
the fastest kernel whose results are right).

Rows can share a prefix (`plan.boundaries`). Then each of its branches sees the prefix and itself, and gets what the row
would get alone:

>>> ends = torch.tensor([[0, 3, 4, 5], [-1, -1, 0, 0]])  # a prefix of three, two branches of one
>>> shared, _ = segmented_attention(layer, query, key, value, None, cu_seq_lens_q=ends)
>>> row = [one[:, :, [0, 1, 2, 4]] for one in (query, key, value)]  # the prefix and the second branch
>>> torch.allclose(shared[:, 4], segmented_attention(layer, *row, None)[0][:, 3], atol=1e-6)
True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from swift_vlpack.attention.kernels import Kernel, attend, by_first_able, segments
from swift_vlpack.attention.masks import SampleMask, SequenceMask, from_block_mask, sequence_mask
from swift_vlpack.attention.packed_sequence import (
    AttentionArgs,
    Bounds,
    PackedSequence,
    States,
    boundaries_of,
    check_mask,
    layer_name,
    rescaled_by_sample,
)
from swift_vlpack.errors import AttentionError
from swift_vlpack.rows.families import text_config_of

NAME = "vlpack"
# The kernel is looked up by layer, because transformers calls one function for all models and hands it only the layer.
_kernels: WeakKeyDictionary[torch.nn.Module, Kernel] = WeakKeyDictionary()
_kernels_of_branches: WeakKeyDictionary[torch.nn.Module, Kernel] = WeakKeyDictionary()
_recordings: list[list[PackedSequence]] = []


def name_of(config: Any) -> str:
    """Return the name of the attention implementation of the language model."""
    text = text_config_of(config)
    return str(getattr(text, "_attn_implementation", None) or config._attn_implementation)


def keeps_samples_apart(name: str) -> bool:
    """Tell whether an attention implementation stops at boundaries: `vlpack` does, and flash-attn in all versions."""
    return name == NAME or "flash" in name


def register() -> None:
    """Add `attn_implementation="vlpack"` to transformers, for all models of the process. Idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, segmented_attention)
    AttentionMaskInterface.register(NAME, sequence_mask)


def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, num_heads, num_queries, head_dim)
    key: torch.Tensor,  # (batch, num_kv_heads, num_keys, head_dim)
    value: torch.Tensor,
    attention_mask: Any,
    cu_seq_lens_q: torch.Tensor | None = None,  # (num_samples + 1,), or (2, num_segments + 1) with shared prefixes
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend inside each sample of a packed sequence; without boundaries, attend as transformers does."""
    mask = from_block_mask(attention_mask, query.shape[2]) if hasattr(attention_mask, "mask_mod") else attention_mask
    is_text = _is_text(module, mask, kwargs)
    # Some vision towers receive the boundaries of the text as well. Images end elsewhere, so these are ignored there;
    # a vision tower shows in `is_causal`, which is False.
    bounds = boundaries_of(cu_seq_lens_q) if cu_seq_lens_q is not None and is_text is not False else Bounds()
    ends = bounds.ends
    if not ends or not _cover(ends, query, key):
        if ends and is_text:
            raise AttentionError(_of_another_sequence(module, ends, query, key))
        return _unpacked(module, (query, key, value), mask, kwargs), None
    check_mask(module, mask, query.shape[2])
    kwargs.pop("segment_ids", None)  # from `PackedCollator`: the boundaries in another form
    args = AttentionArgs.of(module, kwargs)
    query = rescaled_by_sample(module, query, bounds)
    sequence = PackedSequence(module, query, key, value, mask, kwargs.get("sliding_window"), args, *bounds)
    for calls in _recordings:
        calls.append(sequence)
    kernels = _kernels_of_branches if bounds.parents else _kernels
    return by_first_able(kernels.get(module, segments), segments, sequence), None


def use_kernel(model: torch.nn.Module, kernel: Kernel, of_branches: Kernel = segments) -> None:
    """Compute packed sequences of a model by this kernel; `segments` computes layers that the kernel does not support.

    `of_branches` computes sequences in which rows share a prefix: give it only if it was tried on one.
    """
    for module in model.modules():
        _kernels[module] = kernel
        _kernels_of_branches[module] = of_branches


@contextmanager
def recorded_calls() -> Iterator[list[PackedSequence]]:
    """Collect every call of attention on a packed sequence, by any model, until the context ends."""
    calls: list[PackedSequence] = []
    _recordings.append(calls)
    try:
        yield calls
    finally:
        _recordings.pop()  # the innermost; `remove` would take out another list that is equal, because both are empty


def _is_text(module: torch.nn.Module, mask: Any, options: dict[str, Any]) -> bool | None:
    """Tell whether the layer belongs to a language model; None if neither the layer nor its mask shows it."""
    if isinstance(mask, SequenceMask) and mask.looks_back:  # PaliGemma's layers say no, and its mask says yes
        return True
    is_causal = options.get("is_causal")
    known: bool | None = getattr(module, "is_causal", None) if is_causal is None else is_causal
    return known


def _cover(ends: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> bool:
    """Tell whether the boundaries fit this call: one sequence, as long as the last boundary, without a cache."""
    num_queries = query.shape[2]
    return len(ends) > 1 and query.shape[0] == 1 and ends[0] == 0 and ends[-1] == num_queries == key.shape[2]


def _of_another_sequence(module: torch.nn.Module, ends: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> str:
    sequences, tokens, keys = query.shape[0], query.shape[2], key.shape[2]
    return (
        f"{layer_name(module)}: the boundaries cu_seq_lens_q go from {ends[0]} to {ends[-1]}, but the batch is "
        f"{sequences} sequence(s) of {tokens} tokens with {keys} keys; a packed sequence has the boundaries of its own "
        "tokens and no cache. Give a padded batch without cu_seq_lens_q, and a pack as one sequence"
    )


def _unpacked(module: torch.nn.Module, states: States, mask: Any, options: dict[str, Any]) -> torch.Tensor:
    """Attend as transformers' sdpa does; use `attend` for sinks, soft cap and bias, which sdpa would silently drop."""
    whole = mask.whole() if isinstance(mask, SequenceMask) else mask
    args = AttentionArgs.of(module, options, strict=bool(_is_text(module, mask, options)))
    if not args.is_plain:
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return attend(module, states, SampleMask(is_causal, None if whole is None else lambda: whole), args)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    made: torch.Tensor = sdpa_attention_forward(module, *states, whole, **options)[0]
    return made
