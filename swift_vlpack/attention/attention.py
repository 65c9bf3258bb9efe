"""Attention that cannot cross the samples of a pack, on any device, without flash-attn and without an L x L mask.

Registered with transformers as `vlpack`. Where the row comes with `cu_seq_lens_q`, every sample gets what it would get
alone: its part of the model's mask and all that the layer asks for. Everywhere else (padded evaluation, generation, the
vision tower) it is transformers' own attention. Cost grows with the sum of the squared lengths, not with the square of
the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from swift_vlpack.attention.attention_args import asked_of, counted_in_samples, layer_name
from swift_vlpack.attention.masks import RowMask, SampleMask, of_block_mask, row_mask
from swift_vlpack.attention.row_kernels import CannotDo, RowKernel
from swift_vlpack.attention.samples import PackedRow, States, attend, check_mask, segments
from swift_vlpack.errors import AttentionError
from swift_vlpack.rows.families import text_config_of

NAME = "vlpack"
_kernels: WeakKeyDictionary[torch.nn.Module, RowKernel] = WeakKeyDictionary()
_recordings: list[list[PackedRow]] = []


def name_of(config: Any) -> str:
    """The attention implementation of the language model."""
    text = text_config_of(config)
    return str(getattr(text, "_attn_implementation", None) or config._attn_implementation)


def keeps_samples_apart(name: str) -> bool:
    """Whether this implementation is known to stop where samples meet: ours, and flash-attn in all its versions."""
    return name == NAME or "flash" in name


def register() -> None:
    """Make `attn_implementation="vlpack"` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, segmented_attention)
    AttentionMaskInterface.register(NAME, row_mask)


def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, num_heads, num_queries, head_dim)
    key: torch.Tensor,  # (batch, num_kv_heads, num_keys, head_dim)
    value: torch.Tensor,
    attention_mask: Any,
    cu_seq_lens_q: torch.Tensor | None = None,  # (num_samples + 1,)
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend inside each sample of a packed row; with no boundaries, attend as transformers does."""
    mask = of_block_mask(attention_mask, query.shape[2]) if hasattr(attention_mask, "mask_mod") else attention_mask
    is_text = _is_text(module, mask, kwargs)
    # Some vision towers are handed the boundaries of the text; theirs are others, and they are not causal.
    ends = boundaries_on_host(cu_seq_lens_q) if cu_seq_lens_q is not None and is_text is not False else ()
    if not ends or not _cover(ends, query, key):
        if ends and is_text:
            raise AttentionError(_of_another_row(module, ends, query, key))
        return _unpacked(module, (query, key, value), mask, kwargs), None
    check_mask(module, mask, query.shape[2])
    kwargs.pop("segment_ids", None)  # of `PackedCollator`: the boundaries in other words
    asked = asked_of(module, kwargs)
    query = counted_in_samples(module, query, ends)
    row = PackedRow(module, query, key, value, mask, kwargs.get("sliding_window"), asked, ends)
    for rows in _recordings:
        rows.append(row)
    try:
        return _kernels.get(module, segments)(row), None
    except CannotDo:
        return segments(row), None


def use_kernel(model: torch.nn.Module, kernel: RowKernel) -> None:
    """Compute packed rows of all layers of the model by this kernel, where it can do what a layer asks for."""
    for module in model.modules():
        _kernels[module] = kernel


@contextmanager
def recorded_rows() -> Iterator[list[PackedRow]]:
    """Collect every packed row that attention is called on meanwhile."""
    rows: list[PackedRow] = []
    _recordings.append(rows)
    try:
        yield rows
    finally:
        _recordings.pop()  # the innermost; by value another, as empty as this one, would be taken out


def _is_text(module: torch.nn.Module, mask: Any, options: dict[str, Any]) -> bool | None:
    """Whether the layer is one of a language model; None where neither it nor its mask says so."""
    if isinstance(mask, RowMask) and mask.looks_back:  # PaliGemma's layers say no, and its mask yes
        return True
    is_causal = options.get("is_causal")
    known: bool | None = getattr(module, "is_causal", None) if is_causal is None else is_causal
    return known


def boundaries_on_host(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """The boundaries as integers, copied from the device once for all layers of a forward pass."""
    known: tuple[int, ...] | None = getattr(cu_seqlens, "_vlpack_boundaries", None)
    if known is None:
        known = tuple(cu_seqlens.tolist())
        cu_seqlens._vlpack_boundaries = known  # type: ignore[attr-defined]
    return known


def _cover(ends: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the boundaries are those of this very row."""
    num_queries = query.shape[2]
    return len(ends) > 1 and query.shape[0] == 1 and ends[0] == 0 and ends[-1] == num_queries == key.shape[2]


def _of_another_row(module: torch.nn.Module, ends: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> str:
    rows, tokens, keys = query.shape[0], query.shape[2], key.shape[2]
    return (
        f"{layer_name(module)}: the boundaries cu_seq_lens_q go from {ends[0]} to {ends[-1]}, but the batch is {rows} "
        f"row(s) of {tokens} tokens with {keys} keys; a packed row has the boundaries of its own tokens and no cache. "
        "Give a padded batch without cu_seq_lens_q, and a pack as one row"
    )


def _unpacked(module: torch.nn.Module, states: States, mask: Any, options: dict[str, Any]) -> torch.Tensor:
    """Padded batches, generation, vision towers: transformers' sdpa, with what sdpa would drop."""
    whole = mask.whole() if isinstance(mask, RowMask) else mask
    asked = asked_of(module, options, strict=bool(_is_text(module, mask, options)))
    if not asked.is_plain:
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return attend(module, states, SampleMask(is_causal, None if whole is None else lambda: whole), asked)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    made: torch.Tensor = sdpa_attention_forward(module, *states, whole, **options)[0]
    return made
