"""Collect what one call of attention on a packed sequence needs: its boundaries and the layer's arguments.

>>> boundaries_of(torch.tensor([0, 3, 5]))
Bounds(ends=(0, 3, 5), parents=())
>>> [group.tokens.tolist() for group in groups_of(Bounds((0, 2, 3, 5)), torch.device("cpu")).groups]
[[[0, 1], [3, 4]], [[2]]]

Boundaries reach attention as the keyword `cu_seq_lens_q`, which transformers hands to every layer. A keyword, and not
a global, because gradient checkpointing runs a layer a second time after the forward is over, and because a process
may train more than one model. If rows share a prefix, the tensor has a second line. A kernel that expects flat
boundaries then fails at its shape, instead of computing something wrong:

>>> boundaries_of(tensor_of(Boundaries((3, 2, 1), parents=(-1, 0, 0))))
Bounds(ends=(0, 3, 5, 6), parents=(-1, 0, 0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from swift_vlpack.attention.masks import SampleMask, Segment, SequenceMask, past, prefix_sees
from swift_vlpack.errors import AttentionError
from swift_vlpack.plan.boundaries import ROOT, Boundaries

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, each (batch, heads, tokens, head_dim)."""

_KNOWN = ("scaling", "dropout", "softcap", "s_aux", "position_bias")
_ABOUT_THE_SEQUENCE = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # other forms of the boundaries
    *("position_ids", "cache_position", "position_embeddings"),  # already in the query and the key
    *("token_type_ids", "mm_token_type_ids"),  # already in the mask, of models that see images as blocks
    *("num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "use_cache", "return_dict"),
    *("device", "output_hidden_states", "output_router_logits", "deterministic"),
    *("is_causal", "sliding_window"),  # read by the caller, beside the mask
)
"""Keywords that may be ignored: they reach every layer, and do not change which tokens see each other. Any other
unknown keyword is an error, because it may ask for something that would silently be dropped."""

T = TypeVar("T")
ON_HOST = "cpu"
"""The device whose tensors are read without waiting."""
LEAST_SHARE = 0.8
"""Samples of a group are at least this long, as a share of the longest sample of the group. So at most a fifth of a
batch is padding."""


class KnownOfTensors(Generic[T]):
    """Keep facts about tensors, so that their device is not asked. Changing a tensor in place drops its fact."""

    def __init__(self) -> None:
        self._facts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __setitem__(self, tensor: torch.Tensor, fact: T) -> None:
        self._facts[tensor] = fact, _version(tensor)

    def has_moved(self, value: Any, fact: T | None) -> None:
        """Keep a fact for the copy of a tensor on a device. On the CPU it may be another one, which is free to read."""
        if fact is not None and isinstance(value, torch.Tensor) and value.device.type != ON_HOST:
            self[value] = fact

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return what was said of this tensor as it is now, if anything was."""
        fact, version = self._facts.get(tensor, (None, None))
        return fact if version == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class Bounds(NamedTuple):
    """The boundaries of a sequence: `plan.boundaries.Boundaries` as attention reads them, layer after layer."""

    ends: tuple[int, ...] = ()  # (num_segments + 1,): 0, then the end of each segment
    parents: tuple[int, ...] = ()  # (num_segments,): the number of its prefix, or ROOT; empty if no segment has one


# The host's copy of boundaries, because `tolist()` waits for the device. The tensor is the key, because no other object
# of a forward reaches every layer, also when checkpointing runs a layer again after the forward is over. Weak, so that
# nothing outlives the batch; and not an attribute of the tensor, because the tensor is not ours.
known_bounds: KnownOfTensors[Bounds] = KnownOfTensors()


def tensor_of(boundaries: Boundaries) -> torch.Tensor:  # (num_segments + 1,), or (2, num_segments + 1) with prefixes
    """Return the tensor `cu_seq_lens_q` of a sequence: ends of segments, and their prefixes if there are any."""
    lines = (boundaries.cu_seqlens, (ROOT, *boundaries.parents))
    return torch.tensor(lines if boundaries.parents else lines[0], dtype=torch.int32)


def boundaries_of(cu_seqlens: torch.Tensor) -> Bounds:
    """Return the boundaries as integers, as the batch kept them on the host; else read from the device once a forward.

    This is the one place where attention learns the shape of a sequence. Sequence parallelism will look up the
    boundaries of the whole sequence for a rank that holds a slice of it: callers ask per sequence, never per rank.
    """
    known = known_bounds.get(cu_seqlens)
    if known is None:
        known = _forest(*cu_seqlens.tolist()) if cu_seqlens.ndim == 2 else Bounds(tuple(cu_seqlens.tolist()))
        known_bounds[cu_seqlens] = known
    return known


def to_device(numbers: Sequence[int] | np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to a device without waiting for it, as `torch.tensor(..., device=device)` would."""
    # CUDA has copied pageable memory when the call returns; other devices do not promise that.
    made = torch.as_tensor(numbers if isinstance(numbers, np.ndarray) else np.array(numbers, np.int64))
    return made.to(device, non_blocking=device.type == "cuda")


def by_token(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:  # (sum(lengths),)
    """Repeat the value of each segment for every token of it; without the size, the device would have to be asked."""
    return values.repeat_interleave(to_device(lengths, values.device), output_size=sum(lengths))


def _forest(ends: list[int], parents: list[int]) -> Bounds:
    """Check the boundaries of a sequence with prefixes. Raises `BoundaryError` for another shape than depth one."""
    checked = Boundaries(tuple(end - start for start, end in pairwise(ends)), tuple(parents[1:]))
    return Bounds(tuple(ends), checked.parents)


@lru_cache(maxsize=8)  # shared by the layers of a forward
def segments_of(bounds: Bounds) -> tuple[Segment, ...]:
    """Return the tokens of every segment, with those of its prefix."""
    flat = [Segment(*tokens) for tokens in pairwise(bounds.ends)]
    return tuple(
        flat[number] if parent == ROOT else Segment(*flat[number][:2], *flat[parent][:2])
        for number, parent in enumerate(bounds.parents or [ROOT] * len(flat))
    )


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """Arguments that a layer passes to attention besides query, key, value and mask; None if it does not use one."""

    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (num_heads,)
    position_bias: torch.Tensor | None = None  # (1, num_heads, num_queries, num_keys)

    @classmethod
    def of(cls, module: torch.nn.Module, options: dict[str, Any], *, strict: bool = True) -> AttentionArgs:
        """Read the keywords of a call. If `strict`, raise `AttentionError` for an unknown keyword that has a value."""
        for name, value in options.items() if strict else ():
            if name not in _KNOWN and name not in _ABOUT_THE_SEQUENCE and value is not None and value is not False:
                raise AttentionError(_refusal(module, name, value))
        return cls(
            scaling=options.get("scaling"),
            dropout=float(options.get("dropout") or 0.0),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
            position_bias=options.get("position_bias"),
        )

    @property
    def is_plain(self) -> bool:
        """Tell whether sdpa of every supported version of transformers supports these arguments."""
        return self.softcap is None and self.sinks is None and self.position_bias is None

    def for_sample(self, segment: Segment) -> AttentionArgs:
        """Return the arguments for the tokens of one sample."""
        if self.position_bias is None:
            return self
        return replace(self, position_bias=part_of(self.position_bias, segment, "bias"))


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One call of attention on a packed sequence: the input of every kernel in `kernels`."""

    module: torch.nn.Module
    query: torch.Tensor  # (1, num_heads, num_tokens, head_dim)
    key: torch.Tensor  # (1, num_kv_heads, num_tokens, head_dim)
    value: torch.Tensor  # (1, num_kv_heads, num_tokens, head_dim of values)
    mask: SequenceMask | torch.Tensor | None
    window: int | None
    """Sliding window of a layer that has one and was given no mask."""
    args: AttentionArgs
    ends: tuple[int, ...]  # (num_segments + 1,): 0, then the end of each segment
    parents: tuple[int, ...] = ()  # (num_segments,): the number of its prefix, or ROOT; empty if no segment has one

    @property
    def bounds(self) -> Bounds:
        """Return the boundaries as one value."""
        return Bounds(self.ends, self.parents)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that are computed one by one: samples, prefixes and branches."""
        return segments_of(self.bounds)

    def mask_of(self, segment: Segment) -> SampleMask:
        """Return the mask of a segment in its row alone."""
        if self.mask is None:
            return past(segment, self.window, self.query.device)
        if isinstance(self.mask, SequenceMask):
            return self.mask.of_sample(*segment)
        part = part_of(self.mask, segment, "mask")
        if segment.num_prefix:
            _check_prefix_is_blind(self.mask, segment)
        return SampleMask(make=lambda: part)


def part_of(matrix: torch.Tensor, segment: Segment, name: str) -> torch.Tensor:  # (..., num_own, num_keys)
    """Cut the matrix of a segment, as its row alone would have it, out of the matrix of all tokens.

    In the sequence other branches may lie between a branch and its prefix, so its distances are too large there. A
    branch therefore gets the part of one that follows its prefix directly. That is right if the matrix depends on
    distances only. To check it, the part of the branch against itself must be equal in both places. Raises
    `AttentionError` if it is not.
    """
    start, end, prefix_start, prefix_end = segment
    own = matrix[..., start:end, start:end]
    if not segment.num_prefix:
        return own
    followed = slice(prefix_end, prefix_end + segment.num_own)
    part = matrix[..., followed, prefix_start : prefix_end + segment.num_own]
    if not torch.equal(part[..., segment.num_prefix :], own):
        raise AttentionError(
            f"the model's attention has a {name} {tuple(matrix.shape)} that depends on where in the sequence a branch "
            f"lies (tokens {start} to {end}), and packing does not know what its row would have alone; set "
            "packing_share=none"
        )
    return part


def _check_prefix_is_blind(mask: torch.Tensor, segment: Segment) -> None:
    """Raise `AttentionError` if the tokens of a prefix see tokens of a branch."""
    seen = mask[..., segment.prefix_start : segment.prefix_end, segment.start : segment.end]
    if bool((seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2).any()):
        raise AttentionError(prefix_sees(segment))


def check_mask(module: torch.nn.Module, mask: Any, num_tokens: int) -> None:
    """Raise `AttentionError` for a mask that cannot be cut into the masks of the samples."""
    if mask is None or isinstance(mask, SequenceMask):
        return
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[-2:] == (num_tokens, num_tokens):
        return
    kind = type(mask).__name__
    if hasattr(mask, "shape"):
        kind += f" {tuple(mask.shape)}"
    raise AttentionError(
        f"{layer_name(module)} was given an attention mask that packing does not know ({kind}) for a sequence of "
        f"{num_tokens} tokens; give none, or one of shape (1, 1, {num_tokens}, {num_tokens})"
    )


def layer_name(module: torch.nn.Module) -> str:
    """Return the name of a layer for error messages.

    >>> layer_name(torch.nn.Identity())
    'Identity'
    """
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if number is None else f" of layer {number}")


def _refusal(module: torch.nn.Module, name: str, value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind += f" {tuple(value.shape)}"
    if name == "output_attentions":
        return f"{layer_name(module)}: packed attention keeps no matrix of weights; leave output_attentions unset"
    return (
        f"{layer_name(module)} asks its attention for {name!r} ({kind}), which packing does not know and will not "
        "drop; train without packing, or with --attn_impl flash_attn where the model supports it, and report the model"
    )


def rescaled_by_sample(module: Any, query: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """Correct the query of layers that scale it by the position of its token (Llama 4); return any other unchanged.

    The layer has already multiplied the query by a temperature, which grows with the token's number in the sequence.
    Alone, a sample counts its tokens from its own start, and a branch continues the count of its prefix.
    """
    ends = bounds.ends
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    if ends[-1] < module.floor_scale or len(ends) == 2:
        return query
    factor = _correction(bounds, query.device, module.floor_scale, module.attn_scale)
    return (query * factor[:, None]).to(query.dtype)


@lru_cache(maxsize=8)  # shared by the layers of a forward
@torch.inference_mode(False)  # an evaluation may make it, and training needs it for a backward
def _correction(bounds: Bounds, device: torch.device, floor_scale: float, attn_scale: float) -> torch.Tensor:
    """Return Llama 4's temperature of each token in its sample, as a share of that in the sequence."""
    in_sample = np.concatenate([np.arange(one.num_prefix, one.num_keys) for one in segments_of(bounds)])
    positions = to_device(np.stack([in_sample, np.arange(bounds.ends[-1])]), device)
    temperature = torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    return temperature[0] / temperature[1]


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that are computed as one batch, padded on the right to the longest sample.

    Branches are samples, too; all prefixes in a group are equally long. The keys of a branch are those of its row
    alone. Padding after a branch lies behind every query, so a causal mask hides it.
    """

    samples: tuple[Segment, ...]
    """Tokens of each sample, the longest first."""
    tokens: torch.Tensor  # (num_samples, longest): index into the sequence; padding repeats the sample's last token
    keys: torch.Tensor  # (num_samples, num_prefix + longest): `tokens`, after those of the prefix if there is one


@dataclass(frozen=True, slots=True)
class Groups:
    """All samples of a sequence, each in one group."""

    groups: tuple[Group, ...]
    tokens: torch.Tensor  # indices into the sequence, of all groups end to end
    keys: torch.Tensor  # the keys of all groups, end to end
    places: torch.Tensor  # (num_tokens,): index of each token of the sequence in the groups' tokens, end to end

    def in_sequence_order(self, outputs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Join the outputs of the groups, (num_samples, longest, ...) each, into one sequence; add `dim` of size 1."""
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, self.places).unsqueeze(dim)


@lru_cache(maxsize=8)  # shared by the layers of a forward
@torch.inference_mode(False)
def groups_of(bounds: Bounds, device: torch.device) -> Groups:
    """Group samples of similar length, so that work per sample becomes work per group."""
    # Computed on the host and copied at once: a device would have to be waited for to know sizes, or for each copy.
    of_queries, of_keys, places, num_before = [], [], np.empty(bounds.ends[-1], np.int64), 0
    groups = similar_samples(bounds)
    for samples in groups:
        starts, lengths, prefixes = np.array([(one.start, one.num_own, one.prefix_start) for one in samples]).T[
            :, :, None
        ]
        place = np.arange(samples[0].num_own)
        indices, is_real = starts + np.minimum(place, lengths - 1), place < lengths
        places[indices[is_real]] = num_before + np.flatnonzero(is_real)
        num_before += indices.size
        of_queries.append(indices)
        of_keys.append(np.concatenate([prefixes + np.arange(samples[0].num_prefix), indices], axis=1))
    parts = [places, *of_queries, *(of_keys if bounds.parents else ())]
    copied = to_device(np.concatenate([part.ravel() for part in parts]), device)
    there = [one.view(part.shape) for one, part in zip(copied.split([part.size for part in parts]), parts, strict=True)]
    tokens = keys = copied[len(places) : len(places) + num_before]
    if bounds.parents:  # else the keys are the tokens
        keys = copied[len(places) + num_before :]
    made = map(Group, groups, there[1 : len(groups) + 1], there[-len(groups) :])
    return Groups(tuple(made), tokens, keys, there[0])


@lru_cache(maxsize=8)
def similar_samples(bounds: Bounds) -> tuple[tuple[Segment, ...], ...]:
    """Group samples of similar length whose prefixes are equally long. In each group the longest sample is first."""
    samples = sorted(segments_of(bounds), key=lambda sample: (sample.num_prefix, -sample.num_own, sample.start))
    groups: list[list[Segment]] = []
    for sample in samples:
        longest = groups[-1][0] if groups else None
        if (
            longest is not None
            and sample.num_prefix == longest.num_prefix
            and sample.num_own >= LEAST_SHARE * longest.num_own
        ):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return tuple(map(tuple, groups))
