"""Sizes of rows from image headers: ms-swift's own `template.encode`, with images that have a size but no pixels.

The same code runs as in training (chat template, system prompt, tools, truncation, pixel limits, resizing), on a
copy of the template whose image loader reads headers and whose image processor answers with a grid and no pixels.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from swift.template import Template, vision_utils
from swift.template import base as template_base

from swift_vlpack.rows.media import url_of
from swift_vlpack.rows.urls import Urls
from swift_vlpack.rows.video_readers import without_frames

_SHORT, _NUM_KNOWN = 64, 100_000  # characters of a text whose tokens are kept, and how many of them


class NoPixels(RuntimeError):
    """A template needs pixels to know a length; its rows are encoded in full."""


class HeaderImage(Image.Image):
    """An image of which only the header is known: it answers what a header answers, and refuses everything else.

    Every attribute of Pillow's image that is not defined here or in `_OF_SIZE_AND_MODE` raises `NoPixels`, those of
    future versions too, so that no template works on pixels that are not there.
    """

    def __init__(  # Pillow's own would set what is refused here
        self, size: tuple[int, int], mode: str = "RGB", opened: Image.Image | None = None, *, is_made: bool = False
    ) -> None:
        """`opened` is the file's image; `is_made` says that this one came out of it by converting or resizing."""
        self._size = size
        self._mode = mode
        self._opened = opened
        self._is_made = is_made
        self._info: dict[Any, Any] | None = None

    @classmethod
    def of(cls, image: Image.Image) -> HeaderImage:
        """What is known of an image before its pixels are asked for."""
        return image if isinstance(image, cls) else cls(image.size, image.mode, image)

    @property
    def opened(self) -> Image.Image | None:
        """The image of the file, which is not to be decoded."""
        return self._opened

    @property
    def format(self) -> str | None:  # type: ignore[override]
        """That of the file; none of an image that was made from it."""
        return self._opened.format if self._opened is not None and not self._is_made else None

    @property
    def format_description(self) -> str | None:  # type: ignore[override]
        """That of the file; none of an image that was made from it."""
        return self._opened.format_description if self._opened is not None and not self._is_made else None

    @property
    def info(self) -> dict[Any, Any]:  # type: ignore[override]
        """What the header says; refused where decoding would add to it or take from it."""
        if self._info is None:
            self._info = self._found_info()
        return self._info

    def _found_info(self) -> dict[Any, Any]:
        if self._opened is None:
            return {}
        if not self._is_made:
            return self._opened.info
        if self._opened.format not in _DECODED_AS_OPENED or "transparency" in self._opened.info:
            _refuse("info", f"of a decoded {self._opened.format} image")
        return dict(self._opened.info)

    def getexif(self) -> Image.Exif:
        """EXIF data, where the header has all of it."""
        if self._is_made or self._opened is None:
            plain = Image.Image()
            plain.info = self.info
            return plain.getexif()
        try:
            return self._opened.getexif()
        except Exception as error:  # of a file that is closed, or that has it behind the pixels
            raise NoPixels(f"EXIF data of a {self.format} image is not to be had without decoding it") from error

    def copy(self) -> HeaderImage:
        """Of equal size and mode."""
        return self.convert(self.mode)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> HeaderImage:
        return HeaderImage(self.size, self.mode, self._opened, is_made=self._is_made)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> HeaderImage:
        """Take another mode."""
        if mode is None and self.mode == "P":
            _refuse("convert", "without a mode, which is in the palette")
        return HeaderImage(self.size, mode or self.mode, self._opened, is_made=True)

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> HeaderImage:
        """Take another size."""
        return HeaderImage((int(size[0]), int(size[1])), self.mode, self._opened, is_made=True)

    def __eq__(self, other: object) -> bool:
        return self is other or _refuse("__eq__")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Of attributes that only the file's own image has; what that one has not either is missing as everywhere."""
        opened = None if self.__dict__.get("_is_made") else self.__dict__.get("_opened")
        if name in vars(Image.Image()) or name in getattr(opened, "__dict__", ()) or hasattr(type(opened), name):
            _refuse(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _refuse(name: str, why: str = "") -> NoReturn:
    raise NoPixels(f"the template asked for {name!r} {why or 'of an image of which only the header was read'}")


def _refusing(name: str, found: Any) -> Any:
    """In place of an attribute of Pillow's image; a method refuses when it is called, so that it can be looked for."""
    if name.startswith("__") or not callable(found):
        return property(lambda self: _refuse(name))
    return lambda self, *args, **options: _refuse(name)


_OF_SIZE_AND_MODE = frozenset(
    ("size", "width", "height", "mode", "getbands", "tell", "close", "__enter__", "__exit__", "__repr__")
)
"""What Pillow's image works out from these two, or does without any pixel."""
_OF_EVERY_CLASS = frozenset(
    ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
     "__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__slots__")
)  # fmt: skip
_DECODED_AS_OPENED = ("JPEG", "MPO", "BMP", None)
"""Formats whose decoding leaves the info of the header as it is."""

for _name, _found in vars(Image.Image).items():
    if _name not in _OF_SIZE_AND_MODE | _OF_EVERY_CLASS and _name not in vars(HeaderImage):
        setattr(HeaderImage, _name, _refusing(_name, _found))


class _GridProcessor:
    """Stands in for the image processor.

    Of images that are resized already the grid is known. Others go through the real processor as tensors without
    memory, on which torch computes shapes only; a processor that works on arrays cannot do that, and says so.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        # Python looks for such names itself, on a class that is being copied or pickled, before there is a `_real`.
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


def pixel_free(template: Any, urls: Urls | None = None) -> Any:
    """A copy of the template that encodes rows without decoding an image; raises `NoPixels` where that cannot be."""
    own = copy.copy(template)
    if hasattr(template.processor, "image_processor"):
        own.processor = copy.copy(template.processor)
        own.processor.image_processor = _GridProcessor(template.processor.image_processor)
    seen: list[HeaderImage] = []
    load = _loader_of(template)
    own._load_image = partial(_noted, seen, load if load is not _header_of else partial(_header_from, urls or Urls()))
    own._tokenize = _Tokenizer(template)
    own._split_special_tokens = partial(_split_special_tokens, _special_tokens())
    # By attribute on the copy: the class is everybody's, and training goes on encoding with it.
    own.encode = partial(_encode, own, seen)
    own.create_mm_token_type_ids = lambda *_: None  # as long as the tokens, and not asked for
    return own


def _encode(template: Any, seen: list[HeaderImage], row: dict[str, Any], **options: Any) -> Any:
    seen.clear()
    with without_frames() if row.get("videos") else nullcontext():
        encoded = type(template).encode(template, _Row(row), **options)
    if isinstance(encoded, dict):
        encoded["header_kinds"] = tuple(map(_kind, seen))
        encoded["header_pixels"] = sum(image.width * image.height for image in seen)
    return encoded


def reading_urls(template: Any, urls: Urls) -> Any:
    """A copy of the template that asks for URLs of images as `urls` does; the same one where somebody put a way of
    loading in place of ms-swift's."""
    if _loader_of(template) is not _header_of:
        return template
    own = copy.copy(template)
    own._load_image = partial(_load_from, urls, template._load_image)
    return own


def _load_from(urls: Urls, load: Callable[[Any, bool], Any], image: Any, load_images: bool) -> Any:
    url = url_of(image) if load_images else None
    return load(image if url is None else urls.open(url).getvalue(), load_images)


def _header_from(urls: Urls, image: Any, load_images: bool) -> Any:
    url = url_of(image) if load_images else None
    return _header_of(image if url is None else urls.open(url, whole=False), load_images)


def _noted(seen: list[HeaderImage], load: Callable[[Any, bool], Any], image: Any, load_images: bool) -> Any:
    loaded = load(image, load_images)
    if isinstance(loaded, HeaderImage):
        seen.append(loaded)
    return loaded


def _kind(image: HeaderImage) -> str:
    """Format and mode in the file, and the classes of size and aspect: powers of two."""
    width, height = image.size
    opened = image.opened if image.opened is not None else image
    aspect = max(width, height) // max(1, min(width, height))
    return f"{opened.format} {opened.mode} 2^{(width * height).bit_length()} {1 << aspect.bit_length() - 1}:1"


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
            # A copy, as the caller may add to what it gets.
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


def _loader_of(template: Any) -> Callable[[Any, bool], Any]:
    """ms-swift's way of loading images without its pixels; where somebody put another in place of it, that one."""
    ours = (
        (template._load_image, template_base),
        (template_base.load_image, vision_utils),
        (vision_utils.load_file, vision_utils),
    )
    if all(_is_of(function, module) for function, module in ours):
        return _header_of
    return partial(_header_of_loaded, template._load_image)


def _is_of(function: Any, module: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == module.__file__


def _header_of_loaded(load: Callable[[Any, bool], Any], image: Any, load_images: bool) -> Any:
    """What is loaded in a way of its own may be turned or cut there, so it is loaded, and only then without pixels."""
    loaded = load(image, load_images)
    return HeaderImage.of(loaded) if isinstance(loaded, Image.Image) else loaded


def _header_of(image: Any, load_images: bool) -> Any:
    """What `Template._load_image` loads, as far as the header. EXIF orientation is not applied there, nor here."""
    if not load_images:
        return Template._load_image(image, load_images)
    if isinstance(image, dict) and "bytes" in image:
        image = image["bytes"] or image["path"]
    if isinstance(image, str) and not image.startswith("http"):
        path = vision_utils._check_path(image.strip())
        # As a file and not by its path: Pillow would try other formats first, by the suffix.
        image = open(path, "rb") if path and os.path.exists(path) else vision_utils.load_file(image)  # noqa: SIM115
    else:
        image = vision_utils.load_file(image)
    if not isinstance(image, Image.Image):
        with image, Image.open(image) as image:
            # The file is closed behind this; whoever asks for pixels hears that there are none.
            image.load = _refuse_to_decode
    header = HeaderImage.of(image)
    return header if header.mode == "RGB" else header.convert("RGB")


def _refuse_to_decode(*args: Any) -> NoReturn:
    _refuse("load")
