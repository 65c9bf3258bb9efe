"""Find the images, videos and sounds that a row names, and their files in the places where ms-swift looks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

_TAG = re.compile(r"<img>(.+?)</img>")  # ms-swift takes the text inside for a path
_SCHEME = "file://"
_LONGEST_PATH = 2000  # as in ms-swift
_CONTENT = re.compile(r"(?!/(?!9j/))[A-Za-z0-9+/\s]{40,}={0,2}")
"""Base64 text at least as long as an image of one pixel. A text that begins with a slash is a path, unless it begins
with `/9j/`, as the base64 of every JPEG does."""
_COLUMNS = {"images": "image", "videos": "video", "audios": "audio"}


class Medium(NamedTuple):
    """An image, video or sound that a row names."""

    place: str
    """Place in the row: `images[0]`, `messages[2].content[0]`."""
    kind: str
    """`image`, `video`, `audio`, or `tag` for an `<img>`, which ms-swift uses only if its file exists."""
    value: Any
    """A path, a URL, base64 text or bytes; anything else is malformed."""


class RealFile(NamedTuple):
    """A file that exists."""

    path: str
    state: os.stat_result


def is_encoded(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is a sample that is encoded already: its media are tensors, whatever its columns name."""
    return row.get("input_ids") is not None


def media(row: Mapping[str, Any]) -> Iterator[Medium]:
    """Yield all media that a row names, in every form that ms-swift documents; none of an encoded sample."""
    if is_encoded(row):
        return
    for column, kind in _COLUMNS.items():
        if (value := row.get(column)) is not None:
            yield from _media(column, kind, value)
    messages = row.get("messages")
    for number, message in enumerate(messages if isinstance(messages, (list, tuple)) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        place = f"messages[{number}].content"
        if isinstance(content, str) and "<img>" in content:
            yield from (Medium(place, "tag", path) for path in _TAG.findall(content))
        for at, item in enumerate(content if isinstance(content, (list, tuple)) else ()):
            named = item.get("type") if isinstance(item, Mapping) else None
            if isinstance(named, str) and named != "text":
                yield from _media(f"{place}[{at}]", named.removesuffix("_url"), item.get(named))


def _media(place: str, kind: str, value: Any) -> Iterator[Medium]:
    value = content_of(value)
    if isinstance(value, (list, tuple)):  # a loader gives an empty list to rows without media
        for at, inner in enumerate(value):
            yield from _media(f"{place}[{at}]", kind, inner)
    elif value is not None:
        yield Medium(place, kind, value)


def content_of(entry: Any) -> Any:
    """Return the part of an entry that ms-swift reads: in a mapping, the first of bytes, path and URL that is set."""
    if not isinstance(entry, Mapping):
        return entry
    return next((entry[name] for name in ("bytes", "path", "url") if entry.get(name)), entry)


def has_surplus_tags(row: Mapping[str, Any]) -> bool:
    """Tell whether the texts of a row have more tags than the row has media.

    ms-swift replaces the first tags by media and trains the remaining tags as plain words. If a row has no media of a
    kind, only `<image>` counts.
    """
    texts = []
    messages = row.get("messages")
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            texts.append(content)
        elif content and isinstance(message, Mapping) and message.get("role") == "user":
            return False  # the parts of its content name their media
    for column, kind in _COLUMNS.items():
        num_tags = sum(text.count(f"<{kind}>") for text in texts)
        if not num_tags:
            continue
        listed = row.get(column)
        num_media = len(listed) if isinstance(listed, (list, tuple)) else int(bool(listed))
        # Do not count `<video>` and `<audio>` in a row without such media: they are common in texts about web pages.
        if num_tags > num_media and (num_media or kind == "image"):
            return True
    return False


def names_of_files(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text of a row that may name a file: paths (also those given together with bytes), URLs, base64."""
    for rejected in ("", "rejected_"):  # a pair of answers
        for column in _COLUMNS:
            if value := row.get(rejected + column):
                yield from _texts(value)
        if messages := row.get(f"{rejected}messages"):
            yield from (one.value for one in media({"messages": messages}) if isinstance(one.value, str))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([value.get("path"), value.get("url")])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def is_name(value: Any) -> bool:
    """Tell whether a value is written like the name of a file: it is neither a URL nor base64 content."""
    is_short = isinstance(value, str) and len(value) <= _LONGEST_PATH and not value.startswith(("http", "data:"))
    return is_short and not _CONTENT.fullmatch(value)


def looks_like_path(value: Any) -> bool:
    """Tell whether a value names a file: it is written like a file's name, or a file of that name exists."""
    return is_name(value) or (isinstance(value, str) and real_file(value) is not None)


def real_file(text: str) -> RealFile | None:
    """Find a file by name where ms-swift looks for it; None if there is none, or the text is not a path."""
    if len(text) > _LONGEST_PATH:
        return None
    for path in _candidates(text.strip()):
        with suppress(OSError, ValueError):
            return RealFile(path, os.stat(path))
    return None


def expected_file(text: str) -> str:
    """Return the full path at which a missing file was expected: below `ROOT_IMAGE_DIR` if that is set."""
    return os.path.abspath(_candidates(text.strip())[-1])


def _candidates(text: str) -> list[str]:
    text = _without_scheme(text) if text.startswith(_SCHEME) else text
    if text.startswith("/"):
        return [text]
    below = os.path.expanduser(os.path.join(os.environ.get("ROOT_IMAGE_DIR", ""), text))
    # ms-swift looks in the working directory before it looks below ROOT_IMAGE_DIR.
    return [text] if below == text else [text, below]


def with_plain_paths(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `file://` URLs, which ms-swift does not open, by plain paths. Returns the row itself if it has none."""
    if not any(text.strip().startswith(_SCHEME) for text in names_of_files(row)):
        return row
    other = {**row, **{column: _plain_paths(row[column]) for column in _COLUMNS if column in row}}
    messages = row.get("messages")
    if isinstance(messages, (list, tuple)):
        other["messages"] = [_with_plain_content(message) for message in messages]
    return other


def _with_plain_content(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    is_text = [isinstance(item, Mapping) and item.get("type") == "text" for item in content]
    plain = [item if kept else _plain_paths(item) for item, kept in zip(content, is_text, strict=True)]
    return {**message, "content": plain}


def _plain_paths(value: Any) -> Any:
    if isinstance(value, str) and value.strip().startswith(_SCHEME):
        return _without_scheme(value.strip())
    if isinstance(value, Mapping):
        return {name: _plain_paths(inner) for name, inner in value.items()}
    return [_plain_paths(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _without_scheme(text: str) -> str:
    path = text.removeprefix(_SCHEME).removeprefix("localhost")
    # Decode URL escapes such as `%20`, unless a file of the undecoded name exists.
    return path if os.path.exists(path) else unquote(path)


def url_of(image: Any) -> str | None:
    """Return the URL of an entry of `images`; None if the entry is not a URL."""
    image = content_of(image)
    return image.strip() if isinstance(image, str) and image.strip().startswith("http") else None


def image_urls(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URLs of a row's images."""
    urls = (url_of(medium.value) for medium in media(row) if medium.kind == "image")
    return (url for url in urls if url is not None)
