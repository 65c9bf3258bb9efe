"""Replace the tokens or media of a sample, and keep lengths and shapes. Whatever then moves depends on the content.

>>> replaced({"input_ids": [1, 7, 8, 9, 2]}, is_ordinary=lambda token: token > 2)["input_ids"]
[1, 8, 9, 7, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from swift_vlpack.feed.collate import UNUSED_COLUMNS
from swift_vlpack.proof.branches import num_prefix_of
from swift_vlpack.rows.samples import Encoded

# Fields that are never media, whatever the type of their values.
_NO_MEDIA = frozenset(
    (
        *("input_ids", "labels", "loss_scale", "position_ids", "attention_mask", "token_type_ids"),
        UNUSED_COLUMNS,
    )
)
_BRIGHTEST = 255


def can_be_replaced(sample: Encoded, is_ordinary: Callable[[int], bool]) -> bool:
    """Tell whether a sample has two different ordinary tokens to exchange, at least one of them after its prefix."""
    tokens = sample["input_ids"]
    return len({token for token in tokens if is_ordinary(token)}) > 1 and any(
        map(is_ordinary, tokens[num_prefix_of(sample) :])
    )


def replaced(sample: Encoded, is_ordinary: Callable[[int], bool]) -> Encoded:
    """Replace every ordinary token by another ordinary token. Media and control tokens stay, so positions stay, too.

    The tokens of a prefix stay, because other samples share them.
    """
    others, num_prefix = _others(sample["input_ids"], is_ordinary), num_prefix_of(sample)
    return {**sample, "input_ids": [*sample["input_ids"][:num_prefix], *others[num_prefix:]]}


def with_other_content(sample: Encoded, is_ordinary: Callable[[int], bool]) -> Encoded:
    """Replace tokens and media of a sample, but nothing of its prefix, which belongs to other samples, too."""
    changed = replaced(sample, is_ordinary)
    return changed if num_prefix_of(sample) else with_other_media(changed)


def _others(tokens: Sequence[int], is_ordinary: Callable[[int], bool]) -> list[int]:
    """Replace every ordinary token by the next larger one of the same sample, which the model knows."""
    ordinary = sorted({token for token in tokens if is_ordinary(token)})
    following = dict(zip(ordinary, [*ordinary[1:], *ordinary[:1]], strict=True))
    return [following.get(token, token) for token in tokens]


def with_other_media(sample: Encoded) -> Encoded:
    """Replace pixels and sounds by other values of the same shape."""
    return {**sample, **{name: _other(value) for name, value in media_of(sample).items()}}


def media_of(sample: Encoded) -> dict[str, Any]:
    """Return the fields of a sample that hold images, videos and sounds."""
    return {name: value for name, value in sample.items() if name not in _NO_MEDIA and _has_content(value)}


def kinds_of_media(sample: Encoded) -> frozenset[str]:
    """Return which media a sample has, by the names of its fields."""
    return frozenset(media_of(sample))


def _has_content(value: Any) -> bool:
    """Tell whether a value holds pictures or floating-point numbers. Pixels and spectra do; grids hold integers."""
    if isinstance(value, Mapping):
        return any(map(_has_content, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_content, value))
    return isinstance(value, Image.Image) or (_is_floating(value) and value.ndim > 1)


def _is_floating(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.floating))
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _other(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _other(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_other, value))
    if isinstance(value, Image.Image):
        return value.convert("RGB").point(lambda level: _BRIGHTEST - level)
    # Mirror values around a half: they stay in about the same range, and keep their shape and type.
    return 1 - value if _is_floating(value) else value
