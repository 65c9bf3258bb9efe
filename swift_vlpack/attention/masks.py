"""Keep the mask of a packed sequence as the function that describes it, and give each sample its part.

A model's mask in transformers is a tree of functions, such as "causal and (in the window or in the same image)". What a
function means inside a packed sequence depends on its kind:

- Causal masks and windows look only at the distance of two tokens, so they hold for a sample as they are.
- Chunks count from the start of the sequence, and must count from the start of the sample.
- Image blocks and padding look tokens up in the sequence, so their indices are moved.
- The mask that transformers derives from restarted positions repeats the boundaries, so it is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from swift_vlpack.errors import AttentionError

MaskFunction = Callable[..., Any]
"""transformers' signature: takes the indices of batch, head, query and key; returns whether the query sees the key."""

_LOOKS_UP = ("padding_mask_function", "blockwise_overlay")
_LIMITS = {"sliding_window_overlay": "sliding_window", "chunked_overlay": "chunk_size"}
_SEES_ALL = ("bidirectional_mask_function", "packed_sequence_mask_function")
OF_POSITIONS = {"and_masks", "or_masks", "causal_mask_function", *_LIMITS, *_SEES_ALL}


class MaskRead(AttentionError, AttributeError):
    """Raised when the model's code looks into its mask; an `AttributeError` too, so that `hasattr` works."""


@dataclass(frozen=True)
class SampleMask:
    """Mask of one sample: every token sees all tokens, or the past, or what a matrix says."""

    is_causal: bool = False
    """True if every token sees exactly its past, so that no matrix is needed."""
    make: Callable[[], torch.Tensor] | None = None
    """Makes the matrix, on first use, because kernels that know windows need none."""
    is_of_positions: bool = False
    """True if the mask depends on positions only: samples of equal length share the matrix, and a shorter sample has
    its first rows and columns."""
    window: int | None = None
    """Size of the sliding window, if the mask is causal with a window and nothing else."""

    @cached_property
    def matrix(self) -> torch.Tensor | None:  # (1, 1 or num_heads, length, length), bool or added to the scores
        """Make the matrix once; None if the mask needs none."""
        return None if self.make is None else self.make()


PAST = SampleMask(is_causal=True, is_of_positions=True)
EVERYTHING = SampleMask()


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
        self._samples: dict[tuple[int, int], SampleMask] = {}
        self._by_length: dict[int, SampleMask] = {}
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

    def of_sample(self, start: int, end: int) -> SampleMask:
        """Return the mask that the sample between these tokens would have alone; made once for all layers."""
        if end - start in self._by_length:
            return self._by_length[end - start]
        if (start, end) not in self._samples:
            made = _sample_mask(self.function, start, end, self._options)
            self._samples[start, end] = made
            if self._is_same_everywhere:
                self._by_length[end - start] = made
        return self._samples[start, end]

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


def _sample_mask(function: MaskFunction, start: int, end: int, options: dict[str, Any]) -> SampleMask:
    padding = options.get("attention_mask")
    if padding is not None:
        function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padding))
    alone = _FunctionOfSample(start, end, options)
    seen = alone.of(function)
    if seen is True:
        return EVERYTHING
    if seen is False:
        raise AttentionError(f"the mask of the model lets tokens {start} to {end} see nothing, not even themselves")
    if kind_of(seen)[0] == "causal_mask_function":
        return PAST
    return SampleMask(False, partial(alone.matrix, seen), not alone.looks_up, window_of(seen))


class _FunctionOfSample:
    """Rewrite the mask function of a sequence for one sample, so that indices count from the sample's start."""

    def __init__(self, start: int, end: int, options: dict[str, Any]) -> None:
        self.start, self.end, self.length = start, end, end - start
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
            return True if self.length <= inside[_LIMITS[name]] else function
        here = slice(self.start, self.end)
        if name == "blockwise_overlay" and not bool((inside["block_sequence_ids"][:, here] >= 0).any()):
            return False
        if name == "padding_mask_function" and bool(inside["padding_mask"][:, here].all()):
            return True
        if name in _LOOKS_UP:
            self.looks_up = True
            return self._moved(function)
        return self._of_unknown_kind(function)

    def matrix(self, function: MaskFunction) -> Any:  # (1, 1, length, length)
        """Evaluate a function of the sample for all pairs of tokens."""
        made: Any = masking_utils.sdpa_mask(
            1, self.length, self.length, mask_function=function, allow_is_causal_skip=False, **self.options
        )
        return made

    def _joined(self, parts: list[MaskFunction | bool], *, stops: bool) -> MaskFunction | bool:
        if stops in parts:
            return stops
        functions = [part for part in parts if not isinstance(part, bool)]
        if len(functions) < 2:
            return functions[0] if functions else not stops
        return (masking_utils.or_masks if stops else masking_utils.and_masks)(*functions)

    def _moved(self, function: MaskFunction) -> MaskFunction:
        moved: MaskFunction = masking_utils.add_offsets_to_mask_function(function, self.start, self.start)
        return moved

    def _of_unknown_kind(self, function: MaskFunction) -> MaskFunction:
        """Accept a function that gives the same mask at the sample's place and at 0. Raises `AttentionError` if not."""
        in_sequence, alone = self.matrix(self._moved(function)), self.matrix(function)
        if not torch.equal(in_sequence, alone):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise AttentionError(
                f"the model's mask has a part {name} that depends on where in the sequence a sample lies (tokens "
                f"{self.start} to {self.end}), and packing does not know what the sample would have alone; train "
                "without packing, or report the model"
            )
        return function


def resized(function: MaskFunction, num_tokens: int, longest: int) -> MaskFunction:
    """Make a mask function of the same kind for a sequence of random numbers, on which kernels are tried.
    Windows and chunks are cut to `longest`. Every 32 tokens get one image block of 8 tokens.
    """
    name, inside = kind_of(function)
    if "mask_functions" in inside:
        parts = [resized(part, num_tokens, longest) for part in inside["mask_functions"]]
        return (masking_utils.or_masks if name == "or_masks" else masking_utils.and_masks)(*parts)
    if name in _LIMITS:
        size = min(inside[_LIMITS[name]], longest)
        if name == "chunked_overlay":
            return masking_utils.chunked_overlay(size, torch.zeros_like(inside["left_padding"]))
        return masking_utils.sliding_window_overlay(size)
    if name == "blockwise_overlay":
        place = torch.arange(num_tokens, device=inside["block_sequence_ids"].device)
        return masking_utils.blockwise_overlay(torch.where(place % 32 < 8, place // 32, -1)[None])
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


def window_of(function: MaskFunction) -> int | None:
    """Return the window of a mask that is causal with a sliding window and nothing else; None for other masks."""
    name, inside = kind_of(function)
    parts = dict(kind_of(part) for part in inside.get("mask_functions", ())) if name == "and_masks" else {}
    if set(parts) != {"causal_mask_function", "sliding_window_overlay"}:
        return None
    return int(parts["sliding_window_overlay"]["sliding_window"])
