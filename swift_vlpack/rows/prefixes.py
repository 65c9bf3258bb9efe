"""Find out which rows begin with the same tokens and the same media, from the rows alone, before any is encoded.

A `Head` is everything of a row that decides its tokens through its last medium. Rows with equal heads and equal media
share that beginning, whatever follows it:

>>> ask = lambda text: {"messages": [{"role": "user", "content": f"<image>{text}"}], "images": ["https://a.b/1.jpg"]}
>>> heads = HeadReader()
>>> heads.head(ask("how many?")) == heads.head(ask("which colour?"))
True

Rows with several media may share only their first media (`Head.first`). Rows without media can share their system
turn. Only an encoded row shows how many tokens a prefix has (`prefix_of`, `lengths/prefixes.py`). If a row shares with
no other row although another row has its medium, it is counted with its cause (`Alone`), and each cause says what a
user can do.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_vlpack.errors import DataError
from swift_vlpack.rows.contents import NO_LABEL, OF_MEDIA, MediaSpan, media_spans
from swift_vlpack.rows.families import PIXELS, MediaTokens
from swift_vlpack.rows.media import is_name, real_file
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.rows.shared import Alone

_KINDS = {"images": "image", "videos": "video", "audios": "audio"}
_TAGS = {kind: f"<{kind}>" for kind in _KINDS.values()}
_ANSWERS = ("assistant", "tool_call")
"""Roles whose messages are trained."""
_OBJECT_TAGS = ("<bbox>", "<ref-object>")
_NUM_VALUES_REMEMBERED = 100_000
_OF_FILE = {"bytes", "path", "url"}
"""Keys of a media entry that name its content; the first key with a value counts."""
_OPEN, _CLOSE = "[", "]"
_BYTES_OF_COUNTS = 28  # a digest and three counts, in `FirstMedia.to_bytes`
_NUM_SHORT = 256  # a text that is longer is not worth remembering as a name


# -- heads of rows ----------------------------------------------------------------------------------------------------


class FileState(NamedTuple):
    """The state of a file: equal states of a path mean equal bytes."""

    size: int
    changed_ns: int
    inode_changed_ns: int


class FirstMedia(NamedTuple):
    """The beginning of a row through one of its media, but not the last."""

    digest: bytes
    """The `Head.digest` of a row that has only these media."""
    names: tuple[tuple[int, int], ...]
    """The slices of the row's `Head.media` that name these media: start and end for each kind."""
    num_media: int
    """Number of images, videos and sounds in the beginning."""
    num_of_row: int
    """Number of images, videos and sounds in the row."""

    def to_bytes(self) -> bytes:
        """Return the value as bytes. `first_media_of` reads several values, one after the other."""
        places = [place for part in self.names for place in part]
        counts = struct.pack("<3I", self.num_media, self.num_of_row, len(places))
        return self.digest + counts + struct.pack(f"<{len(places)}I", *places)

    def of(self, media: Sequence[Any]) -> list[Any]:
        """Select the media of the beginning from all media of the row."""
        return [one for start, end in self.names for one in media[start:end]]


def first_media_of(content: bytes) -> Iterator[FirstMedia]:
    """Read values of `FirstMedia.to_bytes`, one after the other."""
    at = 0
    while at < len(content):
        digest, num_media, num_of_row, num_places = struct.unpack_from("<16s3I", content, at)
        places = struct.unpack_from(f"<{num_places}I", content, at + _BYTES_OF_COUNTS)
        yield FirstMedia(digest, tuple(zip(places[::2], places[1::2], strict=True)), num_media, num_of_row)
        at += _BYTES_OF_COUNTS + 4 * num_places


class Head(NamedTuple):
    """The beginning of a row, through its last medium."""

    digest: bytes = b""
    """A digest of everything but the media that decides these tokens; empty if the row cannot share."""
    media: tuple[str, ...] = ()
    """The names of the media, in order; empty for a row without."""
    cause: Alone = Alone.NOTHING_SHARED
    """Why the row cannot share, if that is known already."""
    first: tuple[FirstMedia, ...] = ()
    """The beginnings through each medium before the first answer, without the row's last medium."""


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
    """Reads the heads of rows, 15 us each, and keeps the states of the files that they name."""

    def __init__(self, max_pixels: int | None = None, system: str | None = None) -> None:
        """Take the settings of one source that change its tokens: `max_pixels` and `system`."""
        self.files: dict[str, FileState] = {}
        """States of the files that were named, by the path in their name."""
        self._max_pixels = max_pixels
        self._system = system
        self._names: dict[str, str] = {}

    def take_files(self) -> dict[str, FileState]:
        """Return the states of the files that were named since the last call; each file comes once."""
        files, self.files = self.files, {}
        return files

    def head(self, row: Mapping[str, Any]) -> Head:
        """Return the head of a row. If the row has no system prompt, the source's counts."""
        try:
            return self._head(row)
        except (_Unusual, AttributeError, KeyError, TypeError):  # the template will say what is wrong with it
            return Head()

    def _head(self, row: Mapping[str, Any]) -> Head:
        turns = self._turns(row)
        if not turns.kinds:
            return self._of_text(turns)
        if (cause := self._why_alone(turns)) is not None:
            return Head(media=self._media(turns.listed), cause=cause)
        texts, kinds, num_before = turns.texts, turns.kinds, turns.num_before
        if any(_TAGS[kind] in text for text in texts[num_before:] for kind in kinds):
            return Head(media=self._media(turns.listed), cause=Alone.AFTER_ANSWER, first=self._first_media(turns))
        last, end = max(
            (at, text.rfind(_TAGS[kind]) + len(_TAGS[kind]))
            for at, text in enumerate(texts[:num_before])
            for kind in kinds
            if _TAGS[kind] in text
        )
        media = self._media(turns.listed)
        first = self._first_media(turns) if len(media) > 1 else ()
        return Head(_through(turns, last, end), media, first=first)

    def _first_media(self, turns: _Turns) -> tuple[FirstMedia, ...]:
        num_names = {kind: [len(self._name(kind, one)) for one in values] for kind, values in turns.listed.items()}
        num_media = sum(map(len, num_names.values()))
        tags = sorted(
            (at, found.end(), kind)
            for at, text in enumerate(turns.texts[: turns.num_before])
            for kind in turns.kinds
            for found in re.finditer(_TAGS[kind], text)
        )
        made, counts = [], Counter[str]()
        for number, (at, end, kind) in enumerate(tags[: num_media - 1], start=1):
            counts[kind] += 1
            names, start = list[tuple[int, int]](), 0
            for of_kind, nums in num_names.items():
                if counts[of_kind]:
                    names.append((start, start + sum(nums[: counts[of_kind]])))
                start += sum(nums)
            made.append(FirstMedia(_through(turns, at, end), tuple(names), number, num_media))
        return tuple(made)

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

    def _why_alone(self, turns: _Turns) -> Alone | None:
        """Say why a row with media shares nothing; None if it can share. Adds missing tags before its first text."""
        system, texts = turns.settings[1], turns.texts
        if isinstance(system, str) and any(_TAGS[kind] in system for kind in turns.kinds):
            return Alone.TAGS
        for kind in turns.kinds:
            missing = len(turns.listed[kind]) - sum(text.count(_TAGS[kind]) for text in texts)
            if missing < 0:
                return Alone.TAGS
            texts[0] = _TAGS[kind] * missing + texts[0]  # as ms-swift does
        return None if turns.num_before else Alone.NO_TOKEN_BETWEEN  # a document, as for `swift pt`

    def _of_text(self, turns: _Turns) -> Head:
        """Return the head of a row without media: everything that decides its system turn."""
        # ms-swift reads `<img>path</img>` in a text as an image if the file exists.
        is_tagged = any("<img>" in text for text in turns.texts)
        if is_tagged or not turns.num_before or turns.messages[0]["role"] != "user":
            return Head()
        return Head(_digest(turns.settings))

    def _media(self, listed: Mapping[str, list[Any]]) -> tuple[str, ...]:
        return tuple(name for kind, values in listed.items() for one in values for name in self._name(kind, one))

    def _name(self, kind: str, value: Any) -> list[str]:
        """Return the name of a medium: several for a video that is a list of frames."""
        if isinstance(value, (list, tuple)):
            return [_OPEN + kind, *(name for one in value for name in self._name(kind, one)), _CLOSE]
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
            return [kind[0] + known + further]
        if isinstance(value, (bytes, bytearray, memoryview)):
            return [f"{kind[0]}={hashlib.blake2b(value, digest_size=16).hexdigest()}{further}"]
        raise _Unusual

    def _name_of_text(self, value: str) -> str:
        text = value.strip()
        if text.startswith("http"):
            return f"u{text}"
        if (file := real_file(text)) is not None:
            state = file.state
            self.files[file.path] = FileState(state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            return f"f{file.path}"
        if is_name(text):
            raise _Unusual  # a missing file; the row cannot be encoded
        return f"={hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


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


def medium_of(name: str) -> str | None:
    """Return the medium that a name in `Head.media` stands for; None for the marks around a list of frames."""
    return None if name.startswith((_OPEN, _CLOSE)) else name


def path_of(name: str) -> str | None:
    """Return the path in a name of `Head.media`; None if the medium is no file."""
    return name[2:] if name[1:2] == "f" and not name.startswith(_OPEN) else None


# -- prefixes of encoded rows -----------------------------------------------------------------------------------------


class Prefix(NamedTuple):
    """The beginning of a row that other rows can share."""

    length: int
    """Number of tokens; 0 if the row cannot share."""
    cause: Alone = Alone.NOTHING_SHARED
    images: int = 0
    """Images of the prefix if the row has further media after it; else 0: the prefix has all images of the row."""
    patches: int = 0
    """Vision patches of the prefix, under the same condition as `images`."""


def prefix_of(sample: Encoded, tokens: MediaTokens, beginning: FirstMedia | None = None) -> Prefix:
    """Count the tokens of a sample through the closing token of its last medium, or of the last medium of `beginning`.

    The prefix is shorter if a target follows soon: neither its tokens nor the token after it may be targets, and the
    sample must have at least one token after it. The prefix always has all tokens that stand for its media.
    """
    spans = media_spans(sample, tokens)
    if spans is None:
        return Prefix(0, Alone.FAMILY_UNKNOWN)
    if not spans:
        return Prefix(0)
    if beginning is not None and len(spans) != beginning.num_of_row:
        return Prefix(0, Alone.FAMILY_UNKNOWN)  # tokens of two images may touch, or frames of a video lie apart
    return prefix_through(sample, tokens, spans, len(spans) if beginning is None else beginning.num_media)


def prefix_through(sample: Encoded, tokens: MediaTokens, spans: Sequence[MediaSpan], num_media: int) -> Prefix:
    """Count the tokens of a sample through its first `num_media` media, as `prefix_of` does. `spans` are all media."""
    images = patches = 0
    if num_media < len(spans):
        spans = spans[:num_media]
        images, patches = sum(one.is_image for one in spans), sum(one.patches for one in spans)
    ids, labels = sample["input_ids"], sample.get("labels")
    stop = min(spans[-1].stop, len(ids) - 1, _first_target(labels, len(ids)) - 1)
    placeholders = set(tokens.placeholders.values())
    least = 1 + max((at for at in range(spans[-1].start, spans[-1].stop) if int(ids[at]) in placeholders), default=0)
    return Prefix(stop, images=images, patches=patches) if stop >= least else Prefix(0, Alone.NO_TOKEN_BETWEEN)


def _first_target(labels: Any, num_tokens: int) -> int:
    if labels is None:
        return num_tokens
    return next((at for at, label in enumerate(labels) if int(label) != NO_LABEL and at), num_tokens)


_PROBES = ("a", "Zu\n", "\n\nb", " 1", "\u3002", "<")
"""User turns with which a system turn is encoded, to see where the user's text begins. They begin with different
characters, because the tokenizer may merge the start of a text with the template's text before it, most often a line
break."""


def rows_of_probes(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return short conversations under the system prompt, tools and settings of a row without media."""
    kept = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name) is not None}
    system = [one for one in row["messages"][:1] if one["role"] == "system"]
    return [
        {**kept, "messages": [*system, {"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}
        for text in _PROBES
    ]


def prefix_of_system(probes: Sequence[Encoded]) -> Prefix:
    """Count the tokens that all conversations under one system prompt begin with.

    These tokens end with the system turn, or a few tokens later, where the template begins the user's turn.
    """
    shortest = min(len(one["input_ids"]) for one in probes)
    first = [int(one) for one in probes[0]["input_ids"]]
    same = shortest
    for other in probes[1:]:
        same = next((at for at in range(same) if int(other["input_ids"][at]) != first[at]), same)
    target = min(_first_target(one.get("labels"), len(one["input_ids"])) for one in probes)
    return Prefix(max(0, min(same, shortest - 1, target - 1)))


# -- compare encoded rows ---------------------------------------------------------------------------------------------


class MediaInPrefix(NamedTuple):
    """The media in the prefix of a sample that has further media after the prefix."""

    images: int
    """Number of images; videos and sounds are not counted."""
    entries: Mapping[str, int]
    """By field of the sample, how many of its first entries (grids, rows of pixels) belong to the prefix."""


def has_media_after(sample: Encoded, num_tokens: int, tokens: MediaTokens) -> bool:
    """Tell whether a sample has an image or video after its first `num_tokens`. Takes 1 us if few tokens follow."""
    return not {*tokens.placeholders.values()}.isdisjoint(map(int, sample["input_ids"][num_tokens:]))


def media_in_prefix(sample: Encoded, num_tokens: int, tokens: MediaTokens) -> MediaInPrefix | None:
    """Return the media in the first `num_tokens` of a sample with pixels; None if all of its media are there.

    Raises:
        CannotBeDivided: It is not known which pixels belong to which medium.
    """
    if not has_media_after(sample, num_tokens, tokens):
        return None
    spans = media_spans(sample, tokens)
    if spans is None:
        raise CannotBeDivided("it is not known which pixels belong to which image")
    entries: dict[str, int] = {}
    for tensors in dict.fromkeys(one.tensors for one in spans):
        of_tensors = [one for one in spans if one.tensors == tensors]
        inside = [one for one in of_tensors if one.start < num_tokens]
        of_media = (len(inside), len(of_tensors))
        of_pixels = (sum(one.units for one in inside), sum(one.units for one in of_tensors))
        for name, (num, whole) in (
            (tensors.grid, of_media),
            (tensors.beside, of_media),
            (tensors.pixels, of_pixels),
        ):
            value = None if name is None else sample.get(name)
            if name is None or value is None:
                continue
            if len(value) != whole:
                raise CannotBeDivided(f"{len(value)} rows of {name} for {whole} by the tokens of its {tensors.kind}s")
            entries[name] = num
    return MediaInPrefix(sum(one.is_image and one.start < num_tokens for one in spans), entries)


class CannotBeDivided(DataError):
    """The pixels of a sample cannot be divided into those of its prefix and those of its own."""


def shared_media(sample: Encoded, inside: MediaInPrefix | None) -> dict[str, Any]:
    """Return the grids and pixels of a sample that belong to its prefix: all of them if `inside` is None."""
    media = {name: sample[name] for name in OF_MEDIA if sample.get(name) is not None}
    if inside is None:
        return media
    return {name: value[: inside.entries[name]] for name, value in media.items() if inside.entries.get(name)}


def have_same_prefix(one: Encoded, other: Encoded, length: int, tokens: MediaTokens | None = None) -> bool:
    """Tell whether two samples have the same first `length` tokens, with the same pixels and grids.

    Without `tokens`, all media are compared; with `tokens`, only the media in these tokens.
    """
    if [int(token) for token in one["input_ids"][:length]] != [int(token) for token in other["input_ids"][:length]]:
        return False
    try:
        of_each = [
            shared_media(sample, None if tokens is None else media_in_prefix(sample, length, tokens))
            for sample in (one, other)
        ]
    except CannotBeDivided:
        return False
    return are_equal(*of_each)


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
