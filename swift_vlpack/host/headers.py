"""Sizes of rows from image headers: ms-swift's own `template.encode`, with images that have a size but no pixels.

The same code runs as in training (chat template, system prompt, tools, truncation, pixel limits, resizing), on a
copy of the template whose image loader reads headers and whose image processor answers with a grid and no pixels.
"""

from __future__ import annotations

import copy
import os
import re
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from swift.template import Template
from swift.template.vision_utils import _check_path, load_file

from swift_vlpack.host.videos import without_frames

_SHORT, _NUM_KNOWN = 64, 100_000  # characters of a text whose tokens are kept, and how many of them


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
    """Stands in for the image processor.

    Of images that are resized already the grid is known. Others go through the real processor as tensors without
    memory, on which torch computes shapes only; a processor that works on arrays cannot do that, and says so.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real, name)

    def __call__(self, images: list[Image.Image], *args: Any, **options: Any) -> Any:
        """What the processor says of these images, without their pixels."""
        if not all(isinstance(image, HeaderImage) for image in images):
            raise NoPixels("the template hands something else than its images to the image processor")
        if options.get("do_resize", True) or not hasattr(self._real, "merge_size"):
            frames = [torch.empty((3, image.height, image.width), dtype=torch.uint8, device="meta") for image in images]
            return self._real(frames, *args, **options)
        patch = self._real.patch_size
        unit = patch * self._real.merge_size
        if uneven := [image.size for image in images if image.width % unit or image.height % unit]:
            raise RuntimeError(f"size {uneven[0]} is no multiple of {unit}: no tag in the text belongs to this image")
        grids = [(1, image.height // patch, image.width // patch) for image in images]
        return {"image_grid_thw": np.array(grids)}


def pixel_free(template: Any) -> Any:
    """A copy of the template that encodes rows without decoding an image; raises `NoPixels` where that cannot be."""
    own = copy.copy(template)
    if hasattr(template.processor, "image_processor"):
        own.processor = copy.copy(template.processor)
        own.processor.image_processor = _GridProcessor(template.processor.image_processor)
    own._load_image = _header_of
    own._tokenize = _Tokenizer(template)
    own._split_special_tokens = partial(_split_special_tokens, _special_tokens())
    own.encode = partial(_encode, own)
    own.create_mm_token_type_ids = lambda *_: None  # as long as the tokens, and not asked for
    return own


def _encode(template: Any, row: dict[str, Any], **options: Any) -> Any:
    with without_frames() if row.get("videos") else nullcontext():
        return type(template).encode(template, _Row(row), **options)


class _Row(dict[str, Any]):
    """A row that is quick to copy; `Template.encode` begins with a copy."""

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        copied: dict[str, Any] = _copied(dict(self))
        return copied


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _special_tokens() -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, Template.special_tokens))})")


class _Tokenizer:
    """`Template._tokenize` without the detours, which take longer than the tokenizer itself; short texts come again."""

    def __init__(self, template: Any) -> None:
        self._full = template._tokenize
        self._full("a")  # the tokenizer's own settings reach its backend with its first call
        self._backend = getattr(template.tokenizer, "backend_tokenizer", None)
        self._known: dict[str, list[int]] = {}

    def __call__(self, context: Any, **kwargs: Any) -> Any:
        if self._backend is None or kwargs or not isinstance(context, str):
            return self._full(context, **kwargs)
        if context in self._known:
            return list(self._known[context])
        tokens: list[int] = self._backend.encode(context, add_special_tokens=False).ids
        if len(context) <= _SHORT and len(self._known) < _NUM_KNOWN:
            self._known[context] = tokens
            return list(tokens)
        return tokens


def _split_special_tokens(pattern: re.Pattern[str], contexts: list[Any], scales: list[float]) -> Any:
    """`Template._split_special_tokens`, without building its pattern for every text."""
    split = [[part for part in pattern.split(c) if part] if isinstance(c, str) else [c] for c in contexts]
    return list(chain(*split)), [scale for scale, parts in zip(scales, split, strict=True) for _ in parts]


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
