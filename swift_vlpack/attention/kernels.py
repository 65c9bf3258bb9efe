"""Compute attention on a packed sequence: sample by sample (`segments`), or faster where a kernel supports the layer.

Every kernel takes a `PackedSequence` and returns (1, num_tokens, num_heads, head_dim of values). It raises `CannotDo`
for a layer that it does not support; `segments` supports every layer. `varlen` and `flex` need CUDA, and our tests run
without CUDA. So `choose_kernel` compares them with the reference on the device of the run before it uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from swift_vlpack.attention.masks import SampleMask
from swift_vlpack.attention.packed_sequence import (
    AttentionArgs,
    Bounds,
    PackedSequence,
    States,
    by_token,
    groups_of,
    segments_of,
    similar_samples,
    to_device,
)
from swift_vlpack.plan.boundaries import ROOT

Kernel = Callable[[PackedSequence], torch.Tensor]

BYTES_OF_CALL, BYTES_OF_EAGER_CALL = 50e3, 100e3
"""Price on a CPU of one call of attention on a short sample, as the number of bytes of query, key and value that could
be copied in the same time (gradients included on both sides): of sdpa and of `eager`, measured on one thread with 8 to
128 tokens, 4 and 16 heads, fp32 and bf16. On other devices `choose_kernel` measures it before step 1."""


class CannotDo(Exception):
    """A kernel does not support what a layer asks for; `segments` computes it instead. The message says why."""


def segments(sequence: PackedSequence) -> torch.Tensor:
    """Compute one sample after the other. A branch gets the keys of its prefix before its own keys."""
    outputs = []
    lengths = [segment.num_own for segment in sequence.segments]
    # Split once instead of slicing for every sample: the gradient of each slice would be as long as the sequence.
    query, key, value = (states.split(lengths, dim=2) for states in (sequence.query, sequence.key, sequence.value))
    if sequence.parents:
        key, value = (_after_prefixes(parts, sequence.parents) for parts in (key, value))
    for segment, states in zip(sequence.segments, zip(query, key, value, strict=True), strict=True):
        mask, args = sequence.mask_of(segment), sequence.args.for_sample(segment)
        outputs.append(attend(sequence.module, states, mask, args))
    return torch.cat(outputs, dim=1)


def _after_prefixes(parts: Sequence[torch.Tensor], parents: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the keys of every segment. One at a time, so that without gradients only one copy of a prefix is alive."""
    for part, parent in zip(parts, parents, strict=True):
        yield part if parent == ROOT else torch.cat([parts[parent], part], dim=2)


def attend(
    module: torch.nn.Module, states: States, mask: SampleMask, args: AttentionArgs
) -> torch.Tensor:  # (batch, num_tokens, num_heads, head_dim of values)
    """Compute attention without boundaries: by transformers' sdpa, or by `eager` for arguments that sdpa lacks."""
    if not args.is_plain:
        return eager(states, mask, args, is_training=module.training)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    matrix = None if mask.matrix is None else mask.matrix.to(states[0].device)
    made: torch.Tensor = sdpa_attention_forward(
        module,
        *states,
        matrix,
        dropout=args.dropout,
        scaling=args.scaling,
        is_causal=mask.is_causal,
    )[0]
    return made


def eager(
    states: States, mask: SampleMask, args: AttentionArgs, *, is_training: bool
) -> torch.Tensor:  # (batch, num_tokens, num_heads, head_dim of values)
    """Compute the formula itself: scores, bias, soft cap, mask, sinks, softmax, dropout. Keeps all scores in memory."""
    query, key, value = states
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scaling = query.shape[-1] ** -0.5 if args.scaling is None else args.scaling
    scores = query @ key.transpose(2, 3) * scaling
    if args.softcap is not None:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    if args.position_bias is not None:
        scores = scores + args.position_bias
    scores = _masked(scores, mask)
    if args.sinks is not None:
        sinks = args.sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    # In half precision the softmax is computed in float32, as in transformers.
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = functional.softmax(scores, dim=-1, dtype=precise).to(query.dtype)[..., : key.shape[2]]
    weights = functional.dropout(weights, p=args.dropout, training=is_training)
    return (weights @ value).transpose(1, 2).contiguous()


def _masked(scores: torch.Tensor, mask: SampleMask) -> torch.Tensor:
    matrix = mask.matrix
    if matrix is None:
        if not mask.is_causal:
            return scores
        # With a cache there are fewer queries than keys; the queries are the last tokens.
        matrix = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        matrix = matrix.tril(scores.shape[-1] - scores.shape[-2])
    matrix = matrix.to(scores.device)
    if matrix.dtype == torch.bool:
        return scores.masked_fill(~matrix, torch.finfo(scores.dtype).min)
    return scores + matrix


def grouped(sequence: PackedSequence) -> torch.Tensor:
    """Compute samples of similar length as one batch.

    The batch is padded on the right, so a causal mask hides the padding from every real token.
    """
    if sequence.args.position_bias is not None:
        raise CannotDo("a bias belongs to the tokens of one sample")
    if any(not sequence.mask_of(segment).is_of_positions for segment in sequence.segments):
        raise CannotDo("the mask is not causal, or depends on the tokens of a sample")
    groups = groups_of(sequence.bounds, sequence.query.device)
    of_queries, of_keys = ([getattr(group, name) for group in groups.groups] for name in ("tokens", "keys"))
    batches = (
        _batches(sequence.query, groups.tokens, of_queries),
        _batches(sequence.key, groups.keys, of_keys),
        _batches(sequence.value, groups.keys, of_keys),
    )
    outputs = []
    for group, query, key, value in zip(groups.groups, *batches, strict=True):
        mask = sequence.mask_of(group.samples[0])
        outputs.append(attend(sequence.module, (query, key, value), mask, sequence.args))
    return groups.in_sequence_order(outputs, dim=0)


def _batches(states: torch.Tensor, tokens: torch.Tensor, of_groups: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    # Copy all tokens once and split the copy by group: a copy for each group would have a gradient as long as the
    # sequence every time.
    copies = states[0].transpose(0, 1).index_select(0, tokens).split([group.numel() for group in of_groups])
    for copy, group in zip(copies, of_groups, strict=True):
        yield copy.unflatten(0, tuple(group.shape)).transpose(1, 2)  # (num_samples, num_heads, longest, head_dim)


def by_lengths(sequence: PackedSequence, bytes_of_call: float | None = None) -> torch.Tensor:
    """Compute by `grouped` where many short samples make it quicker, else by `segments`."""
    return grouped(sequence) if saves_calls(sequence, bytes_of_call) else segments(sequence)


def saves_calls(sequence: PackedSequence, bytes_of_call: float | None = None) -> bool:
    """Tell whether the calls that `grouped` saves take longer than the copy of all tokens that it needs."""
    worth = bytes_of_call or (BYTES_OF_CALL if sequence.args.is_plain else BYTES_OF_EAGER_CALL)
    num_bytes = sum(one.nbytes for one in (sequence.query, sequence.key, sequence.value))
    return (len(sequence.segments) - len(similar_samples(sequence.bounds))) * worth > num_bytes


def by_first_able(first: Kernel, second: Kernel, sequence: PackedSequence) -> torch.Tensor:
    """Compute by the first of two kernels, and what it does not support by the second."""
    try:
        return first(sequence)
    except CannotDo:
        return second(sequence)


def varlen(sequence: PackedSequence) -> torch.Tensor:
    """Compute the whole sequence in one call of PyTorch's variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    window = _common_window(sequence)
    if not sequence.query.is_cuda:
        raise CannotDo(f"needs CUDA, the sequence is on {sequence.query.device.type}")
    if sequence.query.dtype not in (torch.float16, torch.bfloat16):
        raise CannotDo("computes in 16 bits: --torch_dtype bfloat16")
    if sequence.args.dropout:
        raise CannotDo("knows no dropout: attention_dropout 0 in the model's config")
    if not sequence.args.is_plain:
        raise CannotDo("knows no sinks, soft cap or bias")
    states = (sequence.query, sequence.key, sequence.value)
    query, key, value = (one[0].transpose(0, 1).contiguous() for one in states)
    ends, ends_of_keys, keys = _ends_and_keys(sequence.bounds, query.device)
    if keys is not None:  # where queries are fewer than keys, they are the last ones here
        key, value = key.index_select(0, keys), value.index_select(0, keys)
    made: Any = varlen_attn(
        query,
        key,
        value,
        ends,
        ends_of_keys,
        max(segment.num_own for segment in sequence.segments),
        max(segment.num_keys for segment in sequence.segments),
        scale=sequence.args.scaling,
        window_size=(-1 if window is None else window - 1, 0),  # the window without the token itself
        enable_gqa=sequence.query.shape[1] != sequence.key.shape[1],
    )
    attended: torch.Tensor = made.unsqueeze(0)
    return attended


def flex(sequence: PackedSequence) -> torch.Tensor:
    """Compute the whole sequence by PyTorch's compiled flex attention with a block mask."""
    if not sequence.query.is_cuda:
        raise CannotDo(f"has no backward on {sequence.query.device.type}")
    return by_flex(sequence, _compiled_flex())


def by_flex(sequence: PackedSequence, flex_attention: Any) -> torch.Tensor:
    """Compute `flex` with the given flex attention function, so that tests can run it without CUDA."""
    from torch.nn.attention.flex_attention import AuxRequest

    args = sequence.args
    if args.position_bias is not None or args.dropout:
        raise CannotDo("is not given bias or dropout")
    made, aux = flex_attention(
        sequence.query,
        sequence.key,
        sequence.value,
        score_mod=_capped(args.softcap, sequence.query.device),
        block_mask=block_mask(sequence.bounds, _common_window(sequence), sequence.query.device),
        scale=args.scaling,
        enable_gqa=sequence.query.shape[1] != sequence.key.shape[1],
        return_aux=AuxRequest(lse=args.sinks is not None),
    )
    if args.sinks is not None:  # a sink is one more score in the sum of the softmax, without a value
        share = torch.sigmoid(aux.lse - args.sinks[:, None].to(aux.lse.dtype))
        made = made * share[..., None].to(made.dtype)
    attended: torch.Tensor = made.transpose(1, 2).contiguous()
    return attended


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=8)  # a model has few kinds of layers, and each kind needs one
def block_mask(bounds: Bounds, window: int | None, device: torch.device) -> Any:
    """Make flex attention's mask: the same sample or its prefix, causal, within the window of the row alone."""
    from torch.nn.attention.flex_attention import create_block_mask

    segments = segments_of(bounds)
    sample = by_token(torch.arange(len(segments), device=device), [segment.num_own for segment in segments])
    if bounds.parents:
        numbers = [number if parent == ROOT else parent for number, parent in enumerate(bounds.parents)]
        prefix = to_device(numbers, device)[sample]
        # For each token, how much farther it lies from its prefix here than in its row alone.
        shift = to_device([one.start - one.num_prefix - one.prefix_start for one in segments], device)[sample]

    def sees(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_seen = (sample[q_idx] == sample[kv_idx]) & (kv_idx <= q_idx)
        return is_seen if window is None else is_seen & (q_idx - kv_idx < window)

    def sees_prefix_too(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_of_prefix = (prefix[q_idx] == sample[kv_idx]) & (sample[q_idx] != sample[kv_idx])
        if window is not None:
            is_of_prefix = is_of_prefix & (q_idx - shift[q_idx] - kv_idx < window)
        return is_of_prefix | sees(batch_idx, head_idx, q_idx, kv_idx)

    num_tokens = bounds.ends[-1]
    seen = sees_prefix_too if bounds.parents else sees
    return create_block_mask(seen, 1, None, num_tokens, num_tokens, device=device)


@cache
def _capped(softcap: float | None, device: torch.device) -> Any:
    if softcap is None:
        return None
    cap = torch.full((), softcap, device=device)  # a tensor: compiled for any length, flex takes no float from outside
    return lambda score, batch_idx, head_idx, q_idx, kv_idx: cap * torch.tanh(score / cap)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _ends_and_keys(bounds: Bounds, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return where segments end, where their keys do, and the keys end to end, as indices; None if keys are tokens."""
    ends = to_device(np.array(bounds.ends, np.int32), device)
    if not bounds.parents:
        return ends, ends, None
    segments = segments_of(bounds)
    ends_of_keys = np.cumsum([0, *(one.num_keys for one in segments)], dtype=np.int32)
    keys = np.concatenate([np.r_[one.prefix_start : one.prefix_end, one.start : one.end] for one in segments])
    return ends, to_device(ends_of_keys, device), to_device(keys, device)


def _common_window(sequence: PackedSequence) -> int | None:
    """Return the window that all samples share. Raises `CannotDo` unless all masks are causal, with or without it."""
    masks = [sequence.mask_of(segment) for segment in sequence.segments]
    windows = {mask.window for mask in masks if mask.window is not None}
    if len(windows) > 1 or any(mask.window is None and not mask.is_causal for mask in masks):
        raise CannotDo("knows causal masks, with and without a window")
    return min(windows, default=None)


KERNELS = MappingProxyType({"segments": segments, "grouped": grouped, "varlen": varlen, "flex": flex})
"""Kernels by their names in `packing_attention`."""
