"""The rows of a run as its checkpoints remember them, and digests of what a run depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.feed.saved_rows import (
    Changes,
    SavedSource,
    changes,
    row_digests,
    saved_source,
    to_bytes,
    with_sizes,
)
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.source import RowSource


class RunRows:
    """The sources of a run with digests of their rows; none of a stream."""

    def __init__(self, dataset: Any) -> None:
        self.sources: tuple[RowSource, ...] = tuple(getattr(dataset, "sources", ()))
        self.contents = [row_digests(source) for source in self.sources]
        self._written: bytes | None = None

    def as_file(self) -> bytes:
        """The same for every checkpoint of the run, so made once."""
        if self._written is None:
            self._written = to_bytes([saved_source(*both) for both in zip(self.sources, self.contents, strict=True)])
        return self._written

    def compared(self, saved: Sequence[SavedSource]) -> Changes | None:
        """What became of the rows; None where the sources are other ones."""
        # Names in their order too: schedules draw by name, and sizes are kept by place.
        if [one.name for one in saved] != [source.name for source in self.sources]:
            return None
        return sum((changes(*each) for each in zip(saved, self.sources, self.contents, strict=True)), Changes())

    def take_sizes(self, saved: Sequence[SavedSource]) -> None:
        """Go on with the sizes of the saved run."""
        self.sources, self._written = with_sizes(self.sources, saved), None

    def fingerprint(self, dataset: FusionCaptionDataset) -> dict[str, Any]:
        """What the schedules of all epochs follow from."""
        contents = zip(self.sources, self.contents, strict=True)
        return {
            "shuffle": dataset.mix.shuffle,
            "sources": {source.name: [len(source.rows), source.ratio, source.sample_limit] for source in self.sources},
            "data": digest_of(*(part for source, digests in contents for part in _content(source, digests))),
            "ratio_by": dataset.mix.ratio_by,
        }


def _content(source: RowSource, digests: NDArray[np.uint64]) -> list[bytes]:
    """What a source is made of: how it takes part, which rows of its file it has, and what is in them."""
    numbers = () if source.row_numbers is None else source.row_numbers
    part = [source.name, source.system, source.max_pixels, source.seed]
    return [
        json.dumps(part).encode(),
        np.asarray(numbers, dtype="<i8").tobytes(),
        digests.astype("<u8").tobytes(),
    ]


def digest_of(*parts: bytes) -> str:
    """16 hexadecimal digits of parts that cannot run into each other."""
    total = hashlib.sha256()
    for part in parts:
        # The length of each before it, or ("ab", "c") would be ("a", "bc").
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]
