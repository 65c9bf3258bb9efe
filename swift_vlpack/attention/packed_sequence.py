"""Collect what one call of attention on a packed sequence needs: the boundaries of its samples and the layer's
arguments.

>>> boundaries_of(torch.tensor([0, 3, 5]))
(0, 3, 5)
>>> groups_of((0, 5, 6, 11), torch.device("cpu")).groups[0].samples
((0, 5), (6, 11))

Boundaries reach attention as the keyword `cu_seq_lens_q`, which transformers hands to every layer. A keyword, and not
a global, because gradient checkpointing runs a layer a second time after the forward is over, and because a process
may train more than one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from swift_vlpack.attention.masks import PAST, SampleMask, SequenceMask
from swift_vlpack.errors import AttentionError

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

LEAST_SHARE = 0.8
"""Samples of a group are at least this long, as a share of the longest sample of the group. So at most a fifth of a
batch is padding."""

# Caches `tolist()`, which waits for the device, so that all layers of a forward share one copy. The tensor is the key,
# because no other object of a forward reaches every layer, also when checkpointing runs a layer again after the forward
# is over. Weak, so that nothing outlives the batch; and not an attribute of the tensor, because the tensor is not ours.
_on_host: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def boundaries_of(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Return the boundaries as integers, copied from the device once for all layers of a forward.

    This is the one place where attention learns the shape of a sequence. Prefixes that are shared by branches will
    return a forest of depth one from here (`plan.boundaries.Boundaries`), and sequence parallelism will look up the
    boundaries of the whole sequence for a rank that holds a slice of it: callers ask per sequence, never per rank.
    """
    known: tuple[int, ...] | None = _on_host.get(cu_seqlens)
    if known is None:
        known = tuple(cu_seqlens.tolist())
        _on_host[cu_seqlens] = known
    return known


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

    def for_sample(self, start: int, end: int) -> AttentionArgs:
        """Return the arguments for the tokens of one sample."""
        if self.position_bias is None:
            return self
        bias = self.position_bias[..., start:end, start:end]
        return AttentionArgs(self.scaling, self.dropout, self.softcap, self.sinks, bias)


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
    ends: tuple[int, ...]  # (num_samples + 1,): 0, then the end of each sample

    def mask_of(self, start: int, end: int) -> SampleMask:
        """Return the mask of the sample between these tokens."""
        if self.mask is None:
            return _band(end - start, self.window, self.query.device)
        if isinstance(self.mask, SequenceMask):
            return self.mask.of_sample(start, end)
        part = self.mask[:, :, start:end, start:end]
        return SampleMask(make=lambda: part)


def _band(length: int, window: int | None, device: torch.device) -> SampleMask:
    """Make a causal mask with a window; a sample that fits into the window needs no matrix."""
    if window is None or length <= window:
        return PAST

    def make() -> torch.Tensor:
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        return ((distance >= 0) & (distance < window))[None, None]

    return SampleMask(make=make, is_of_positions=True, window=window)


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


def rescaled_by_sample(module: Any, query: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    """Correct the query of layers that scale it by the position of its token (Llama 4).
    The layer has already multiplied the query by a temperature, which grows with the token's number in the sequence.
    Alone, a sample counts its tokens from its own start. Returns the query unchanged for all other layers.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    if ends[-1] < module.floor_scale or len(ends) == 2:
        return query
    in_sequence = torch.arange(ends[-1], device=query.device)
    starts = torch.tensor(ends[:-1], device=query.device)
    lengths = torch.tensor(ends, device=query.device).diff()
    in_sample = in_sequence - torch.repeat_interleave(starts, lengths)
    factor = _temperature(module, in_sample) / _temperature(module, in_sequence)
    return (query * factor[:, None]).to(query.dtype)


def _temperature(module: Any, position: torch.Tensor) -> torch.Tensor:
    """Compute the temperature by Llama 4's own formula."""
    temperature: torch.Tensor = torch.log1p(torch.floor((position.float() + 1.0) / module.floor_scale))
    return temperature * module.attn_scale + 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that are computed as one batch, padded on the right to the longest sample."""

    samples: tuple[tuple[int, int], ...]
    """Start and end of each sample, the longest first."""
    tokens: torch.Tensor  # (num_samples, longest): index into the sequence; padding repeats the sample's last token


@dataclass(frozen=True, slots=True)
class Groups:
    """All samples of a sequence, each in one group."""

    groups: tuple[Group, ...]
    tokens: torch.Tensor  # indices into the sequence, of all groups end to end
    places: torch.Tensor  # (num_tokens,): index of each token of the sequence in the groups' tokens, end to end

    def in_sequence_order(self, outputs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Join the outputs of the groups, (num_samples, longest, ...) each, into one sequence; add `dim` of size 1."""
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, self.places).unsqueeze(dim)


@lru_cache(maxsize=8)  # so that all layers of a forward share the groups
def groups_of(ends: tuple[int, ...], device: torch.device) -> Groups:
    """Group samples of similar length, so that work per sample becomes work per group."""
    groups, places, num_before = [], torch.empty(ends[-1], dtype=torch.long), 0
    for samples in similar_samples(ends):
        # Computed on the host and copied once: `nonzero` on a device would stop the host until the device is done.
        starts, lengths = torch.tensor([(start, end - start) for start, end in samples]).T[:, :, None]
        place = torch.arange(int(lengths[0]))
        tokens, is_real = starts + torch.minimum(place, lengths - 1), place < lengths
        places[tokens[is_real]] = num_before + torch.nonzero(is_real.flatten()).flatten()
        num_before += tokens.numel()
        groups.append(Group(samples, tokens.to(device)))
    return Groups(tuple(groups), torch.cat([group.tokens.flatten() for group in groups]), places.to(device))


@lru_cache(maxsize=8)
def similar_samples(ends: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Group samples of similar length. Returns the start and end of each sample, by group, the longest first."""
    samples = sorted(pairwise(ends), key=lambda sample: (sample[0] - sample[1], sample[0]))
    groups: list[list[tuple[int, int]]] = []
    for start, end in samples:
        if groups and end - start >= LEAST_SHARE * (groups[-1][0][1] - groups[-1][0][0]):
            groups[-1].append((start, end))
        else:
            groups.append([(start, end)])
    return tuple(map(tuple, groups))
