"""Attention that cannot cross the samples of a pack, on any device, without flash-attn and without an L x L mask.

Registered with transformers as `vlpack`. Where the row comes with `cu_seq_lens_q` it walks the segments, each by
PyTorch's scaled dot-product attention; everywhere else (padded evaluation, the vision tower) it is transformers'
own sdpa with its mask. Cost grows with the sum of the squared lengths, not with the square of the sum.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

NAME = "vlpack"


def name_of(config: Any) -> str:
    """The attention implementation of the language model."""
    text = getattr(config, "text_config", config)
    return str(getattr(text, "_attn_implementation", None) or config._attn_implementation)


def keeps_samples_apart(name: str) -> bool:
    """Whether this implementation is known to stop where samples meet: ours, and flash-attn in all its versions."""
    return name == NAME or "flash" in name


def register() -> None:
    """Make `attn_implementation="vlpack"` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, segmented_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def segmented_attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, num_heads, num_queries, head_dim)
    key: torch.Tensor,  # (batch, num_kv_heads, num_keys, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,  # (num_samples + 1,)
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend inside each segment of a packed row; with no boundaries, attend as sdpa does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Some vision towers are handed the boundaries of the text; theirs are others, and they are not causal.
    is_text = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    ends = boundaries_on_host(cu_seq_lens_q) if cu_seq_lens_q is not None and is_text else None
    if ends is None or not _cover(ends, query, key):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for start, end in pairwise(ends):
        rows = slice(start, end)
        mask = _band(end - start, sliding_window, query)
        segment = (query[:, :, rows], key[:, :, rows], value[:, :, rows])
        outputs.append(sdpa_attention_forward(module, *segment, mask, **kwargs)[0])  # (1, length, num_heads, head_dim)
    return torch.cat(outputs, dim=1), None


def boundaries_on_host(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """The boundaries as integers, copied from the device once for all layers of a forward pass."""
    known: tuple[int, ...] | None = getattr(cu_seqlens, "_vlpack_boundaries", None)
    if known is None:
        known = tuple(cu_seqlens.tolist())
        cu_seqlens._vlpack_boundaries = known  # type: ignore[attr-defined]
    return known


def _cover(ends: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the boundaries are those of this very row: not so with a cache, or in a batch."""
    num_queries = query.shape[2]
    return len(ends) > 1 and query.shape[0] == 1 and ends[0] == 0 and ends[-1] == num_queries == key.shape[2]


def _band(length: int, sliding_window: int | None, query: torch.Tensor) -> torch.Tensor | None:
    """The causal mask of a window, for segments longer than it; shorter ones need none."""
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=query.device)
    behind = position[:, None] - position[None, :]
    return ((behind >= 0) & (behind < sliding_window))[None, None]
