"""Keep the mask of a packed sequence as the function that describes it, and give each sample its part.

A model's mask in transformers is a tree of functions, such as "causal and (in the window or in the same image)". What a
function means inside a packed sequence depends on its kind:

- Causal masks and windows look only at the distance of two tokens, so they hold for a sample as they are.
- Chunks count from the start of the sequence, and must count from the start of the sample.
- Image blocks and padding look tokens up in the sequence, so their indices are moved.
- The mask that transformers derives from restarted positions repeats the boundaries, so it is left out.

A branch is the end of a row whose beginning, the prefix, lies elsewhere in the sequence. Its mask is that of the row
alone: the last rows of the matrix, with distances and lookups along the row, never along the branches between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import masking_utils

from swift_vlpack.errors import AttentionError

MaskFunction = Callable[..., Any]
"""transformers' signature: takes the indices of batch, head, query and key; returns whether the query sees the key."""

_LOOKS_UP = ("padding_mask_function", "blockwise_overlay")
_LIMITS = {"sliding_window_overlay": "sliding_window", "chunked_overlay": "chunk_size"}
_SEES_ALL = ("bidirectional_mask_function", "packed_sequence_mask_function")
OF_POSITIONS = {"and_masks", "or_masks", "causal_mask_function", *_LIMITS, *_SEES_ALL}


class Segment(NamedTuple):
    """Tokens of a sequence that are computed together: a sample, a prefix, or a branch, which also sees its prefix."""

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0

    @property
    def num_own(self) -> int:
        """Return the number of tokens of the segment, each of which is a query."""
        return self.end - self.start

    @property
    def num_prefix(self) -> int:
        """Return the number of tokens of the segment's prefix; 0 if it has no prefix."""
        return self.prefix_end - self.prefix_start

    @property
    def num_keys(self) -> int:
        """Return the number of tokens that the segment can see: those of its prefix, then its own."""
        return self.num_prefix + self.num_own

    def of(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of its row alone."""
        own = states.narrow(dim, self.start, self.num_own)
        if not self.num_prefix:
            return own
        return torch.cat([states.narrow(dim, self.prefix_start, self.num_prefix), own], dim)

    def in_sequence(self, index: Any) -> Any:
        """Return the place in the sequence of a token that is counted in the row alone."""
        own = index + (self.start - self.num_prefix)
        return torch.where(index < self.num_prefix, index + self.prefix_start, own) if self.num_prefix else own


class MaskRead(AttentionError, AttributeError):
    """Raised when the model's code looks into its mask; an `AttributeError` too, so that `hasattr` works."""


@dataclass(frozen=True)
class SampleMask:
    """Mask of one sample: every token sees all tokens, or the past, or what a matrix says.

    A branch has fewer queries than keys, because its keys include its prefix; its queries are the last tokens.
    """

    is_causal: bool = False
    """True if every token sees exactly its past. A branch has a matrix all the same: without one, sdpa would take its
    queries for the first tokens of the row."""
    make: Callable[[], torch.Tensor] | None = None
    """Makes the matrix, on first use, because kernels that know windows need none."""
    is_of_positions: bool = False
    """True if the mask depends on positions only: samples of equal length share the matrix, and a shorter sample has
    its first rows and columns."""
    window: int | None = None
    """Size of the sliding window, if the mask is causal with a window and nothing else."""

    @cached_property
    def matrix(self) -> torch.Tensor | None:  # (1, 1 or num_heads, num_own, num_keys), bool or added to the scores
        """Make the matrix once; None if the mask needs none."""
        return None if self.make is None else self.make()


PAST = SampleMask(is_causal=True, is_of_positions=True)
EVERYTHING = SampleMask()


def past(segment: Segment, window: int | None, device: torch.device | str | None) -> SampleMask:
    """Make a causal mask with a window, if any; a sample that fits into the window needs no matrix."""
    limit = segment.num_keys if window is None else window
    fits = segment.num_keys <= limit
    if fits and not segment.num_prefix:
        return PAST

    def make() -> torch.Tensor:
        position = torch.arange(segment.num_keys, device=device)
        distance = position[segment.num_prefix :, None] - position[None, :]
        return ((distance >= 0) & (distance < limit))[None, None]

    return SampleMask(fits, make, is_of_positions=True, window=None if fits else window)


class SequenceMask:
    """Mask of one sequence, of which only the parts of the samples are made; the whole only without boundaries.

    Layers receive this object in place of a tensor and hand it to attention. Code that reads it as a tensor gets
    `MaskRead`.
    """

    ndim = 4

    def __init__(self, function: MaskFunction, num_tokens: int, options: dict[str, Any]) -> None:
        self.function = function
        self.shape = (1, 1, num_tokens, num_tokens)
        self._options = options
        self._whole: list[torch.Tensor | None] = []
        self._samples: dict[Segment, SampleMask] = {}
        self._by_size: dict[tuple[int, int], SampleMask] = {}
        names = kinds_in(function)
        self._is_same_everywhere = names <= OF_POSITIONS and options.get("attention_mask") is None
        self.looks_back = "causal_mask_function" in names
        """True for the mask of a language model; that of a vision tower is not causal."""

    def whole(self) -> torch.Tensor | None:
        """Make the mask that transformers would have given to sdpa, once."""
        if not self._whole:
            num_tokens = self.shape[-1]
            made = masking_utils.sdpa_mask(1, num_tokens, num_tokens, mask_function=self.function, **self._options)
            self._whole.append(made)
        return self._whole[0]

    def of_sample(self, start: int, end: int, prefix_start: int = 0, prefix_end: int = 0) -> SampleMask:
        """Return the mask that these tokens would have in their row alone; made once for all layers.

        The row is the tokens from `start` to `end`, after those of the prefix if they are a branch.
        """
        size = (end - start, prefix_end - prefix_start)
        if self._is_same_everywhere and size in self._by_size:
            return self._by_size[size]
        segment = Segment(start, end, prefix_start, prefix_end)
        if segment not in self._samples:
            made = _sample_mask(self.function, segment, self._options)
            # Two masks of one size that are of positions are equal, so all branches of a size share one matrix.
            self._samples[segment] = self._by_size.setdefault(size, made) if made.is_of_positions else made
        return self._samples[segment]

    @property
    def signature(self) -> object:
        """Return a value that is equal for masks of the same kind, on any sequence."""
        return signature_of(self.function)

    def like(self, function: MaskFunction, num_tokens: int) -> SequenceMask:
        """Return the mask of another sequence, without the padding of this one."""
        return SequenceMask(function, num_tokens, {**self._options, "attention_mask": None})

    def __getattr__(self, name: str) -> NoReturn:
        raise MaskRead(f"the model's code reads {name!r} of its attention mask, {_WAY_OUT}")

    def __getitem__(self, index: Any) -> NoReturn:
        raise MaskRead(f"the model's code cuts a part out of its attention mask, {_WAY_OUT}")


_WAY_OUT = (
    "which the attention vlpack makes for each sample and not for the sequence; train with --attn_impl flash_attn "
    "where the model has it, or without packing"
)


def sequence_mask(  # noqa: PLR0913 - the signature is transformers'
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    **kwargs: Any,
) -> SequenceMask | torch.Tensor | None:
    """Make the mask for a model under `vlpack`: a `SequenceMask` for one sequence, sdpa's for a batch or a cache."""
    if isinstance(attention_mask, SequenceMask):  # the outer model has made it and handed it to the inner model
        return attention_mask
    is_sequence = batch_size == 1 and q_length == kv_length > 1 and _is_zero(q_offset) and _is_zero(kv_offset)
    if not is_sequence:
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        whole: torch.Tensor | None = masking_utils.sdpa_mask(*sizes, mask_function, attention_mask, **kwargs)
        return whole
    return SequenceMask(mask_function, q_length, {**kwargs, "attention_mask": attention_mask})


def from_block_mask(mask: Any, num_tokens: int) -> SequenceMask:
    """Make the mask from a block mask of flex attention."""
    return SequenceMask(mask.mask_mod, num_tokens, {"device": mask.kv_indices.device, "use_vmap": True})


def _is_zero(offset: int | torch.Tensor) -> bool:
    return isinstance(offset, int) and offset == 0


def prefix_sees(segment: Segment) -> str:
    """Return the error for a mask in which a prefix sees the tokens of a branch, as in prefix language models."""
    return (
        f"the mask of the model lets tokens {segment.prefix_start} to {segment.prefix_end}, which rows share, see what "
        f"follows them in a row (tokens {segment.start} to {segment.end}); set packing_share=none"
    )


def _sample_mask(function: MaskFunction, segment: Segment, options: dict[str, Any]) -> SampleMask:
    padding = options.get("attention_mask")
    if padding is not None:
        function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padding))
    alone = _FunctionOfSample(segment, options)
    seen = alone.of(function)
    if segment.num_prefix and (seen is True or (seen is not False and alone.is_seen_by_prefix(seen))):
        raise AttentionError(prefix_sees(segment))
    if seen is True:
        return EVERYTHING
    if seen is False:
        tokens = f"{segment.start} to {segment.end}"
        raise AttentionError(f"the mask of the model lets tokens {tokens} see nothing, not even themselves")
    if kind_of(seen)[0] == "causal_mask_function":
        return past(segment, None, options.get("device"))
    return SampleMask(False, partial(alone.matrix, seen), not alone.looks_up, window_of(seen))


class _FunctionOfSample:
    """Rewrite the mask function of a sequence for one sample, so that indices count from the start of its row alone."""

    def __init__(self, segment: Segment, options: dict[str, Any]) -> None:
        self.segment = segment
        self.options = {name: options[name] for name in ("use_vmap", "device") if name in options}
        self.looks_up = False
        """Becomes True when a part of the function depends on the tokens themselves, not only on their positions."""

    def of(self, function: MaskFunction) -> MaskFunction | bool:
        """Return the function for the sample; True or False if every pair of tokens gets that value."""
        name, inside = kind_of(function)
        if name == "and_masks":
            return self._joined([self.of(part) for part in inside["mask_functions"]], stops=False)
        if name == "or_masks":
            return self._joined([self.of(part) for part in inside["mask_functions"]], stops=True)
        if name in _SEES_ALL:
            return True
        if name == "causal_mask_function":
            return function
        if name in _LIMITS:
            return True if self.segment.num_keys <= inside[_LIMITS[name]] else function
        queries = slice(self.segment.start, self.segment.end)
        if name == "blockwise_overlay" and _all_on_host(inside["block_sequence_ids"][:, queries] < 0):
            return False
        if name == "padding_mask_function" and _all_on_host(self.segment.of(inside["padding_mask"], dim=1)):
            return True
        if name in _LOOKS_UP:
            self.looks_up = True
            return self._looked_up(function)
        return self._of_unknown_kind(function)

    def matrix(self, function: MaskFunction) -> Any:  # (1, 1, num_own, num_keys)
        """Evaluate a function of the sample for all pairs of tokens."""
        return self._evaluated(function, self.segment.num_own, self.segment.num_keys, self.segment.num_prefix, 0)

    def is_seen_by_prefix(self, function: MaskFunction) -> bool:
        """Tell whether a token of the prefix sees a token of the branch. A causal mask is not evaluated for that."""
        size = self.segment.num_prefix
        return not _is_causal(function) and bool(self._evaluated(function, size, self.segment.num_own, 0, size).any())

    def _evaluated(self, function: MaskFunction, num_queries: int, num_keys: int, query: int, key: int) -> Any:
        """Evaluate a function for all pairs, starting at one query and one key."""
        return masking_utils.sdpa_mask(
            1, num_queries, num_keys, query, key, mask_function=function, allow_is_causal_skip=False, **self.options
        )

    def _joined(self, parts: list[MaskFunction | bool], *, stops: bool) -> MaskFunction | bool:
        if stops in parts:
            return stops
        functions = [part for part in parts if not isinstance(part, bool)]
        if len(functions) < 2:
            return functions[0] if functions else not stops
        return (masking_utils.or_masks if stops else masking_utils.and_masks)(*functions)

    def _looked_up(self, function: MaskFunction) -> MaskFunction:
        place = self.segment.in_sequence

        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return function(batch_idx, head_idx, place(q_idx), place(kv_idx))

        return inner_mask

    def _of_unknown_kind(self, function: MaskFunction) -> MaskFunction:
        """Accept a function that gives the same mask wherever the sample lies. Raises `AttentionError` if not.

        A branch is tried as the end of a row in one piece, where a function of distances gives the right mask, too.
        """
        segment = self.segment
        start = segment.start - segment.num_prefix
        moved = masking_utils.add_offsets_to_mask_function(function, start, start)
        if not torch.equal(self.matrix(moved), self.matrix(function)):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise AttentionError(
                f"the model's mask has a part {name} that depends on where in the sequence a sample lies (tokens "
                f"{segment.start} to {segment.end}), and packing does not know what the sample would have alone; train "
                "without packing, or report the model"
            )
        return function


def _all_on_host(flags: torch.Tensor) -> bool:
    """Tell whether all flags are set. On a device, which would have to be waited for, no: the sample gets a matrix."""
    return flags.device.type == "cpu" and bool(flags.all())


def resized(function: MaskFunction, ends: tuple[int, ...], longest: int) -> MaskFunction:
    """Make a mask function of the same kind for a sequence of random numbers, on which kernels are tried.

    Windows and chunks are cut to `longest`. Every 32 tokens get one image block of 8 tokens; a block that reaches over
    the end of a segment becomes two, because no image lies partly in a prefix and partly in its branches.
    """
    name, inside = kind_of(function)
    if "mask_functions" in inside:
        parts = [resized(part, ends, longest) for part in inside["mask_functions"]]
        return (masking_utils.or_masks if name == "or_masks" else masking_utils.and_masks)(*parts)
    if name in _LIMITS:
        size = min(inside[_LIMITS[name]], longest)
        if name == "chunked_overlay":
            return masking_utils.chunked_overlay(size, torch.zeros_like(inside["left_padding"]))
        return masking_utils.sliding_window_overlay(size)
    if name == "blockwise_overlay":
        place = torch.arange(ends[-1], device=inside["block_sequence_ids"].device)
        segment = torch.bucketize(place, torch.tensor(ends[1:], device=place.device), right=True)
        return masking_utils.blockwise_overlay(torch.where(place % 32 < 8, place // 32 + segment * ends[-1], -1)[None])
    if name in ("packed_sequence_mask_function", "padding_mask_function"):
        return masking_utils.bidirectional_mask_function
    return function


def kind_of(function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """Return which function of transformers made a mask function, and the variables that the mask function captured.

    The name is empty for a function that is not from transformers. Masks are told apart in this way because
    transformers returns bare closures, without a name or type of their own.
    """
    if not inspect.isfunction(function) or function.__module__ != masking_utils.__name__:
        return "", {}
    inside = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__qualname__.split(".")[0], {name: cell.cell_contents for name, cell in inside}


def signature_of(function: MaskFunction) -> object:
    """Return a value that is equal for functions of the same kind, on any sequence."""
    name, inside = kind_of(function)
    if "mask_functions" in inside:
        return name, tuple(signature_of(part) for part in inside["mask_functions"])
    return name or getattr(function, "__qualname__", ""), inside.get(_LIMITS.get(name, ""))


def kinds_in(function: MaskFunction) -> set[str]:
    """Return the kinds of all parts of a mask function."""
    name, inside = kind_of(function)
    return {name}.union(*(kinds_in(part) for part in inside.get("mask_functions", ())))


def _is_causal(function: MaskFunction) -> bool:
    """Tell whether the kinds of a function's parts guarantee that no token sees a later one."""
    name, inside = kind_of(function)
    parts = [_is_causal(part) for part in inside.get("mask_functions", ())]
    return name == "causal_mask_function" or (any(parts) if name == "and_masks" else bool(parts) and all(parts))


def window_of(function: MaskFunction) -> int | None:
    """Return the window of a mask that is causal with a sliding window and nothing else; None for other masks."""
    name, inside = kind_of(function)
    parts = dict(kind_of(part) for part in inside.get("mask_functions", ())) if name == "and_masks" else {}
    if set(parts) != {"causal_mask_function", "sliding_window_overlay"}:
        return None
    return int(parts["sliding_window_overlay"]["sliding_window"])
