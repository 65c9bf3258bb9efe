"""Find out how the rows of a stream begin, as they come: their tokens through the last medium, and its pixels.

Sized data is looked at before training, without pixels (`prefixes.py`). The rows of a stream are only seen when they
are encoded, so here their tensors decide. Two rows whose `Beginning` has the same key may share a prefix; the reader
of the stream then compares all of it (`feed/joining.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_vlpack.rows.contents import NO_LABEL, MediaSpan, media_spans
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import MediaTokens
from swift_vlpack.rows.prefixes import HeadReader, prefix_of, prefix_of_system, rows_of_probes
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, SampleError, SampleId
from swift_vlpack.rows.shared import Alone
from swift_vlpack.rows.to_encode import RowToEncode

_NUM_NUMBERS = 4096
"""Numbers of a medium's pixels that its digest reads: all of them would take as long as encoding a small image."""
_MOST_TURNS = 1024
"""Most system turns whose length is remembered."""


def _nothing() -> int:
    return 0


class Beginning(NamedTuple):
    """How an encoded row begins."""

    key: bytes = b""
    """Rows with equal keys may share their first tokens; empty if the row can share with no other."""
    length: Callable[[], int] = _nothing
    """Counts the tokens of the prefix. It is called when a second row has the key: a system turn costs encodings."""
    media: tuple[bytes, ...] = ()
    """A digest of each medium."""
    cause: Alone = Alone.NOTHING_SHARED
    """Why a row with media can share with no other, if its key is empty."""
    head: bytes = b""
    """What decides the key, read without encoding the row (`BeginningReader.head`)."""


class BeginningReader:
    """Reads how encoded rows begin. `least_system_tokens` is `packing_share_min`."""

    def __init__(self, encoder: RowEncoder, least_system_tokens: int) -> None:
        self._encoder = encoder
        self._least = least_system_tokens
        self._tokens = MediaTokens.of(encoder.template)
        self._heads = HeadReader()
        self._turns: dict[bytes, int] = {}

    def head(self, row: RowToEncode) -> bytes:
        """Return what decides the first tokens and the media of a row, read without encoding it.

        Empty if the row has no media, or has them in a form that is not known.
        """
        head = self._heads.head(row.row)
        self._heads.take_files()  # drops them: the path says enough while a row waits for a pack
        limit = getattr(row.encoder.template, "max_pixels", None)
        return (
            _digest(repr((head.digest, head.media, limit)).encode(errors="surrogatepass"))
            if head.digest and head.media
            else b""
        )

    def of(self, row: RowToEncode, sample: Encoded) -> Beginning:
        """Return how a row begins. `sample` is the row, encoded and whole."""
        spans = media_spans(sample, self._tokens)
        if spans is None:
            return Beginning(cause=Alone.FAMILY_UNKNOWN)
        if not spans:
            return self._of_text(row.row)
        media = _digests(sample, spans)
        length, cause, *_ = prefix_of(sample, self._tokens)
        if not length:
            is_after = any(label != NO_LABEL for label in (sample.get("labels") or ())[1 : spans[-1].start])
            return Beginning(media=media, cause=Alone.AFTER_ANSWER if is_after else cause)
        tokens = np.asarray(sample["input_ids"][:length], dtype=np.int64).tobytes()
        return Beginning(_digest(tokens, *media), partial(int, length), media, head=self.head(row))

    def _of_text(self, row: Mapping[str, Any]) -> Beginning:
        head = self._heads.head(row)
        if not head.digest or head.media:  # a text model leaves the media of a row alone
            return Beginning()
        return Beginning(head.digest, partial(self._system_tokens, head.digest, row))

    def _system_tokens(self, digest: bytes, row: Mapping[str, Any]) -> int:
        """Count the tokens of the system turn that rows with this digest share; 0 if they are too few."""
        if digest not in self._turns:
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            self._turns[digest] = self._counted(row)
        length = self._turns[digest]
        return length if length >= self._least else 0

    def _counted(self, row: Mapping[str, Any]) -> int:
        name = SampleId("system turn", 0)
        # With random numbers of their own: whether the length is known already must not change what is drawn later.
        with RandomStream("system turn"):
            try:
                probes = [self._encoder.sample(probe, name) for probe in rows_of_probes(row)]
            except SampleError:
                return 0
        return prefix_of_system(probes).length


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
