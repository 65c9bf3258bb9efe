"""Make units of encoded rows that share a prefix: check that the rows share it, and keep its pixels once.

    [row 1, row 2, row 3] that begin with the same image  ->  Unit(prefix, pixels, [row 1, row 2, row 3 without pixels])

A plan decides by keys which rows share a prefix (`rows/prefixes.py`). This module compares the encoded rows: tokens,
pixels and grids. A row that differs is trained alone, for example if its template draws at random. If a row has further
media after the prefix, it keeps the pixels of these media (`divided`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from swift_vlpack.rows.contents import NO_LABEL, OF_MEDIA
from swift_vlpack.rows.families import PIXELS, MediaTokens
from swift_vlpack.rows.prefixes import (
    CannotBeDivided,
    MediaInPrefix,
    are_equal,
    has_media_after,
    media_in_prefix,
    shared_media,
    without_pixels,
)
from swift_vlpack.rows.samples import Encoded, SampleId

logger = logging.getLogger(__name__)

SHARED = "shared"
"""The field of a sample that says how many tokens it shares with the sample before it; absent if none."""
IN_PREFIX = "media_in_prefix"
"""The field of a sample with media after its prefix: a `MediaInPrefix`; absent if the prefix has all of its media."""
_TYPES = ("token_type_ids", "mm_token_type_ids", "image_token_types")


@dataclass(slots=True)
class Unit:
    """Samples that share their first `prefix` tokens, with the pixels of these; or one sample that shares nothing."""

    samples: list[Encoded]
    """The samples without the pixels of the prefix. A sample with further media says in `IN_PREFIX` which it shares."""
    prefix: int = 0
    media: dict[str, Any] = field(default_factory=dict)
    """The grids and pixels of the prefix."""
    takes_more: set[int] = field(default_factory=set)
    """Indices of the samples that take more tokens than planned."""

    def add(self, sample: Encoded, inside: MediaInPrefix | None = None) -> None:
        """Add a sample that `why_apart` has checked. `inside` is None if the prefix has all of its media."""
        self.samples.append(divided(sample, inside))

    def in_pack(self, kept: list[int]) -> list[Encoded]:
        """Return some samples of the unit as a pack has them: the first with the pixels, the others as branches."""
        if self.prefix == 0 or not kept:
            return [self.samples[at] for at in kept]
        first, *others = (self.samples[at] for at in kept)
        pixels = {name: value for name, value in self.media.items() if name in PIXELS}
        return [with_pixels(first, pixels), *({**other, SHARED: self.prefix} for other in others)]


def with_pixels(sample: Encoded, pixels: dict[str, Any]) -> Encoded:
    """Put the pixels of the prefix back before the sample's own. Returns the sample as it was encoded."""
    joined = {name: torch.cat([value, sample[name]]) if name in sample else value for name, value in pixels.items()}
    return {name: value for name, value in (sample | joined).items() if name != IN_PREFIX}


def divided(sample: Encoded, inside: MediaInPrefix | None) -> Encoded:
    """Return a sample without the pixels of its prefix. Grids stay whole, because positions are made of them."""
    if inside is None:
        return without_pixels(sample)
    # Copy: a view would keep all pixels of the row in memory, and send them to other processes.
    own = {name: sample[name][num:].clone() for name, num in inside.entries.items() if name in PIXELS}
    own = {name: value for name, value in own.items() if len(value)}
    return {**without_pixels(sample), **own, IN_PREFIX: inside}


def unit_of(first: Encoded, prefix: int, inside: MediaInPrefix | None = None) -> Unit:
    """Begin a unit with a sample that has its pixels. With `prefix=0`, no other sample can join."""
    if not prefix:
        return Unit([first])
    media = shared_media(first, inside)
    if inside is not None:  # copy, for the reason in `divided`
        media |= {name: value.clone() for name, value in media.items() if name in PIXELS}
    return Unit([divided(first, inside)], prefix, media)


class UnitsOfPack:
    """Collects the encoded samples of a pack, in order, into units."""

    def __init__(self, tokens: MediaTokens) -> None:
        """Begin without units. `tokens` tell media from text."""
        self.units: list[Unit] = []
        self.open: Unit | None = None
        """The unit that the next sample may join."""
        self.apart: set[SampleId] = set()
        """The samples that were planned to share a prefix, but did not once encoded."""
        self._tokens = tokens

    def close(self) -> None:
        """Let the next sample begin another unit."""
        self.open = None

    def lacks_pixels(self, sample: Encoded, prefix: int) -> bool:
        """Tell whether a sample without pixels must be encoded whole, because it cannot join the open unit."""
        if self.open is None or has_media_after(sample, prefix, self._tokens):
            return True
        return why_apart(sample, self.open) is not None

    def add(self, sample: Encoded, prefix: int) -> Unit:
        """Put a sample into the open unit, or begin another unit with it, which stays open if it can have a prefix."""
        why, inside = None, None
        try:
            inside = media_in_prefix(sample, prefix, self._tokens) if prefix else None
        except CannotBeDivided as error:
            why = str(error)
        if prefix and why is None:
            why = why_no_prefix(sample, prefix) if self.open is None else why_apart(sample, self.open, inside)
        if why is not None:
            self.apart.add(sample["sample_id"])
            logger.warning("%s: shares no prefix after all, and is trained whole: %s", sample["sample_id"], why)
        elif self.open is not None:
            self.open.add(sample, inside)
            return self.open
        unit = unit_of(sample, 0 if why else prefix, inside)
        self.units.append(unit)
        self.open = self.open or (unit if unit.prefix else None)
        return unit


def has_pixels(sample: Encoded) -> bool:
    """Tell whether a sample has pixels."""
    return any(sample.get(name) is not None for name in PIXELS)


def why_apart(sample: Encoded, unit: Unit, inside: MediaInPrefix | None = None) -> str | None:
    """Say why an encoded sample cannot be a branch of a unit; None if it can.

    `inside` are its media in the prefix; None stands for all of its media. Pixels are compared if the sample has any;
    a sample without pixels was encoded from the header of the same image.
    """
    first, prefix = unit.samples[0], unit.prefix
    if (why := why_no_prefix(sample, prefix)) is not None:
        return why
    if list(sample["input_ids"][:prefix]) != list(first["input_ids"][:prefix]):
        return "other tokens"
    for name in _TYPES:
        one, other = first.get(name), sample.get(name)
        if one is not None and other is not None and not are_equal(_start_of(one, prefix), _start_of(other, prefix)):
            return f"other {name}"
    brings_pixels, media = has_pixels(sample), shared_media(sample, inside)
    for name in sorted(OF_MEDIA):
        if (brings_pixels or name not in PIXELS) and not are_equal(unit.media.get(name), media.get(name)):
            return f"other {name}"
    return None


def why_no_prefix(sample: Encoded, prefix: int) -> str | None:
    """Say why the first `prefix` tokens of a sample cannot be a prefix; None if they can.

    The first token of a branch is no target: the token before it in the sequence is another branch's.
    """
    if len(sample["input_ids"]) <= prefix:
        return f"{len(sample['input_ids'])} tokens, no more than the prefix of {prefix}"
    labels = sample.get("labels")
    if labels is not None and any(label != NO_LABEL for label in labels[: prefix + 1]):
        return "a target in the prefix, or directly after it"
    return None


def _start_of(value: Any, prefix: int) -> Any:
    return value[..., :prefix] if isinstance(value, torch.Tensor) else value[:prefix]
