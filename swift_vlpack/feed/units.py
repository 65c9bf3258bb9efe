"""Make units of encoded rows that share a prefix: check that the rows share it, and keep its pixels once.

    [row 1, row 2, row 3] that begin with the same image  ->  Unit([row 1, row 2 and row 3 without pixels], prefix)

A plan decides by keys which rows share a prefix (`rows/prefixes.py`). This module compares the encoded rows: tokens,
pixels and grids. A row that differs is trained alone, for example if its template draws at random.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.families import PIXELS
from swift_vlpack.rows.prefixes import how_prefixes_differ, without_pixels
from swift_vlpack.rows.samples import Encoded, SampleId

logger = logging.getLogger(__name__)

SHARED = "_vlpack_shared"
"""The field of a sample that says how many tokens it shares with the sample before it; absent if none."""


@dataclass(slots=True)
class Unit:
    """Samples that share their first `prefix` tokens; or one sample that shares nothing."""

    samples: list[Encoded]
    """The first with its pixels, the others without."""
    prefix: int = 0
    takes_more: set[int] = field(default_factory=set)
    """Indices of the samples that take more tokens than planned."""

    def in_pack(self, kept: list[int]) -> list[Encoded]:
        """Return some samples of the unit as a pack has them: the first with the pixels, the others as branches."""
        if self.prefix == 0 or not kept:
            return [self.samples[at] for at in kept]
        pixels = {name: self.samples[0][name] for name in PIXELS if name in self.samples[0]}
        first, *others = (self.samples[at] for at in kept)
        return [first | pixels, *({**other, SHARED: self.prefix} for other in others)]


class UnitsOfPack:
    """Collects the encoded samples of a pack, in order, into units."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.open: Unit | None = None
        """The unit that the next sample may join."""
        self.apart: set[SampleId] = set()
        """The samples that were planned to share a prefix, but did not once encoded."""

    def close(self) -> None:
        """Let the next sample begin another unit."""
        self.open = None

    def can_join(self, sample: Encoded, prefix: int) -> bool:
        """Tell whether a sample can be a branch of the open unit."""
        return self.open is not None and self._why_apart(sample, prefix) is None

    def add(self, sample: Encoded, prefix: int) -> Unit:
        """Put a sample into the open unit, or begin another unit with it, which stays open if it can have a prefix."""
        why = self._why_apart(sample, prefix) if prefix else None
        if why is not None:
            self.apart.add(sample["sample_id"])
            logger.warning("%s: shares no prefix after all, and is trained whole: %s", sample["sample_id"], why)
        elif self.open is not None:
            self.open.samples.append(without_pixels(sample))
            return self.open
        unit = Unit([sample], 0 if why else prefix)
        self.units.append(unit)
        self.open = self.open or (unit if unit.prefix else None)
        return unit

    def _why_apart(self, sample: Encoded, prefix: int) -> str | None:
        """Say why a sample cannot be a branch of the open unit, or begin one; None if it can.

        The first token of a branch is no target: the token before it in the sequence is another branch's.
        """
        if len(sample["input_ids"]) <= prefix:
            return f"{len(sample['input_ids'])} tokens, no more than the prefix of {prefix}"
        labels = sample.get("labels")
        if labels is not None and any(label != NO_LABEL for label in labels[: prefix + 1]):
            return "a target in the prefix, or directly after it"
        return None if self.open is None else how_prefixes_differ(sample, self.open.samples[0], prefix)
