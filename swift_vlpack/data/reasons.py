"""Why a row cannot be used: one word that is counted, and a sentence for the log that names its files."""

from __future__ import annotations

import stat
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from swift_vlpack.data.media import file_state, media_texts

REASONS = (
    "",
    "encode_failed",
    "over_max_length",
    "file_missing",
    "file_is_folder",
    "file_empty",
    "image_unreadable",
    "image_too_large",
    "aspect_ratio",
    "images_malformed",
    "no_messages",
    "video_reader_missing",
    "video_unreadable",
)
"""All there are; files of lengths store the position in this list, so new ones go to the end."""

_BY_ERROR = {
    "MaxLengthError": "over_max_length",
    "FileNotFoundError": "file_missing",
    "IsADirectoryError": "file_is_folder",
    "UnidentifiedImageError": "image_unreadable",
    "DecompressionBombError": "image_too_large",
}
_VIDEO_READERS = ("torchcodec", "decord")  # qwen_vl_utils asks torchvision where they fail, which reads none
_LONGEST_PATH = 2000  # as in ms-swift
_LONGEST_SHOWN = 200  # characters
_SHORTEST_IMAGE = 40  # characters in base64, of a GIF of one pixel


def reason_for(error: Exception, row: Mapping[str, Any]) -> str:
    """The counted reason of a failure: one word, stable over messages."""
    # Files first: whatever an image library says of them, these are what a user can see. One missing path in four
    # has a length that base64 can have, and ms-swift then decodes it instead of opening it.
    known = _BY_ERROR.get(type(error).__name__)
    if known == "over_max_length":
        return known
    if not row.get("messages"):
        return "no_messages"
    is_video = bool(row.get("videos")) and _is_missing_reader(error)
    if is_video and not any(map(find_spec, _VIDEO_READERS)):
        return "video_reader_missing"
    if not all(map(_is_image, _as_list(row.get("images")))):
        return "images_malformed"
    for path in media_paths(row):
        if found := _of_file(path):
            return found
    if is_video:
        return "video_unreadable"
    if known is not None:
        return known
    if "aspect ratio" in str(error):
        return "aspect_ratio"
    return "image_unreadable" if _is_from_pillow(error) else "encode_failed"


def described(error: Exception, row: Mapping[str, Any], reason: str) -> str:
    """The failure in words, with the files of the row, and what to do where that is known."""
    said = f"{type(error).__name__}: {error}"
    paths = [path for path in media_paths(row) if path not in said]
    where = f" (files: {', '.join(paths)})" if paths else ""
    way_out = ""
    if reason == "video_reader_missing":
        way_out = "; to read videos, install torchcodec or decord"
    elif reason == "images_malformed":
        given = repr([item for item in _as_list(row.get("images")) if not _is_image(item)])
        way_out = f"; not a path, a URL or the content of an image: {given[:_LONGEST_SHOWN]}"
    return said + where + way_out


def is_lasting(error: Exception, reason: str, row: Mapping[str, Any]) -> bool:
    """Whether the same row in the same state will fail again, so that the reason may be remembered."""
    if reason == "over_max_length":
        return True
    if reason in ("file_missing", "video_reader_missing") or isinstance(error, MemoryError):
        return False
    if any(text.startswith("http") for text in media_texts(row)):
        return False
    if not isinstance(error, OSError) or type(error).__name__ in _BY_ERROR:
        return True
    return reason == "image_unreadable" and error.errno is None  # Pillow says so of content; a disk has a number


def is_of_pixels(reason: str) -> bool:
    """Whether a row can fail for it although its headers are good."""
    return reason not in ("over_max_length", "aspect_ratio")


def media_paths(row: Mapping[str, Any]) -> Iterator[str]:
    """The texts in the row that are paths, or look like one: with a dot, or too short for an image in base64."""
    for text in media_texts(row):
        is_short = len(text) <= _LONGEST_PATH and not text.startswith(("http", "data:"))
        if is_short and ("." in text or len(text) < _SHORTEST_IMAGE or file_state(text) is not None):
            yield text


def _of_file(path: str) -> str | None:
    """What is wrong with a file as such, if anything is."""
    state = file_state(path)
    if state is None:
        return "file_missing"
    if stat.S_ISDIR(state.st_mode):
        return "file_is_folder"
    return "file_empty" if state.st_size == 0 else None


def _is_missing_reader(error: Exception) -> bool:
    return isinstance(error, ImportError) or (isinstance(error, AttributeError) and "read_video" in str(error))


def _is_from_pillow(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("PIL.") for frame, _ in frames)


def _is_image(item: Any) -> bool:
    """Whether an entry of `images` is of a form that can be an image at all."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path") or item.get("url")
    return (isinstance(item, (str, bytes)) and bool(item)) or hasattr(item, "getbbox")


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]
