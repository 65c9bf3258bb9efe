"""The images of a row: what they are called, how large their files are, and small copies of them."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from PIL import Image

from swift_vlpack.pages.values import Picture
from swift_vlpack.rows.media import is_name, media, real_file

THUMBNAIL = 128
"""Pixels of the longer side; some 4 KB as JPEG."""
_QUALITY = 70


def pictures_of(row: Mapping[str, Any], runs: Sequence[int], *, with_thumbnails: bool = False) -> list[Picture]:
    """The images and videos of a row, in order. `runs` are its runs of vision tokens, one each where that adds up."""
    named = [medium for medium in media(row) if medium.kind in ("image", "video", "tag")]
    nums = list(runs) if len(runs) == len(named) else [None] * len(named)
    return [
        _picture("video" if medium.kind == "video" else "image", medium.value, num, with_thumbnails)
        for medium, num in zip(named, nums, strict=True)
    ]


def _picture(kind: str, value: Any, num_tokens: int | None, with_thumbnails: bool) -> Picture:
    name = value if isinstance(value, str) and (is_name(value) or value.startswith("http")) else ""
    known = Picture(kind, num_tokens, name=name)
    # A video has no header that Pillow reads; an image of the network is not fetched to be looked at.
    file = None if kind == "video" else _file(value)
    if file is None:
        return known
    with suppress(Exception), Image.open(file) as image:  # whatever a broken file makes of Pillow, it has no size
        known = known._replace(width=image.width, height=image.height)
        if with_thumbnails:
            known = known._replace(thumbnail=_thumbnail(image))
    return known


def _file(value: Any) -> str | io.BytesIO | None:
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        return None
    if found := real_file(value):
        return found.path
    with suppress(ValueError, binascii.Error):
        return io.BytesIO(base64.b64decode(value.partition("base64,")[2] or value))
    return None


def _thumbnail(image: Image.Image) -> str:
    image.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))  # a large JPEG is decoded at a fraction of its size
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    small = Image.new("RGB", image.size, "white")
    rgba = image.convert("RGBA")
    small.paste(rgba, mask=rgba.getchannel("A"))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
