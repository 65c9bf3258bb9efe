"""Sizes of rows from image headers: ms-swift's own `template.encode`, with images that have a size but no pixels.

The same code runs as in training (chat template, system prompt, tools, truncation, pixel limits, resizing), on a
copy of the template whose image loader reads headers and whose image processor answers with a grid and no pixels.
"""

from __future__ import annotations

import copy
import os
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from swift.template.vision_utils import _check_path, load_file


class HeaderImage(Image.Image):
    """An RGB image of a size, without pixels: what resizing needs to know, and nothing else."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self._mode = "RGB"
        self._size = size

    def convert(self, *args: Any, **kwargs: Any) -> HeaderImage:
        """Stay RGB."""
        return self

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> HeaderImage:
        """Take another size."""
        return HeaderImage((int(size[0]), int(size[1])))

    def load(self) -> Any:
        """Refuse: whoever asks for pixels needs the full encoding."""
        raise NoPixels("the template asked for the pixels of an image of which only the header was read")


class NoPixels(RuntimeError):
    """A template needs pixels to know a length; its rows are encoded in full."""


class _GridProcessor:
    """Stands in for the image processor: the grid that it would report for images that are resized already."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real, name)

    def __call__(self, images: list[Image.Image], *, do_resize: bool = True, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Grids of `images`; the templates resize before, so a processor that would resize is not imitated."""
        if do_resize or not all(isinstance(image, HeaderImage) for image in images):
            raise NoPixels("the image processor resizes by itself, which is not imitated")
        patch = self._real.patch_size
        grids = [(1, image.height // patch, image.width // patch) for image in images]
        return {"image_grid_thw": torch.tensor(grids)}


def pixel_free(template: Any) -> Any:
    """A copy of the template that encodes rows without decoding an image; raises `NoPixels` where that cannot be."""
    own = copy.copy(template)
    own.processor = copy.copy(template.processor)
    own.processor.image_processor = _GridProcessor(template.processor.image_processor)
    own._load_image = _header_of
    return own


def _header_of(image: Any, load_images: bool) -> Image.Image:
    """What `Template._load_image` loads, as far as the header. EXIF orientation is not applied there, nor here."""
    if isinstance(image, dict) and "bytes" in image:
        image = image["bytes"] or image["path"]
    if isinstance(image, str) and not image.startswith("http"):
        path = _check_path(image.strip())
        image = path if path is not None and os.path.exists(path) else load_file(image)
    else:
        image = load_file(image)
    if isinstance(image, Image.Image):
        return HeaderImage(image.size)
    with Image.open(image if isinstance(image, (str, BytesIO)) else BytesIO(image)) as opened:
        return HeaderImage(opened.size)
