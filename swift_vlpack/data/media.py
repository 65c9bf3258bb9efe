"""Which files a row names, and in what state they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_TAG = re.compile(r"<img>(.+?)</img>")  # ms-swift takes a path from it


def media_texts(row: Mapping[str, Any]) -> Iterator[str]:
    """Every text of the row that may name a file of pixels or sound: a path, a URL, or the content in base64."""
    for column in ("images", "videos", "audios"):
        yield from _texts(row.get(column))
    messages = row.get("messages")
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and "<img>" in content:
            yield from _TAG.findall(content)
        for item in content if isinstance(content, (list, tuple)) else ():
            if isinstance(item, Mapping) and item.get("type") != "text":
                yield from _texts(list(item.values()))


def file_state(path: str) -> os.stat_result | None:
    """The state of a file, where ms-swift would look for it; None where nothing is, or the text is no path."""
    for folder in ("", os.environ.get("ROOT_IMAGE_DIR", "")):  # ms-swift's own variable for relative paths
        with suppress(OSError, ValueError):
            return os.stat(os.path.join(folder, os.path.expanduser(path.strip())))
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([inner for name, inner in value.items() if name in ("path", "url")])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
