"""The attention of one packed row, sample by sample; other ways to the same are in `row_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from swift_vlpack.attention.attention_args import Asked, layer_name
from swift_vlpack.attention.masks import PAST, RowMask, SampleMask
from swift_vlpack.errors import AttentionError

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, each (batch, heads, tokens, head_dim)."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One call of attention on a packed row."""

    module: torch.nn.Module
    query: torch.Tensor  # (1, num_heads, num_tokens, head_dim)
    key: torch.Tensor  # (1, num_kv_heads, num_tokens, head_dim)
    value: torch.Tensor  # (1, num_kv_heads, num_tokens, head_dim of values)
    mask: RowMask | torch.Tensor | None
    window: int | None
    """Of a layer that has one and was given no mask."""
    asked: Asked
    ends: tuple[int, ...]

    def mask_of(self, start: int, end: int) -> SampleMask:
        """What the sample between these tokens may see."""
        if self.mask is None:
            return _band(end - start, self.window, self.query.device)
        if isinstance(self.mask, RowMask):
            return self.mask.of_sample(start, end)
        part = self.mask[:, :, start:end, start:end]
        return SampleMask(make=lambda: part)


def segments(row: PackedRow) -> torch.Tensor:  # (1, num_tokens, num_heads, head_dim of values)
    """One sample after the other."""
    outputs = []
    for start, end in pairwise(row.ends):
        states = row.query[:, :, start:end], row.key[:, :, start:end], row.value[:, :, start:end]
        outputs.append(attend(row.module, states, row.mask_of(start, end), row.asked.of_sample(start, end)))
    return torch.cat(outputs, dim=1)


def attend(
    module: torch.nn.Module, states: States, mask: SampleMask, asked: Asked
) -> torch.Tensor:  # (batch, num_tokens, num_heads, head_dim of values)
    """Attention without boundaries: transformers' own sdpa, or as its `eager` does it where sdpa cannot."""
    if not asked.is_plain:
        return eager(states, mask, asked, is_training=module.training)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    matrix = None if mask.matrix is None else mask.matrix.to(states[0].device)
    made: torch.Tensor = sdpa_attention_forward(
        module,
        *states,
        matrix,
        dropout=asked.dropout,
        scaling=asked.scaling,
        is_causal=mask.is_causal,
    )[0]
    return made


def eager(
    states: States, mask: SampleMask, asked: Asked, *, is_training: bool
) -> torch.Tensor:  # (batch, num_tokens, num_heads, head_dim of values)
    """The formula itself: scores, bias, soft cap, mask, sinks, softmax, dropout; keeps all scores."""
    query, key, value = states
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scaling = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    scores = query @ key.transpose(2, 3) * scaling
    if asked.softcap is not None:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    if asked.position_bias is not None:
        scores = scores + asked.position_bias
    scores = _masked(scores, mask)
    if asked.sinks is not None:
        sinks = asked.sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    # Half precision sums in single, as transformers does it.
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = functional.softmax(scores, dim=-1, dtype=precise).to(query.dtype)[..., : key.shape[2]]
    weights = functional.dropout(weights, p=asked.dropout, training=is_training)
    return (weights @ value).transpose(1, 2).contiguous()


def _masked(scores: torch.Tensor, mask: SampleMask) -> torch.Tensor:
    matrix = mask.matrix
    if matrix is None:
        if not mask.is_causal:
            return scores
        # Queries are the last of the keys, as with a cache.
        matrix = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    matrix = matrix.to(scores.device)
    if matrix.dtype == torch.bool:
        return scores.masked_fill(~matrix, torch.finfo(scores.dtype).min)
    return scores + matrix


def _band(length: int, window: int | None, device: torch.device) -> SampleMask:
    """Causal with a window; samples that fit into it need no matrix."""
    if window is None or length <= window:
        return PAST

    def make() -> torch.Tensor:
        position = torch.arange(length, device=device)
        behind = position[:, None] - position[None, :]
        return ((behind >= 0) & (behind < window))[None, None]

    return SampleMask(make=make, is_of_positions=True, window=window)


def check_mask(module: torch.nn.Module, mask: Any, num_tokens: int) -> None:
    """Refuse a mask that cannot be cut into those of the samples."""
    if mask is None or isinstance(mask, RowMask):
        return
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[-2:] == (num_tokens, num_tokens):
        return
    kind = type(mask).__name__
    if hasattr(mask, "shape"):
        kind += f" {tuple(mask.shape)}"
    raise AttentionError(
        f"{layer_name(module)} was given an attention mask that packing does not know ({kind}) for a row of "
        f"{num_tokens} tokens; give none, or one of shape (1, 1, {num_tokens}, {num_tokens})"
    )
