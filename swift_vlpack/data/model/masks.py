"""The mask of a row, kept as the function that transformers describes it by, so that a sample gets its part of it.

A model's mask is a tree: causal, and a window, or the same image. What such a function means inside a packed row
depends on its kind. Some know only how far apart two tokens are (causal, window); some count from the start of the row
and have to count from the start of the sample (chunks); some look tokens up in the row (image blocks, padding); and the
one that transformers reads from the positions says where samples meet, which the boundaries say already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from swift_vlpack.core.errors import AttentionError

MaskFunction = Callable[..., Any]
"""transformers' own shape of it: batch, head, query and key index in, whether the query sees the key out."""

_LOOKS_UP = ("padding_mask_function", "blockwise_overlay")
_LIMITS = {"sliding_window_overlay": "sliding_window", "chunked_overlay": "chunk_size"}
_SEES_ALL = ("bidirectional_mask_function", "packed_sequence_mask_function")
_OF_POSITIONS = {"and_masks", "or_masks", "causal_mask_function", *_LIMITS, *_SEES_ALL}


class MaskRead(AttentionError, AttributeError):
    """The model's code looks into its mask; an `AttributeError` too, so that `hasattr` may ask."""


@dataclass(frozen=True)
class SampleMask:
    """What one sample may see of itself: everything, the past, or a matrix."""

    is_causal: bool = False
    """Without a matrix: the past only."""
    make: Callable[[], torch.Tensor] | None = None
    """Makes the matrix; kernels that know windows need none."""
    is_of_positions: bool = False
    """Two samples of one length have the same matrix, and a shorter one has its first rows and columns."""
    window: int | None = None
    """Where the matrix is nothing but the causal one with a sliding window, its size."""

    @cached_property
    def matrix(self) -> torch.Tensor | None:  # (1, 1 or num_heads, length, length), bool or added to the scores
        """Made on first use."""
        return None if self.make is None else self.make()


PAST = SampleMask(is_causal=True, is_of_positions=True)
EVERYTHING = SampleMask()


class RowMask:
    """The mask of one row, made only where it is needed: for a sample, or whole where there are no boundaries."""

    ndim = 4

    def __init__(self, function: MaskFunction, num_tokens: int, options: dict[str, Any]) -> None:
        self.function = function
        self.shape = (1, 1, num_tokens, num_tokens)
        self._options = options
        self._whole: list[torch.Tensor | None] = []
        self._samples: dict[tuple[int, int], SampleMask] = {}
        self._of_length: dict[int, SampleMask] = {}
        names = _names(function)
        self._is_same_everywhere = names <= _OF_POSITIONS and options.get("attention_mask") is None
        self.looks_back = "causal_mask_function" in names
        """Whether it is a language model's; that of a vision tower is not causal."""

    def whole(self) -> torch.Tensor | None:
        """What `sdpa` would have been given."""
        if not self._whole:
            num_tokens = self.shape[-1]
            made = masking_utils.sdpa_mask(1, num_tokens, num_tokens, mask_function=self.function, **self._options)
            self._whole.append(made)
        return self._whole[0]

    def of_sample(self, start: int, end: int) -> SampleMask:
        """What the sample between these tokens would have been given alone; made once for all layers."""
        if end - start in self._of_length:
            return self._of_length[end - start]
        if (start, end) not in self._samples:
            made = _sample_mask(self.function, start, end, self._options)
            self._samples[start, end] = made
            if self._is_same_everywhere:
                self._of_length[end - start] = made
        return self._samples[start, end]

    @property
    def signature(self) -> object:
        """Equal for masks of the same kind, on whatever row."""
        return _signature(self.function)

    def like(self, function: MaskFunction, num_tokens: int) -> RowMask:
        """Another row's, without the padding of this one."""
        return RowMask(function, num_tokens, {**self._options, "attention_mask": None})

    def __getattr__(self, name: str) -> NoReturn:
        raise MaskRead(f"the model's code reads {name!r} of its attention mask, {_WAY_OUT}")

    def __getitem__(self, index: Any) -> NoReturn:
        raise MaskRead(f"the model's code cuts a part out of its attention mask, {_WAY_OUT}")


_WAY_OUT = (
    "which the attention vlpack makes for each sample and not for the row; train with --attn_impl flash_attn where the "
    "model has it, or without packing"
)


def row_mask(  # noqa: PLR0913 - the signature is transformers'
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    **kwargs: Any,
) -> RowMask | torch.Tensor | None:
    """The mask that models are given under `vlpack`: of one row its function, of a batch or a cache what sdpa takes."""
    if isinstance(attention_mask, RowMask):  # made by the outer model, handed to the inner one
        return attention_mask
    is_row = batch_size == 1 and q_length == kv_length > 1 and _is_zero(q_offset) and _is_zero(kv_offset)
    if not is_row:
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        whole: torch.Tensor | None = masking_utils.sdpa_mask(*sizes, mask_function, attention_mask, **kwargs)
        return whole
    return RowMask(mask_function, q_length, {**kwargs, "attention_mask": attention_mask})


def of_block_mask(mask: Any, num_tokens: int) -> RowMask:
    """The same of a flex attention mask."""
    return RowMask(mask.mask_mod, num_tokens, {"device": mask.kv_indices.device, "use_vmap": True})


def _is_zero(offset: int | torch.Tensor) -> bool:
    return isinstance(offset, int) and offset == 0


# -- a function of the row as one of a sample -------------------------------------------------------------------------


def _sample_mask(function: MaskFunction, start: int, end: int, options: dict[str, Any]) -> SampleMask:
    padding = options.get("attention_mask")
    if padding is not None:
        function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padding))
    alone = _Alone(start, end, options)
    seen = alone.function_of(function)
    if seen is True:
        return EVERYTHING
    if seen is False:
        raise AttentionError(f"the mask of the model lets tokens {start} to {end} see nothing, not even themselves")
    if _kind(seen)[0] == "causal_mask_function":
        return PAST
    return SampleMask(False, partial(alone.matrix, seen), not alone.looks_up, _window(seen))


class _Alone:
    """Rewrites the mask function of a row into that of one sample; indices then count from the sample's start."""

    def __init__(self, start: int, end: int, options: dict[str, Any]) -> None:
        self.start, self.end, self.length = start, end, end - start
        self.options = {name: options[name] for name in ("use_vmap", "device") if name in options}
        self.looks_up = False
        """Whether a part of it depends on what the tokens are, not only on where."""

    def function_of(self, function: MaskFunction) -> MaskFunction | bool:
        """The function for the sample, or what it says of all pairs of its tokens."""
        name, inside = _kind(function)
        if name == "and_masks":
            return self._joined([self.function_of(part) for part in inside["mask_functions"]], stops=False)
        if name == "or_masks":
            return self._joined([self.function_of(part) for part in inside["mask_functions"]], stops=True)
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
        """All pairs of the sample."""
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
        """One that knows only distances says the same wherever the sample lies; of any other nobody knows the part."""
        in_row, alone = self.matrix(self._moved(function)), self.matrix(function)
        if not torch.equal(in_row, alone):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise AttentionError(
                f"the model's mask has a part {name} that depends on where in the row a sample lies (tokens "
                f"{self.start} to {self.end}), and packing does not know what the sample would have alone; train "
                "without packing, or report the model"
            )
        return function


def resized(function: MaskFunction, num_tokens: int, longest: int) -> MaskFunction:
    """A mask of the same kind for another row, to try a kernel on: windows and chunks no longer than `longest`.

    Image blocks become one of 8 tokens in every 32.
    """
    name, inside = _kind(function)
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


def _kind(function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """The function of transformers that made it, and what it was made of; of another's function no name."""
    if not inspect.isfunction(function) or function.__module__ != masking_utils.__name__:
        return "", {}
    inside = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__qualname__.split(".")[0], {name: cell.cell_contents for name, cell in inside}


def _signature(function: MaskFunction) -> object:
    name, inside = _kind(function)
    if "mask_functions" in inside:
        return name, tuple(_signature(part) for part in inside["mask_functions"])
    return name or function.__qualname__, inside.get(_LIMITS.get(name, ""))


def _names(function: MaskFunction) -> set[str]:
    """The kinds of all parts."""
    name, inside = _kind(function)
    return {name}.union(*(_names(part) for part in inside.get("mask_functions", ())))


def _window(function: MaskFunction) -> int | None:
    """The window, of a function that is causal and has a window and nothing else."""
    name, inside = _kind(function)
    parts = dict(_kind(part) for part in inside.get("mask_functions", ())) if name == "and_masks" else {}
    if set(parts) != {"causal_mask_function", "sliding_window_overlay"}:
        return None
    return int(parts["sliding_window_overlay"]["sliding_window"])
