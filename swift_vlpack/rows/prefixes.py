"""Find out which rows begin with the same tokens and the same media, from the rows alone, before any is encoded.

A `Head` is everything of a row that decides its tokens through its last medium. Rows with equal heads and equal media
share that beginning, whatever follows it:

>>> ask = lambda text: {"messages": [{"role": "user", "content": f"<image>{text}"}], "images": ["https://a.b/1.jpg"]}
>>> heads = HeadReader()
>>> heads.head(ask("how many?")) == heads.head(ask("which colour?"))
True

Only an encoded row shows how many tokens a prefix has (`prefix_of`, `lengths/prefixes.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_vlpack.rows.contents import NO_LABEL, OF_MEDIA, media_spans
from swift_vlpack.rows.families import PIXELS, MediaTokens
from swift_vlpack.rows.media import is_name, real_file
from swift_vlpack.rows.samples import Encoded

_KINDS = {"images": "image", "videos": "video", "audios": "audio"}
_TAGS = {kind: f"<{kind}>" for kind in _KINDS.values()}
_ANSWERS = ("assistant", "tool_call")
"""Roles whose messages are trained."""
_OBJECT_TAGS = ("<bbox>", "<ref-object>")
_TYPES = ("token_type_ids", "mm_token_type_ids", "image_token_types")
_NUM_VALUES_REMEMBERED = 100_000
_OF_FILE = {"bytes", "path", "url"}
"""Keys of a media entry that name its content; the first key with a value counts."""
_NUM_SHORT = 256  # a text that is longer is not worth remembering as a name


# -- heads of rows ----------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """The beginning of a row, through its last medium."""

    key: bytes = b""
    """A digest of all that decides these tokens, media included; empty if the row cannot share."""
    media: tuple[bytes, ...] = ()
    """A digest of each medium, in order."""


class _Turns(NamedTuple):
    """The parts of a row that decide its head."""

    messages: Sequence[Mapping[str, Any]]
    """The messages without the system prompt."""
    texts: list[str]
    """The text of each message, with a tag in the place of each medium."""
    num_before: int
    """Number of messages before the first answer."""
    listed: dict[str, list[Any]]
    """The media by kind."""
    kinds: list[str]
    """The kinds of media that the row has."""
    settings: tuple[Any, ...]
    """Pixel limits, system prompt, tools and template arguments."""
    objects: Any
    """Names and boxes of objects."""


class _Unusual(Exception):
    """Raised for a row of a form that this module does not know; such a row shares with no other row."""


class HeadReader:
    """Reads the heads of rows, 15 us each."""

    def __init__(self, max_pixels: int | None = None, system: str | None = None) -> None:
        """Take the settings of one source that change its tokens: `max_pixels` and `system`."""
        self._max_pixels = max_pixels
        self._system = system
        self._names: dict[str, str] = {}

    def head(self, row: Mapping[str, Any]) -> Head:
        """Return the head of a row. If the row has no system prompt, the source's counts."""
        try:
            return self._head(row)
        except (_Unusual, AttributeError, LookupError, TypeError):  # the template will say what is wrong with it
            return Head()

    def _head(self, row: Mapping[str, Any]) -> Head:
        turns = self._turns(row)
        if not turns.kinds:
            return Head()
        media = tuple(_digest(kind[0] + self._name(one)) for kind, values in turns.listed.items() for one in values)
        if not _can_share(turns):
            return Head(media=media)
        last, end = max(
            (at, text.rfind(_TAGS[kind]) + len(_TAGS[kind]))
            for at, text in enumerate(turns.texts[: turns.num_before])
            for kind in turns.kinds
            if _TAGS[kind] in text
        )
        return Head(_digest((_through(turns, last, end), media)), media)

    def _turns(self, row: Mapping[str, Any]) -> _Turns:
        messages = row["messages"]
        system = self._system
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        listed = {kind: _listed(row.get(column)) for column, kind in _KINDS.items()}
        texts = [_text_of(message, listed) for message in messages]
        num_before = next((at for at, one in enumerate(messages) if one["role"] in _ANSWERS), len(messages))
        settings = (self._max_pixels, system, row.get("tools") or None, _given(row.get("chat_template_kwargs")))
        kinds = [kind for kind, values in listed.items() if values]
        objects = _given(row.get("objects"))
        # `_Turns(...)` would take twice as long, and every row of a run comes here.
        return tuple.__new__(_Turns, (messages, texts, num_before, listed, kinds, settings, objects))

    def _name(self, value: Any) -> str:
        """Return a name that equals another one if the two media are the same; the name of a file has its state."""
        if isinstance(value, (list, tuple)):  # the frames of a video
            return repr([self._name(one) for one in value])
        further = ""
        if isinstance(value, Mapping):
            if not value.keys() <= _OF_FILE:  # such as limits of its pixels
                more = {name: one for name, one in value.items() if name not in _OF_FILE and one is not None}
                further = repr(more) if more else ""
            value = value.get("bytes") or value.get("path") or value.get("url")
        if isinstance(value, str):
            known = self._names.get(value)
            if known is None:
                known = self._name_of_text(value)
                if len(value) < _NUM_SHORT and len(self._names) < _NUM_VALUES_REMEMBERED:
                    self._names[value] = known
            return known + further
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"={hashlib.blake2b(value, digest_size=16).hexdigest()}{further}"
        raise _Unusual

    def _name_of_text(self, value: str) -> str:
        text = value.strip()
        if text.startswith("http"):
            return f"u{text}"
        if (file := real_file(text)) is not None:
            # If the file changes, the remembered length of its prefix is not found.
            state = file.state
            return f"f{_real_path(file.path)}\n{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"
        if is_name(text):
            raise _Unusual  # a missing file; the row cannot be encoded
        return f"={hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


def _real_path(path: str) -> str:
    folder, name = os.path.split(path)
    # `realpath` asks for the state of each folder on the way, ten times the time of all else here.
    return os.path.realpath(path) if os.path.islink(path) else os.path.join(_real_folder(folder), name)


_real_folder = lru_cache(10_000)(os.path.realpath)


def _can_share(turns: _Turns) -> bool:
    """Tell whether all media come before the first answer. Adds missing tags to the first text, as ms-swift does."""
    system, texts = turns.settings[1], turns.texts
    if isinstance(system, str) and any(_TAGS[kind] in system for kind in turns.kinds):
        return False
    for kind in turns.kinds:
        missing = len(turns.listed[kind]) - sum(text.count(_TAGS[kind]) for text in texts)
        if missing < 0:
            return False
        texts[0] = _TAGS[kind] * missing + texts[0]
    after = texts[turns.num_before :]  # all texts of a document, as for `swift pt`
    return not any(_TAGS[kind] in text for text in after for kind in turns.kinds)


def _listed(value: Any) -> list[Any]:
    if not value:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _given(values: Any) -> Any:
    """Return a mapping without the entries that a loader added because another row has them."""
    if not isinstance(values, Mapping):
        return values or None
    return {name: value for name, value in values.items() if value is not None} or None


def _text_of(message: Mapping[str, Any], listed: dict[str, list[Any]]) -> str:
    """Return the text of a message, with a tag in the place of each medium; media are added to `listed`."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None or (isinstance(content, Mapping) and message["role"] in _ANSWERS):  # the call of a tool
        return ""
    pieces = []
    for item in content:
        kind = item["type"].removesuffix("_url")
        if kind == "text":
            pieces.append(item["text"])
            continue
        pieces.append(_TAGS[kind])
        value = item[item["type"]]
        if value is not None:
            listed[kind].append(value)
    return "".join(pieces)


def _through(turns: _Turns, last: int, end: int) -> bytes:
    """Return a digest of all that decides the tokens through character `end` of message `last`, where a tag ends."""
    messages, texts, objects, settings = turns.messages, turns.texts, turns.objects, turns.settings
    before = [(one["role"], text, one.get("loss")) for one, text in zip(messages[:last], texts, strict=False)]
    text, message = texts[last], messages[last]
    # If no text follows the medium, the next token may be a target. Then the prefix is shorter, so these rows get keys
    # of their own.
    of_last = (message["role"], text[:end], bool(text[end:].strip()), message.get("loss"))
    if objects and any(tag in one for tag in _OBJECT_TAGS for one in (*texts[:last], text[:end])):
        settings += (repr(objects),)
    return _digest((settings, bool(objects), before, of_last))


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(repr(content).encode(errors="surrogatepass"), digest_size=16).digest()


# -- prefixes of encoded rows -----------------------------------------------------------------------------------------


def prefix_of(sample: Encoded, tokens: MediaTokens) -> int:
    """Count the tokens of a sample through the closing token of its last medium; 0 if it cannot share them.

    The prefix is shorter if a target follows soon: neither its tokens nor the token after it may be targets, and the
    sample must have at least one token after it. The prefix always has all tokens that stand for its media.
    """
    spans = media_spans(sample, tokens)
    if not spans:  # a family whose tensors are not known, or a text model, which leaves the media of a row alone
        return 0
    ids, last = sample["input_ids"], spans[-1]
    stop = min(last.stop, len(ids) - 1, _first_target(sample.get("labels"), len(ids)) - 1)
    placeholders = set(tokens.placeholders.values())
    least = 1 + max((at for at in range(last.start, last.stop) if int(ids[at]) in placeholders), default=0)
    return stop if stop >= least else 0


def _first_target(labels: Any, num_tokens: int) -> int:
    if labels is None:
        return num_tokens
    return next((at for at, label in enumerate(labels) if int(label) != NO_LABEL and at), num_tokens)


# -- compare encoded rows ---------------------------------------------------------------------------------------------


def how_prefixes_differ(sample: Encoded, other: Encoded, prefix: int) -> str | None:
    """Say how the first `prefix` tokens of two samples or their media differ; None if both are equal.

    Pixels are compared if the first sample has any; without them, it was encoded by the header of the same image.
    """
    if list(sample["input_ids"][:prefix]) != list(other["input_ids"][:prefix]):
        return "other tokens"
    for name in _TYPES:
        one, two = sample.get(name), other.get(name)
        if one is not None and two is not None and not are_equal(_start_of(one, prefix), _start_of(two, prefix)):
            return f"other {name}"
    for name in sorted(OF_MEDIA if has_pixels(sample) else OF_MEDIA.difference(PIXELS)):
        if not are_equal(sample.get(name), other.get(name)):
            return f"other {name}"
    return None


def _start_of(value: Any, prefix: int) -> Any:
    return value[..., :prefix] if isinstance(value, torch.Tensor) else value[:prefix]


def has_pixels(sample: Encoded) -> bool:
    """Tell whether a sample has pixels."""
    return any(sample.get(name) is not None for name in PIXELS)


def are_equal(one: Any, other: Any) -> bool:
    """Tell whether two values of a field are equal: tensors and arrays by content, also inside lists and mappings."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


def without_pixels(sample: Encoded) -> Encoded:
    """Return a sample without the tensors of its pixels: its grids and tokens stay."""
    return {
        # A stand-in for an image processor may give arrays where the real one gives tensors.
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in sample.items()
        if name not in PIXELS and not (isinstance(value, torch.Tensor) and value.device.type == "meta")
    }
