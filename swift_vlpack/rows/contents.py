"""What an encoded sample holds, whatever its family: images, and the patches that its vision tower works on.

Families say it in different tensors. Those that cut an image into patches beforehand bring grids, of patches in time,
height and width. The others bring pixels: one picture, or several tiles, for an image, of which the tower makes patches
of the size in its config. How many images they came from no tensor says, so they are counted in the row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from swift_vlpack.rows.media import media
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.rows.sizes import RowSize

NO_LABEL = -100
"""In place of a token that is not predicted; torch's cross entropy passes over it by default."""
IMAGE_GRIDS = ("image_grid_thw", "image_grid_hws")  # one row an image: Qwen, GLM, Keye, Paddle, dots, and Kimi
GRIDS = (
    *IMAGE_GRIDS,
    "video_grid_thw",
    "grid_thws",  # Ovis 2.5, Kimi K2.5
    "grid_thw",  # ERNIE
    "tgt_sizes",  # MiniCPM-V, a list
    "target_sizes",  # MiniCPM-V 4.6
    "spatial_shapes",  # SigLIP 2
)
PIXELS = (
    "pixel_values",
    "pixel_values_videos",
    "video_pixel_values",
    "patch_pixel_values",
    "images",
    "cross_images",
    "input_image_embeds",
    "image_encoding",
    "output",
)
USUAL_PATCH = 14
"""Pixels on a side, of CLIP, SigLIP and InternViT, where a config does not say."""


class Contents(NamedTuple):
    """What a sample holds beside tokens."""

    images: int = 0
    patches: int = 0
    """Of images and videos, with those of tiles that only fill up a batch."""
    aspect: float = 0.0
    """Longer side over shorter of the most extreme image or video; 0 where no tensor says."""


def contents_of(sample: Mapping[str, Any]) -> Contents:
    """As it was found when the row was encoded; of a sample from elsewhere, as far as its tensors say it."""
    noted: Contents | None = sample.get("contents")
    return noted if noted is not None else found(sample)


def found(
    sample: Mapping[str, Any], row: Mapping[str, Any] | None = None, *, patch_size: tuple[int, int] | None = None
) -> Contents:
    """What a sample holds that was made of this row."""
    grids = [grid for name in GRIDS for grid in _leaves(sample.get(name))]
    if grids:
        patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    else:
        height, width = patch_size or (USUAL_PATCH, USUAL_PATCH)
        patches = sum(_patches(sample.get(name), height, width) for name in PIXELS)
    return Contents(_num_images(sample, row), patches, _aspect(sample))


def num_vision_tokens(template: Any, row: Mapping[str, Any]) -> int:
    """Tokens of a row that stand for images, videos and sounds, as the template names them."""
    tokens = row["input_ids"]
    ids = [token for token in getattr(template, "placeholder_tokens", ()) if isinstance(token, int)]
    return int(torch.isin(tokens, torch.tensor(ids, dtype=tokens.dtype)).sum()) if ids else 0


def merge_size(template: Any) -> int | None:
    """How many patches in height and width a vision token stands for, where the image processor says so."""
    size = getattr(getattr(template.processor, "image_processor", None), "merge_size", None)
    return size if isinstance(size, int) else None


def patch_size_of(template: Any) -> tuple[int, int] | None:
    """Height and width of the patches of a template's model, in pixels; None where its config does not say."""
    config = getattr(template, "config", None)
    for name in ("vision_config", "vit_config", "visual"):
        vision = getattr(config, name, None)
        size = vision.get("patch_size") if isinstance(vision, Mapping) else getattr(vision, "patch_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, (list, tuple)) and len(size) >= 2:
            return int(size[-2]), int(size[-1])
    return None


def num_images_of(row: Mapping[str, Any]) -> int:
    """Images that ms-swift takes from a row: those it lists, else `<img>` tags whose file is there."""
    named = list(media(row))
    listed = sum(medium.kind == "image" for medium in named)
    return listed or sum(medium.kind == "tag" and os.path.isfile(medium.value) for medium in named)


def _num_images(sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> int:
    grids = [grid for name in IMAGE_GRIDS for grid in _leaves(sample.get(name))]
    if grids:
        return sum(map(len, grids))
    if row is not None:
        has_vision = any(sample.get(name) is not None for name in (*GRIDS, *PIXELS))
        return num_images_of(row) if has_vision else 0  # a text model leaves the images of a row alone
    sizes = sample.get("image_sizes")
    return 0 if sizes is None else len(sizes)


def _aspect(sample: Mapping[str, Any]) -> float:
    names = (*IMAGE_GRIDS, "video_grid_thw", "image_sizes")
    shapes = [shape for name in names for grid in _leaves(sample.get(name)) for shape in grid.tolist()]
    sides = [shape[-2:] for shape in shapes if isinstance(shape, list)]
    return max((max(height / width, width / height) for height, width in sides), default=0.0)


def _patches(value: Any, height: int, width: int) -> int:
    """Of pixels (..., channels, height, width), or of patches that are flat already (..., patches, numbers)."""
    if isinstance(value, torch.Tensor) and value.dim() in (2, 3):  # a picture of three dimensions comes in a list
        return prod(value.shape[:-1])
    return sum(
        prod(pixels.shape[:-3]) * (pixels.shape[-2] // height) * (pixels.shape[-1] // width)
        for pixels in _leaves(value)
        if pixels.ndim > 2
    )


def _leaves(value: Any) -> Iterator[Any]:
    """The arrays in a value: templates put them into lists, tuples, mappings and objects with attributes."""
    if value is None:
        return
    if isinstance(value, torch.Tensor) or hasattr(value, "prod"):
        if value.ndim and len(value):  # a product over nothing would be 1
            yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, Mapping) or hasattr(value, "__dict__"):
        inside = value if isinstance(value, Mapping) else vars(value)
        for name in (*GRIDS, *PIXELS):
            yield from _leaves(inside.get(name))


def size_of(sample: Encoded) -> RowSize:
    """The size of an encoded sample."""
    length = int(sample.get("length") or len(sample["input_ids"]))
    held = contents_of(sample)
    return RowSize(length, held.images, held.patches, num_supervised(sample))


def num_supervised(sample: Encoded) -> int:
    """Tokens of an encoded sample that are predicted: those with a label, but for the first, which nothing precedes."""
    labels = sample.get("labels")
    predicted = [] if labels is None else list(labels)[1:]
    return len(predicted) - predicted.count(NO_LABEL)
