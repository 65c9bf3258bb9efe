"""Find out how the rows of a stream begin, from their encoded tokens and pixels.

For sized data `prefixes.py` does this before training, without pixels. The rows of a stream are known only when they
are read, so here their tensors decide. Two rows may share a prefix if their `Beginning`s have a key in common; the
reader of the stream then compares the whole prefix (`feed/joining.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_vlpack.rows.contents import NO_LABEL, MediaSpan, media_spans
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import MediaTokens
from swift_vlpack.rows.prefixes import (
    HeadReader,
    Prefix,
    medium_of,
    prefix_of_system,
    prefix_through,
    rows_of_probes,
)
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, SampleError, SampleId
from swift_vlpack.rows.shared import Alone
from swift_vlpack.rows.to_encode import RowToEncode

_NUM_NUMBERS = 4096
"""Pixel values of a medium that its digest reads. To read all of them takes as long as to encode a small image."""
_MOST_TURNS = 1024
"""Most system turns whose length is remembered."""


class Beginning(NamedTuple):
    """The prefixes and media with which an encoded row begins."""

    prefixes: Mapping[bytes, Callable[[], Prefix]] = MappingProxyType({})
    """Functions that count the prefixes of the row, by key, the longest first. Rows with a key in common may share it.

    A prefix is counted only when a second row has the key, because to count a system turn takes several encodings.
    """
    media: tuple[bytes, ...] = ()
    """A digest of each medium."""
    cause: Alone = Alone.NOTHING_SHARED
    """The cause if a row with media has no prefix."""
    head: bytes = b""
    """A digest of the data that decides the longest prefix (`BeginningReader.head`)."""


class BeginningReader:
    """Reads how rows begin. `least_system_tokens` is `packing_share_min`."""

    def __init__(self, encoder: RowEncoder, least_system_tokens: int) -> None:
        self._encoder = encoder
        self._least = least_system_tokens
        self.tokens = MediaTokens.of(encoder.template)
        self._heads = HeadReader()
        self._turns: dict[bytes, int] = {}

    def head(self, row: RowToEncode) -> bytes:
        """Digest the data that decides the first tokens and the media of a row, without encoding the row.

        Returns empty bytes if the row has no media, or has an unknown form.
        """
        head = self._heads.head(row.row)
        self._heads.take_files()  # forget them: while a row waits for a pack, its paths are enough
        limit = getattr(row.encoder.template, "max_pixels", None)
        return (
            _digest(repr((head.digest, head.media, limit)).encode(errors="surrogatepass"))
            if head.digest and head.media
            else b""
        )

    def of(self, row: RowToEncode, sample: Encoded) -> Beginning:
        """Return how a row begins. `sample` is the whole row, encoded."""
        spans = media_spans(sample, self.tokens)
        if spans is None:
            names = filter(medium_of, self._heads.head(row.row).media)
            media = tuple(_digest(name.encode(errors="surrogatepass")) for name in names)
            return Beginning({}, media, Alone.FAMILY_UNKNOWN)
        if not spans:
            return self._of_text(row.row)
        media = _digests(sample, spans)
        ids = np.asarray(sample["input_ids"], dtype=np.int64)
        prefixes: dict[bytes, Callable[[], Prefix]] = {}
        for num in range(len(spans), 0, -1):
            prefix = prefix_through(sample, self.tokens, spans, num)
            if prefix.length:
                prefixes[_digest(ids[: prefix.length].tobytes(), *media[:num])] = partial(_given, prefix)
        if not prefixes:
            is_after = any(label != NO_LABEL for label in (sample.get("labels") or ())[1 : spans[-1].start])
            return Beginning({}, media, Alone.AFTER_ANSWER if is_after else Alone.NO_TOKEN_BETWEEN)
        return Beginning(prefixes, media, head=self.head(row))

    def _of_text(self, row: Mapping[str, Any]) -> Beginning:
        head = self._heads.head(row)
        if not head.digest or head.media:  # a text model leaves the media of a row alone
            return Beginning()
        return Beginning({head.digest: partial(self._system_turn, head.digest, row)})

    def _system_turn(self, digest: bytes, row: Mapping[str, Any]) -> Prefix:
        """Count the tokens of the system turn that rows with this digest share; 0 if they are too few."""
        if digest not in self._turns:
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            self._turns[digest] = self._counted(row)
        length = self._turns[digest]
        return Prefix(length if length >= self._least else 0)

    def _counted(self, row: Mapping[str, Any]) -> int:
        name = SampleId("system turn", 0)
        # Use separate random numbers, so that a length that is remembered does not change what is drawn later.
        with RandomStream("system turn"):
            try:
                probes = [self._encoder.sample(probe, name) for probe in rows_of_probes(row)]
            except SampleError:
                return 0
        return prefix_of_system(probes).length


def _given(prefix: Prefix) -> Prefix:
    return prefix


def _digests(sample: Encoded, spans: Sequence[MediaSpan]) -> tuple[bytes, ...]:
    """Return a digest of the pixels of each medium, made of some of its numbers."""
    start = Counter[str]()
    found = []
    for one in spans:
        name = one.tensors.pixels
        pixels = torch.as_tensor(sample[name][start[name] : start[name] + one.units])
        start[name] += one.units
        numbers = pixels.reshape(-1)
        few = numbers[:: max(1, len(numbers) // _NUM_NUMBERS)].float().numpy().tobytes()
        found.append(_digest(repr((one.tensors.kind, one.stop - one.start, tuple(pixels.shape))).encode(), few))
    return tuple(found)


def _digest(*pieces: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        made.update(piece)
    return made.digest()
