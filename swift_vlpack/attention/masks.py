"""The mask of a row, kept as the function that transformers describes it by, so that a sample gets its part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from swift_vlpack.attention.mask_functions import (
    OF_POSITIONS,
    FunctionAlone,
    MaskFunction,
    kind_of,
    kinds_of,
    signature_of,
    window_of,
)
from swift_vlpack.errors import AttentionError


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
        names = kinds_of(function)
        self._is_same_everywhere = names <= OF_POSITIONS and options.get("attention_mask") is None
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
        return signature_of(self.function)

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


def _sample_mask(function: MaskFunction, start: int, end: int, options: dict[str, Any]) -> SampleMask:
    padding = options.get("attention_mask")
    if padding is not None:
        function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padding))
    alone = FunctionAlone(start, end, options)
    seen = alone.function_of(function)
    if seen is True:
        return EVERYTHING
    if seen is False:
        raise AttentionError(f"the mask of the model lets tokens {start} to {end} see nothing, not even themselves")
    if kind_of(seen)[0] == "causal_mask_function":
        return PAST
    return SampleMask(False, partial(alone.matrix, seen), not alone.looks_up, window_of(seen))
