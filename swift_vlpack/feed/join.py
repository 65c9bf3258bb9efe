"""Samples of a pack made fit for a template that joins their fields end to end."""

from __future__ import annotations

from typing import Any

import torch

from swift_vlpack.rows.samples import Encoded

TYPES = "mm_token_type_ids"
"""Which tokens are media; a tensor of one number a token."""
PIXELS = ("pixel_values", "pixel_values_videos")


def completed(samples: list[Encoded]) -> list[Encoded]:
    """Give every sample the per-token fields that any of them has, and all pictures the same shape."""
    if any(sample.get("loss_scale") is not None for sample in samples):
        for sample in samples:
            if sample.get("loss_scale") is None:
                sample["loss_scale"] = [1.0] * len(sample["input_ids"])
    _complete_types(samples)
    for name in PIXELS:
        _fill_up(samples, name)
    return samples


def _complete_types(samples: list[Encoded]) -> None:
    """No token of a text is of a medium. GLM-4.5V's template says it of the media alone, which fits no row."""
    types = [sample[TYPES] for sample in samples if isinstance(sample.get(TYPES), torch.Tensor)]
    if not types:
        return
    fits = all(sample.get(TYPES) is None or sample[TYPES].shape[-1] == len(sample["input_ids"]) for sample in samples)
    for sample in samples:
        if not fits:
            sample.pop(TYPES, None)
        elif sample.get(TYPES) is None:
            sample[TYPES] = types[0].new_zeros((*types[0].shape[:-1], len(sample["input_ids"])))


def _fill_up(samples: list[Encoded], name: str) -> None:
    """Put the tiles or pictures of all samples into one tensor, as the family's processor does for one sample.

    Processors of tiles (images, tiles, 3, height, width), and of pictures of any size beside `image_sizes`, fill up
    with zeros behind; their models pass over those. Templates only join tensors of one shape.
    """
    with_media = [sample for sample in samples if isinstance(sample.get(name), torch.Tensor)]
    if len(with_media) < 2 or not all(_is_filled_up(sample, name) for sample in with_media):
        return
    shapes = [sample[name].shape[1:] for sample in with_media]
    largest = tuple(map(max, zip(*shapes, strict=True)))
    joined = torch.cat([_filled(sample.pop(name), largest) for sample in with_media])
    with_media[0][name] = joined


def _is_filled_up(sample: Encoded, name: str) -> bool:
    return sample[name].dim() == 5 or (sample[name].dim() == 4 and sample.get("image_sizes") is not None)


def _filled(pixels: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """With zeros behind, in every dimension but the first."""
    missing = [(0, most - size) for size, most in zip(pixels.shape[1:], shape, strict=True)]
    return torch.nn.functional.pad(pixels, [size for pair in reversed(missing) for size in pair])
