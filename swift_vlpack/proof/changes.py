"""Samples with other content of the same form, by which the proof sees what depends on what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swift_vlpack.rows.samples import Encoded

_NO_MEDIA = frozenset(("input_ids", "labels", "loss_scale", "position_ids", "attention_mask", "token_type_ids"))


def can_be_replaced(sample: Encoded, is_ordinary: Callable[[int], bool]) -> bool:
    """Whether a sample has two different ordinary tokens to exchange."""
    return len({token for token in sample["input_ids"] if is_ordinary(token)}) > 1


def replaced(sample: Encoded, is_ordinary: Callable[[int], bool]) -> Encoded:
    """The same sample with every ordinary token another one; media and control tokens stay, so positions do."""
    ordinary = sorted({token for token in sample["input_ids"] if is_ordinary(token)})
    following = dict(zip(ordinary, [*ordinary[1:], *ordinary[:1]], strict=True))
    return {**sample, "input_ids": [following.get(token, token) for token in sample["input_ids"]]}


def with_other_media(sample: Encoded, number: int = 1) -> Encoded:
    """The same sample with other pixels and sounds of the same shape; others for every number."""
    return {**sample, **{name: _other(value, number) for name, value in media_of(sample).items()}}


def media_of(sample: Encoded) -> dict[str, Any]:
    """The tensors of a sample that images, videos and sounds are in."""
    return {name: value for name, value in sample.items() if name not in _NO_MEDIA and _has_content(value)}


def kinds_of_media(sample: Encoded) -> frozenset[str]:
    """Which media a sample has, by the names of its tensors."""
    return frozenset(media_of(sample))


def _has_content(value: Any) -> bool:
    """Pixels and spectra are tensors of numbers with a point; grids, masks and positions are not."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_content, value))
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


def _other(value: Any, number: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_other(inner, number) for inner in value)
    return number - value if isinstance(value, torch.Tensor) and value.is_floating_point() else value
