"""Other ways than sample by sample. Each raises `CannotDo` where it does not know what a layer asks for.

`varlen` and `flex` need CUDA, on which they could not be tried: `choose_attention` compares them with the reference
before it uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from swift_vlpack.attention.groups import groups_of
from swift_vlpack.attention.samples import PackedRow, attend, segments

RowKernel = Callable[[PackedRow], torch.Tensor]
"""A row in, (1, num_tokens, num_heads, head_dim of values) out."""


class CannotDo(Exception):
    """The kernel does not know what is asked; `segments` does it instead. Says why."""


def grouped(row: PackedRow) -> torch.Tensor:
    """Samples of like length as one batch, padded on the right, which is behind all that a causal mask shows."""
    if row.asked.position_bias is not None:
        raise CannotDo("a bias belongs to the tokens of one sample")
    if any(not row.mask_of(*sample).is_of_positions for sample in pairwise(row.ends)):
        raise CannotDo("the mask is not causal, or depends on the tokens of a sample")
    groups = groups_of(row.ends, row.query.device)
    outputs = []
    for group in groups.groups:
        num_samples, longest = group.tokens.shape
        states = _batch(row.query, group.tokens), _batch(row.key, group.tokens), _batch(row.value, group.tokens)
        mask = row.mask_of(*group.samples[0])
        outputs.append(attend(row.module, states, mask, row.asked).view(num_samples, longest, row.query.shape[1], -1))
    return groups.in_row_order(outputs, dim=0)


def _batch(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # (num_samples, heads, longest, head_dim)
    chosen = states[0].index_select(1, tokens.flatten())
    return chosen.unflatten(1, tuple(tokens.shape)).transpose(0, 1)


def varlen(row: PackedRow) -> torch.Tensor:
    """PyTorch's variable-length flash attention, the whole row in one call."""
    from torch.nn.attention.varlen import varlen_attn

    window = _window_of_all(row)
    if not row.query.is_cuda:
        raise CannotDo(f"needs CUDA, the row is on {row.query.device.type}")
    if row.query.dtype not in (torch.float16, torch.bfloat16):
        raise CannotDo("computes in 16 bits")
    if not row.asked.is_plain or row.asked.position_bias is not None or row.asked.dropout:
        raise CannotDo("knows no sinks, soft cap, bias or dropout")
    longest = max(end - start for start, end in pairwise(row.ends))
    ends = _on_device(row.ends, row.query.device)
    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (row.query, row.key, row.value))
    made: Any = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=row.asked.scaling,
        window_size=(-1 if window is None else window - 1, 0),  # it counts the tokens behind
        enable_gqa=row.query.shape[1] != row.key.shape[1],
    )
    attended: torch.Tensor = made.unsqueeze(0)
    return attended


def flex(row: PackedRow) -> torch.Tensor:
    """PyTorch's compiled flex attention over a block mask of the row."""
    if not row.query.is_cuda:
        raise CannotDo(f"has no backward on {row.query.device.type}")
    return by_flex(row, _compiled_flex())


def by_flex(row: PackedRow, flex_attention: Any) -> torch.Tensor:
    """The same by a flex attention that is given, so that its result can be tried without CUDA."""
    from torch.nn.attention.flex_attention import AuxRequest

    if row.asked.position_bias is not None or row.asked.dropout:
        raise CannotDo("is not given bias or dropout")
    sinks = row.asked.sinks
    made, aux = flex_attention(
        row.query,
        row.key,
        row.value,
        score_mod=_capped(row.asked.softcap),
        block_mask=block_mask(row.ends, _window_of_all(row), row.query.device),
        scale=row.asked.scaling,
        enable_gqa=row.query.shape[1] != row.key.shape[1],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is not None:  # one more score in the sum of the softmax, of which nothing is taken
        share = torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype))
        made = made * share[..., None].to(made.dtype)
    attended: torch.Tensor = made.transpose(1, 2).contiguous()
    return attended


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=8)  # one a kind of layer
def block_mask(ends: tuple[int, ...], window: int | None, device: torch.device) -> Any:
    """Of the same sample, not behind, and in the window."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = torch.tensor([end - start for start, end in pairwise(ends)], device=device)
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

    def sees(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_seen = (sample[q_idx] == sample[kv_idx]) & (kv_idx <= q_idx)
        return is_seen if window is None else is_seen & (q_idx - kv_idx < window)

    return create_block_mask(sees, 1, None, ends[-1], ends[-1], device=device)


@cache
def _capped(softcap: float | None) -> Any:
    if softcap is None:
        return None
    return lambda score, batch_idx, head_idx, q_idx, kv_idx: softcap * torch.tanh(score / softcap)


@lru_cache(maxsize=8)
def _on_device(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _window_of_all(row: PackedRow) -> int | None:
    """The window that all samples have, of a row whose samples see their past and nothing else."""
    masks = [row.mask_of(*sample) for sample in pairwise(row.ends)]
    windows = {mask.window for mask in masks if mask.window is not None}
    if len(windows) > 1 or any(mask.window is None and not mask.is_causal for mask in masks):
        raise CannotDo("knows causal masks, with and without a window")
    return min(windows, default=None)


KERNELS = MappingProxyType({"segments": segments, "grouped": grouped, "varlen": varlen, "flex": flex})
"""By the name that `packing_attention` has for them."""
