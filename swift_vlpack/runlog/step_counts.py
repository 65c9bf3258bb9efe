"""What optimizer steps trained, and what the same samples would have been as padded batches.

>>> padded([300, 500, 200], batch_size=2), padded([300, 500, 200], batch_size=1)
(1200, 1000)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


class SourceOf(Protocol):
    """A sample, as far as counts go."""

    @property
    def source(self) -> str:
        """The name of its source."""


class TrainedPack(Protocol):
    """A pack, as far as counts go."""

    @property
    def sample_ids(self) -> Sequence[SourceOf]:
        """One a sample."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample."""

    @property
    def num_images(self) -> int:
        """Of all samples."""

    @property
    def num_vision_tokens(self) -> int:
        """Of all samples."""

    @property
    def num_padding(self) -> int:
        """Tokens of the row behind its samples."""

    @property
    def single_long(self) -> bool:
        """Whether it is one sample too large for a pack."""


def padded(lengths: Sequence[int], batch_size: int) -> int:
    """Count the tokens of samples in padded batches of `batch_size`, in this order."""
    batches = (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))
    return sum(len(batch) * max(batch) for batch in batches)


@dataclass(slots=True)
class StepCounts:
    """Steps of one rank."""

    num_steps: int = 0
    num_packs: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_images: int = 0
    num_vision_tokens: int = 0
    num_padding: int = 0
    num_single_long: int = 0
    num_pack_tokens: int = 0
    """Of the packs that are no single-long sample, which are those that count for the fill."""
    num_tokens_unpacked: int = 0
    """Of the same samples in padded batches."""
    sources: dict[str, list[int]] = field(default_factory=dict)
    """Samples and tokens of each."""
    tokens_of_steps: list[int] = field(default_factory=list)

    @classmethod
    def of_step(cls, packs: Sequence[TrainedPack], batch_size: int) -> StepCounts:
        """Count the packs of one step of this rank.

        Un-packed, its samples are in padded batches of `batch_size`, the one that was asked for, in the order of
        training. Batches of one have no padding, so that against them packing saves none.
        """
        trained = [pack for pack in packs if pack.sample_ids]
        counts = cls(num_steps=1, tokens_of_steps=[sum(sum(pack.lengths) for pack in trained)])
        for pack in trained:
            counts._add(pack)
        counts.num_tokens_unpacked = padded([length for pack in trained for length in pack.lengths], batch_size)
        return counts

    def merge(self, other: StepCounts) -> None:
        """Add steps that came later."""
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, (num_samples, num_tokens) in other.sources.items():
            self._of_source(name, num_samples, num_tokens)
        self.tokens_of_steps += other.tokens_of_steps

    @property
    def num_padding_saved(self) -> int:
        """Return the padding tokens that packing saves; negative if packed sequences have more padding than batches."""
        return self.num_tokens_unpacked - self.num_tokens - self.num_padding

    def _add(self, pack: TrainedPack) -> None:
        num_tokens = sum(pack.lengths)
        self.num_packs += 1
        self.num_samples += len(pack.lengths)
        self.num_tokens += num_tokens
        self.num_images += pack.num_images
        self.num_vision_tokens += pack.num_vision_tokens
        self.num_padding += pack.num_padding
        self.num_single_long += pack.single_long
        self.num_pack_tokens += 0 if pack.single_long else num_tokens
        for sample_id, length in zip(pack.sample_ids, pack.lengths, strict=True):
            self._of_source(sample_id.source, 1, length)

    def _of_source(self, name: str, num_samples: int, num_tokens: int) -> None:
        of_source = self.sources.setdefault(name, [0, 0])
        of_source[0] += num_samples
        of_source[1] += num_tokens


NUMBERS = tuple(spec.name for spec in fields(StepCounts) if spec.type == "int")


def summed(ranks: Sequence[StepCounts]) -> dict[str, Any]:
    """The same steps of all ranks as plain numbers.

    `num_tokens_slowest` is what the rank with most tokens of each step had: times the ranks, over all tokens, it says
    how well they were matched.
    """
    total = StepCounts()
    for counts in ranks:
        total.merge(counts)
    slowest = sum(map(max, zip(*(counts.tokens_of_steps for counts in ranks), strict=True)))
    sources = {name: {"num_samples": both[0], "num_tokens": both[1]} for name, both in sorted(total.sources.items())}
    numbers = {name: getattr(total, name) for name in NUMBERS}
    return {**numbers, "num_steps": ranks[0].num_steps, "num_tokens_slowest": slowest, "sources": sources}


def share(part: float, whole: float) -> float:
    """`part` of `whole`; 0 of nothing."""
    return part / whole if whole else 0.0
