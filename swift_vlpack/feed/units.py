"""Make units of encoded rows that share a prefix: check that the rows share it, and keep its pixels once.

    [row 1, row 2, row 3] that begin with the same image  ->  Unit(prefix, pixels, [row 1, row 2, row 3 without pixels])

A plan decides by keys which rows share a prefix (`rows/prefixes.py`). This module compares the encoded rows: tokens,
pixels and grids. A row that differs is trained alone, for example if its template draws at random.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from swift_vlpack.rows.contents import NO_LABEL, OF_MEDIA
from swift_vlpack.rows.families import PIXELS
from swift_vlpack.rows.prefixes import are_equal, without_pixels
from swift_vlpack.rows.samples import Encoded, SampleId

logger = logging.getLogger(__name__)

SHARED = "shared"
"""The field of a sample that says how many tokens it shares with the sample before it; absent if none."""
_TYPES = ("token_type_ids", "mm_token_type_ids", "image_token_types")


@dataclass(slots=True)
class Unit:
    """Samples that share their first `prefix` tokens, with the pixels of these; or one sample that shares nothing."""

    samples: list[Encoded]
    prefix: int = 0
    pixels: dict[str, Any] = field(default_factory=dict)
    """The pixels of the prefix, which were taken out of the samples."""
    takes_more: set[int] = field(default_factory=set)
    """Indices of the samples that take more tokens than planned."""

    def add(self, sample: Encoded) -> None:
        """Add a sample that begins like the others (`why_apart`). Its pixels are those of the prefix."""
        self.samples.append(without_pixels(sample))

    def in_pack(self, kept: list[int]) -> list[Encoded]:
        """Return some samples of the unit as a pack has them: the first with the pixels, the others as branches."""
        if self.prefix == 0 or not kept:
            return [self.samples[at] for at in kept]
        first, *others = (self.samples[at] for at in kept)
        return [{**first, **self.pixels}, *({**other, SHARED: self.prefix} for other in others)]


def unit_of(first: Encoded, prefix: int) -> Unit:
    """Begin a unit with a sample that has its pixels; without a prefix, no other sample joins it."""
    if not prefix:
        return Unit([first])
    pixels = {name: first[name] for name in PIXELS if first.get(name) is not None}
    return Unit([without_pixels(first)], prefix, pixels)


class UnitsOfPack:
    """Collects the encoded samples of a pack, in order, into units."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.open: Unit | None = None
        """The unit that the next sample may join."""
        self.apart: set[SampleId] = set()
        """The samples that were planned to share a prefix, but were encoded apart."""

    def close(self) -> None:
        """Let the next sample begin another unit."""
        self.open = None

    def why_not(self, sample: Encoded) -> str | None:
        """Say why a sample cannot join the open unit; None if it can."""
        return "no other sample has its pixels" if self.open is None else why_apart(sample, self.open)

    def add(self, sample: Encoded, prefix: int) -> Unit:
        """Put a sample into the open unit, or begin another unit with it, which stays open if it can have a prefix."""
        if not prefix:
            why = None
        else:
            why = why_no_prefix(sample, prefix) if self.open is None else why_apart(sample, self.open)
        if why is not None:
            self.apart.add(sample["sample_id"])
            logger.warning("%s: shares no prefix after all, and is trained whole: %s", sample["sample_id"], why)
        elif self.open is not None:
            self.open.add(sample)
            return self.open
        unit = unit_of(sample, 0 if why else prefix)
        self.units.append(unit)
        self.open = self.open or (unit if unit.prefix else None)
        return unit


def has_pixels(sample: Encoded) -> bool:
    """Tell whether a sample has pixels."""
    return any(sample.get(name) is not None for name in PIXELS)


def why_apart(sample: Encoded, unit: Unit) -> str | None:
    """Say why an encoded sample cannot be a branch of a unit; None if it can.

    The pixels are compared if the sample has any. Without them it was encoded from the header of the same image.
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
    brings_pixels = has_pixels(sample)
    for name in sorted(OF_MEDIA):
        one, other = unit.pixels.get(name) if name in PIXELS else first.get(name), sample.get(name)
        if (brings_pixels or name not in PIXELS) and not are_equal(one, other):
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
