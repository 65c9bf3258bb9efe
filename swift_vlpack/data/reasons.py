"""Why a row cannot be used: one word that is counted, and a sentence for the log that names its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

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
)
"""All there are; files of lengths store the position in this list, so new ones go to the end."""

_BY_ERROR = {
    "MaxLengthError": "over_max_length",
    "FileNotFoundError": "file_missing",
    "IsADirectoryError": "file_is_folder",
    "UnidentifiedImageError": "image_unreadable",
    "DecompressionBombError": "image_too_large",
}
_LONGEST_PATH = 2000  # as in ms-swift
_PASSING = (OSError, MemoryError)
"""Errors that may be gone the next time, of the kinds that are not said of the content."""


def reason_for(error: Exception, row: Mapping[str, Any]) -> str:
    """The counted reason of a failure: one word, stable over messages."""
    # Files first: whatever an image library says of them, these are what a user can see. One missing path in four
    # has a length that base64 can have, and ms-swift then decodes it instead of opening it.
    known = _BY_ERROR.get(type(error).__name__)
    if known == "over_max_length":
        return known
    if not row.get("messages"):
        return "no_messages"
    if row.get("videos") and _is_missing_reader(error):
        return "video_reader_missing"
    for path in media_paths(row):
        if found := _of_file(path):
            return found
    if known is not None:
        return known
    if "aspect ratio" in str(error):
        return "aspect_ratio"
    if any(not isinstance(image, (str, Mapping)) for image in _as_list(row.get("images"))):
        return "images_malformed"
    return "encode_failed"


def described(error: Exception, row: Mapping[str, Any], reason: str) -> str:
    """The failure in words, with the files of the row, and what to do where that is known."""
    said = f"{type(error).__name__}: {error}"
    paths = [path for path in media_paths(row) if path not in said]
    where = f" (files: {', '.join(paths)})" if paths else ""
    way_out = "; install decord or torchcodec to read videos" if reason == "video_reader_missing" else ""
    return said + where + way_out


def is_lasting(error: Exception, reason: str) -> bool:
    """Whether the same row in the same state will fail again, so that the reason may be remembered."""
    return reason not in ("file_missing", "video_reader_missing") and (
        not isinstance(error, _PASSING) or type(error).__name__ in _BY_ERROR
    )


def media_paths(row: Mapping[str, Any]) -> Iterator[str]:
    """The texts in the row's media columns that are paths, or look like one: a dot where base64 has none."""
    for column in ("images", "videos", "audios"):
        for item in _as_list(row.get(column)):
            path = item.get("path") if isinstance(item, Mapping) else item
            if not isinstance(path, str) or len(path) > _LONGEST_PATH or path.startswith(("http", "data:")):
                continue
            if "." in path or os.path.exists(path):
                yield path


def _of_file(path: str) -> str | None:
    """What is wrong with a file as such, if anything is."""
    root = os.environ.get("ROOT_IMAGE_DIR", "")  # ms-swift's own variable for relative paths
    candidates = [os.path.join(folder, os.path.expanduser(path.strip())) for folder in ("", root)]
    found = next((candidate for candidate in candidates if os.path.exists(candidate)), None)
    if found is None:
        return "file_missing"
    if os.path.isdir(found):
        return "file_is_folder"
    return "file_empty" if os.path.getsize(found) == 0 else None


def _is_missing_reader(error: Exception) -> bool:
    return isinstance(error, ImportError) or (isinstance(error, AttributeError) and "read_video" in str(error))


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]
