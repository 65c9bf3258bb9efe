"""Ways to train prefixes and their branches wrongly. Each is what a kernel, a template or a reader could really do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers as T

from swift_vlpack.attention.attention import segmented_attention
from swift_vlpack.attention.packed_sequence import tensor_of
from swift_vlpack.plan.boundaries import ROOT, Boundaries
from swift_vlpack.proof.branches import boundaries_of
from swift_vlpack.proof.runner import Collated, Runner
from swift_vlpack.rows.samples import Encoded
from tests.attention.one_by_one import text
from tests.host.proof.runners import text_model, with_inputs

WINDOW = 12


def mistral() -> Runner:
    """A sliding window in each layer, shorter than a prefix with a branch."""
    return text_model(T.MistralConfig(**text(sliding_window=WINDOW)))


# -- attention ---------------------------------------------------------------------------------------------------------


def where_shared(wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Only in sequences with prefixes; the vision tower, and samples alone, as they should be."""

    def attend(*args: Any, cu_seq_lens_q: Any = None, **options: Any) -> Any:
        if cu_seq_lens_q is None or cu_seq_lens_q.dim() == 1:
            return segmented_attention(*args, cu_seq_lens_q=cu_seq_lens_q, **options)
        return wrong(args, cu_seq_lens_q, options)

    return attend


@where_shared
def seeing_siblings(args: Any, ends: Any, options: Any) -> Any:
    """A unit is read as one sample: the forks are lost."""
    is_branch = ends[1, 1:] != ROOT
    is_kept = torch.cat([torch.tensor([True]), ~is_branch[1:], torch.tensor([True])])
    return segmented_attention(*args, cu_seq_lens_q=ends[0][is_kept], **options)


@where_shared
def not_seeing_prefixes(args: Any, ends: Any, options: Any) -> Any:
    """The second line is not read: a branch is a sample of its own."""
    return segmented_attention(*args, cu_seq_lens_q=ends[0].contiguous(), **options)


@where_shared
def counting_prefixes_twice(args: Any, ends: Any, options: Any) -> Any:
    """The keys of a prefix are there for the unit, and once more for the branch."""
    return by_weights(args, ends, options, lambda own, at: 1.0 + (own[:, None] != own[None]).float())


@where_shared
def windows_over_siblings(args: Any, ends: Any, options: Any) -> Any:
    """A window is counted in the sequence, where siblings lie between a branch and its prefix."""
    return by_weights(args, ends, options, lambda own, at: (at[:, None] - at[None] < WINDOW).float())


@where_shared
def leaving_later_branches_out_of_the_backward(args: Any, ends: Any, options: Any) -> Any:
    """Right forwards; backwards a prefix gets the gradient of its first branch only."""
    module, q, k, v, *others = args
    made, _ = segmented_attention(module, q, k, v, *others, cu_seq_lens_q=ends, **options)
    blind, _ = segmented_attention(module, q, k.detach(), v.detach(), *others, cu_seq_lens_q=ends, **options)
    parents = ends[1, 1:]
    is_later = (parents != ROOT) & (parents == parents.roll(1))
    of_tokens = is_later.repeat_interleave(ends[0].diff())
    return torch.where(of_tokens[:, None, None], blind, made), None


def by_weights(args: Any, ends: Any, options: Any, weigh: Callable[..., torch.Tensor]) -> Any:
    """Attention by a whole matrix; `weigh` says how much each key counts, by segments and by places."""
    _, q, k, v, *_ = args
    boundaries = Boundaries(tuple(ends[0].diff().tolist()), tuple(ends[1, 1:].tolist()))
    own = torch.tensor(boundaries.segment_ids())
    parent = torch.tensor([ROOT, *boundaries.parents])[own] + 1
    at = torch.arange(len(own))
    sees = ((own[:, None] == own[None]) | (parent[:, None] == own[None])) & (at[:, None] >= at[None])
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    scores = (q @ k.transpose(2, 3)) * options["scaling"]
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1) * weigh(own, at)
    weights = (weights / weights.sum(-1, keepdim=True)).to(v.dtype)
    return (weights @ v).transpose(1, 2).contiguous(), None


# -- sequences ---------------------------------------------------------------------------------------------------------


def segments(samples: Sequence[Encoded]) -> Iterator[tuple[int, int, slice]]:
    """The number of each segment, that of its prefix, and its tokens."""
    boundaries = boundaries_of(samples)
    ends = boundaries.cu_seqlens
    for number, parent in enumerate(boundaries.parents):
        yield number, parent, slice(ends[number], ends[number + 1])


def positions_over_siblings(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """Positions of a branch go on from the branch before it."""
    positions, before = row.inputs["position_ids"].clone(), 0
    for number, parent, tokens in segments(samples):
        before = 0 if parent in (ROOT, number - 1) else before
        positions[..., tokens] += before
        before += tokens.stop - tokens.start
    return with_inputs(row, position_ids=positions)


def branches_one_late(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """Positions of a branch begin one after the next of its prefix."""
    positions = row.inputs["position_ids"].clone()
    for _, parent, tokens in segments(samples):
        positions[..., tokens] += parent != ROOT
    return with_inputs(row, position_ids=positions)


def targets_at_forks(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """The first token of a branch is learnt, by the last one of the branch before it."""
    assert row.labels is not None
    labels = row.labels.clone()
    for _, parent, tokens in segments(samples):
        if parent != ROOT:
            labels[0, tokens.start] = row.inputs["input_ids"][0, tokens.start]
    return replace(row, labels=labels)


def prefix_of_another(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """The branches of the last unit follow the prefix of the first."""
    boundaries = boundaries_of(samples)
    if len(set(boundaries.parents)) < 3:
        return row
    wrong = tensor_of(boundaries)
    wrong[1][wrong[1] == max(boundaries.parents)] = min(parent for parent in boundaries.parents if parent != ROOT)
    return with_inputs(row, cu_seq_lens_q=wrong, cu_seq_lens_k=wrong)


def prefixes_lost(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """Boundaries without their second line."""
    ends = row.inputs["cu_seq_lens_q"]
    flat = ends[0].contiguous() if ends.dim() == 2 else ends
    return with_inputs(row, cu_seq_lens_q=flat, cu_seq_lens_k=flat)
