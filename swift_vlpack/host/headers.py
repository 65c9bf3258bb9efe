"""Encode rows without decoding images, by ms-swift's own `template.encode`: images have a size but no pixels.

The same code runs as in training (chat template, system prompt, tools, truncation, pixel limits, resizing), on a copy
of the template (`pixel_free`). The copy's image loader reads headers (`HeaderImage`), and its image processor works on
tensors without memory (`_GridProcessor`).
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
from swift_vlpack.rows.patches import without_frames
from swift_vlpack.rows.urls import Urls

_SHORT, _NUM_KNOWN = 64, 100_000
"""Most characters of a text whose tokens are kept, because short texts come again; and most texts to keep."""


class NoPixels(RuntimeError):
    """A template needs pixels to know a length. The row is then encoded in full."""


class HeaderImage(Image.Image):
    """An image of which only the header is known. Whatever needs more than the header raises `NoPixels`.

    Every attribute of Pillow's image that is neither defined here nor in `_OF_SIZE_AND_MODE` raises, also one that a
    future version adds. So no template can work on pixels that are not there.
    """

    def __init__(  # does not call Pillow's, which would set attributes that are refused here
        self, size: tuple[int, int], mode: str = "RGB", opened: Image.Image | None = None, *, is_made: bool = False
    ) -> None:
        """Keep the facts of a header. `opened` is Pillow's image; `is_made` means converted or resized from it."""
        self._size = size
        self._mode = mode
        self._opened = opened
        self._is_made = is_made
        self._info: dict[Any, Any] | None = None

    @classmethod
    def of(cls, image: Image.Image) -> HeaderImage:
        """Make one from an image that Pillow has opened and not decoded."""
        return image if isinstance(image, cls) else cls(image.size, image.mode, image)

    @property
    def opened(self) -> Image.Image | None:
        """Return Pillow's image of the file, which must not be decoded."""
        return self._opened

    @property
    def format(self) -> str | None:  # type: ignore[override]
        """Return the format of the file; None if this image was made from it, as Pillow does."""
        return self._opened.format if self._opened is not None and not self._is_made else None

    @property
    def format_description(self) -> str | None:  # type: ignore[override]
        """Return the name of the format of the file; None if this image was made from it."""
        return self._opened.format_description if self._opened is not None and not self._is_made else None

    @property
    def info(self) -> dict[Any, Any]:  # type: ignore[override]
        """Return the metadata of the header. Raises `NoPixels` if decoding would change it."""
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
        """Return EXIF data. Raises `NoPixels` if the header does not have all of it."""
        if self._is_made or self._opened is None:
            plain = Image.Image()
            plain.info = self.info
            return plain.getexif()
        try:
            return self._opened.getexif()
        except Exception as error:  # the file is closed, or has its EXIF data after the pixels
            raise NoPixels(f"EXIF data of a {self.format} image cannot be read without decoding it") from error

    def copy(self) -> HeaderImage:
        """Return an image of equal size and mode."""
        return self.convert(self.mode)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> HeaderImage:
        return HeaderImage(self.size, self.mode, self._opened, is_made=self._is_made)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> HeaderImage:
        """Return an image of another mode."""
        if mode is None and self.mode == "P":
            _refuse("convert", "without a mode, which is in the palette")
        return HeaderImage(self.size, mode or self.mode, self._opened, is_made=True)

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> HeaderImage:
        """Return an image of another size."""
        return HeaderImage((int(size[0]), int(size[1])), self.mode, self._opened, is_made=True)

    def __eq__(self, other: object) -> bool:
        return self is other or _refuse("__eq__")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Raise `NoPixels` for attributes that only the opened image has (`n_frames`), else `AttributeError`."""
        opened = None if self.__dict__.get("_is_made") else self.__dict__.get("_opened")
        if name in vars(Image.Image()) or name in getattr(opened, "__dict__", ()) or hasattr(type(opened), name):
            _refuse(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _refuse(name: str, why: str = "") -> NoReturn:
    raise NoPixels(f"the template asked for {name!r} {why or 'of an image of which only the header was read'}")


def _refusing(name: str, found: Any) -> Any:
    """Make a replacement for an attribute of Pillow's image. A method raises only if called, so `hasattr` works."""
    if name.startswith("__") or not callable(found):
        return property(lambda self: _refuse(name))
    return lambda self, *args, **options: _refuse(name)


_OF_SIZE_AND_MODE = frozenset(
    ("size", "width", "height", "mode", "getbands", "tell", "close", "__enter__", "__exit__", "__repr__")
)
"""Attributes that Pillow's image derives from size and mode, or that need no pixel."""
_OF_EVERY_CLASS = frozenset(
    ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
     "__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__slots__")
)  # fmt: skip
_DECODED_AS_OPENED = ("JPEG", "MPO", "BMP", None)
"""Formats for which decoding does not change the metadata of the header."""

for _name, _found in vars(Image.Image).items():
    if _name not in _OF_SIZE_AND_MODE | _OF_EVERY_CLASS and _name not in vars(HeaderImage):
        setattr(HeaderImage, _name, _refusing(_name, _found))


class _GridProcessor:
    """Take the place of the image processor, and return grids without pixels.

    If the template has resized the images already, the grid follows from their size. Otherwise the real processor gets
    tensors without memory (device `meta`), on which torch computes shapes only. A processor that works on arrays cannot
    take such tensors and raises an error.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        # While an object is copied or unpickled, Python looks for such names before there is a `_real`.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real, name)

    def __call__(self, images: list[Image.Image], *args: Any, **options: Any) -> Any:
        """Return what the real processor would, without pixel values."""
        if not all(isinstance(image, HeaderImage) for image in images):
            raise NoPixels("the template hands something else than its images to the image processor")
        if options.get("do_resize", True) or not hasattr(self._real, "merge_size"):
            frames = [torch.empty((3, image.height, image.width), dtype=torch.uint8, device="meta") for image in images]
            return self._real(frames, *args, **options)
        patch = self._real.patch_size
        unit = patch * self._real.merge_size
        if uneven := [image.size for image in images if image.width % unit or image.height % unit]:
            raise RuntimeError(
                f"size {uneven[0]} is not a multiple of {unit}: no tag in the text belongs to this image"
            )
        grids = [(1, image.height // patch, image.width // patch) for image in images]
        return {"image_grid_thw": np.array(grids)}


def pixel_free(template: Any, urls: Urls | None = None) -> Any:
    """Return a copy of the template that encodes rows without decoding images, and raises `NoPixels` if it cannot."""
    own = _reading_headers(template)
    seen: list[HeaderImage] = []
    load = _loader_of(template)
    own._load_image = partial(_noted, seen, load if load is not _header_of else partial(_header_from, urls or Urls()))
    # Set an attribute of the copy and not of the class, which training uses.
    own.encode = partial(_encode, own, seen)
    own.create_mm_token_type_ids = lambda *_: None  # skip these ids: no size depends on them
    return own


def branch_template(template: Any) -> Any:
    """Copy a training template into one that encodes rows without pixels, for rows whose media another row brings.

    Several threads may use the copy, and it can be pickled. Unlike a `pixel_free` template, it makes every field that
    training needs.
    """
    own, load = _reading_headers(template), template._load_image
    if isinstance(load, partial) and load.func is _load_from:  # as `reading_urls` has it
        own._load_image = partial(_header_from, load.args[0])
    else:
        own._load_image = _loader_of(template)
    own.encode = partial(_encode_branch, own)
    return own


def _encode_branch(template: Any, row: dict[str, Any], **options: Any) -> Any:
    videos = row.get("videos") or ()
    if any(isinstance(one, (list, tuple)) for one in videos):
        raise NoPixels("the frames of a video that is a list of images are decoded")
    with without_frames() if videos else nullcontext():
        return type(template).encode(template, _Row(row), **options)


def _reading_headers(template: Any) -> Any:
    own = copy.copy(template)
    if hasattr(template.processor, "image_processor"):
        own.processor = copy.copy(template.processor)
        own.processor.image_processor = _GridProcessor(template.processor.image_processor)
    own._tokenize = _Tokenizer(template)
    own._split_special_tokens = partial(_split_special_tokens, _special_tokens())
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
    """Return a copy of the template that fetches images with `urls`.

    If a plugin has replaced ms-swift's way to load images, the template is returned unchanged.
    """
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
    """Return the kind of an image: format and mode of its file, and the powers of two of its size and aspect."""
    width, height = image.size
    opened = image.opened if image.opened is not None else image
    aspect = max(width, height) // max(1, min(width, height))
    return f"{opened.format} {opened.mode} 2^{(width * height).bit_length()} {1 << aspect.bit_length() - 1}:1"


class _Row(dict[str, Any]):
    """A row that is quick to copy, because `Template.encode` begins with a deep copy."""

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
    """Do what `Template._tokenize` does, by the tokenizer's backend: the way there takes longer than tokenizing.

    Keeps the tokens of short texts, such as roles and separators, which come again in every row.
    """

    def __init__(self, template: Any) -> None:
        self._full = template._tokenize
        self._full("a")  # at its first call, a tokenizer passes its settings to its backend
        self._backend = getattr(template.tokenizer, "backend_tokenizer", None)
        self._known: dict[str, list[int]] = {}

    def __call__(self, context: Any, **kwargs: Any) -> Any:
        if self._backend is None or kwargs or not isinstance(context, str):
            return self._full(context, **kwargs)
        if context in self._known:
            # Copy the list, because the caller may append to it.
            return list(self._known[context])
        tokens: list[int] = self._backend.encode(context, add_special_tokens=False).ids
        if len(context) <= _SHORT and len(self._known) < _NUM_KNOWN:
            self._known[context] = tokens
            return list(tokens)
        return tokens


def _split_special_tokens(pattern: re.Pattern[str], contexts: list[Any], scales: list[float]) -> Any:
    """Do what `Template._split_special_tokens` does, without compiling its pattern for every text."""
    split = [[part for part in pattern.split(c) if part] if isinstance(c, str) else [c] for c in contexts]
    return list(chain(*split)), [scale for scale, parts in zip(scales, split, strict=True) for _ in parts]


def _loader_of(template: Any) -> Callable[[Any, bool], Any]:
    """Return a function that loads an image without pixels.

    If a plugin has replaced ms-swift's way to load images, the plugin's function is called, even if it decodes.
    """
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
    """Load an image by a function of the user, which may turn or crop it, and keep only its size and mode."""
    loaded = load(image, load_images)
    return HeaderImage.of(loaded) if isinstance(loaded, Image.Image) else loaded


def _header_of(image: Any, load_images: bool) -> Any:
    """Load only the header of the image that `Template._load_image` would load. Neither applies EXIF orientation."""
    if not load_images:
        return Template._load_image(image, load_images)
    if isinstance(image, dict) and "bytes" in image:
        image = image["bytes"] or image["path"]
    if isinstance(image, str) and not image.startswith("http"):
        path = vision_utils._check_path(image.strip())
        # Pass an open file and not its path, because Pillow tries the format of a path's suffix first.
        image = open(path, "rb") if path and os.path.exists(path) else vision_utils.load_file(image)  # noqa: SIM115
    else:
        image = vision_utils.load_file(image)
    if not isinstance(image, Image.Image):
        with image, Image.open(image) as image:
            # The file is closed after this block, so a template that asks for pixels gets an error that says why.
            image.load = _refuse_to_decode
    header = HeaderImage.of(image)
    return header if header.mode == "RGB" else header.convert("RGB")


def _refuse_to_decode(*args: Any) -> NoReturn:
    _refuse("load")
