"""Mask functions of transformers: of what kind each is, and what one of a row is for one of its samples.

A model's mask is a tree: causal, and a window, or the same image. What such a function means inside a packed row
depends on its kind. Some know only how far apart two tokens are (causal, window); some count from the start of the row
and have to count from the start of the sample (chunks); some look tokens up in the row (image blocks, padding); and the
one that transformers reads from the positions says where samples meet, which the boundaries say already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from swift_vlpack.errors import AttentionError

MaskFunction = Callable[..., Any]
"""transformers' own shape of it: batch, head, query and key index in, whether the query sees the key out."""

_LOOKS_UP = ("padding_mask_function", "blockwise_overlay")
_LIMITS = {"sliding_window_overlay": "sliding_window", "chunked_overlay": "chunk_size"}
_SEES_ALL = ("bidirectional_mask_function", "packed_sequence_mask_function")
OF_POSITIONS = {"and_masks", "or_masks", "causal_mask_function", *_LIMITS, *_SEES_ALL}


class FunctionAlone:
    """Rewrites the mask function of a row into that of one sample; indices then count from the sample's start."""

    def __init__(self, start: int, end: int, options: dict[str, Any]) -> None:
        self.start, self.end, self.length = start, end, end - start
        self.options = {name: options[name] for name in ("use_vmap", "device") if name in options}
        self.looks_up = False
        """Whether a part of it depends on what the tokens are, not only on where."""

    def function_of(self, function: MaskFunction) -> MaskFunction | bool:
        """The function for the sample, or what it says of all pairs of its tokens."""
        name, inside = kind_of(function)
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
    """The function of transformers that made it, and what it was made of; of another's function no name."""
    if not inspect.isfunction(function) or function.__module__ != masking_utils.__name__:
        return "", {}
    inside = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__qualname__.split(".")[0], {name: cell.cell_contents for name, cell in inside}


def signature_of(function: MaskFunction) -> object:
    """Equal for functions of the same kind, on whatever row."""
    name, inside = kind_of(function)
    if "mask_functions" in inside:
        return name, tuple(signature_of(part) for part in inside["mask_functions"])
    return name or getattr(function, "__qualname__", ""), inside.get(_LIMITS.get(name, ""))


def kinds_of(function: MaskFunction) -> set[str]:
    """The kinds of all parts."""
    name, inside = kind_of(function)
    return {name}.union(*(kinds_of(part) for part in inside.get("mask_functions", ())))


def window_of(function: MaskFunction) -> int | None:
    """The window, of a function that is causal and has a window and nothing else."""
    name, inside = kind_of(function)
    parts = dict(kind_of(part) for part in inside.get("mask_functions", ())) if name == "and_masks" else {}
    if set(parts) != {"causal_mask_function", "sliding_window_overlay"}:
        return None
    return int(parts["sliding_window_overlay"]["sliding_window"])
