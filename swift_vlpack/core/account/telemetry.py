"""Counters of what happened to every sample: they add up over workers and ranks, and they close.

>>> stats = Telemetry(packing_length=10)
>>> stats.read("captions", 3)
>>> stats.packed([("captions", 6), ("captions", 4)])
>>> stats.dropped("captions", "oversize")
>>> stats.is_closed
True
>>> print(stats.line(epoch=0))
epoch 0: 1 pack, 2 samples, 10 tokens, fill 100.0% (p5 100, p50 100, p95 100), 0 single-long (0.0%), 1 of 3 left out \
(33.3%): oversize 1; counts add up: 3 read = 2 packed + 1 left out + 0 not reached
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from swift_vlpack.core.account.reasons import about
from swift_vlpack.core.envelope import Named, Whole, check_shape
from swift_vlpack.core.errors import StateMismatch
from swift_vlpack.core.words import by_reason, counted

NUM_FILL_BINS = 100
"""Whole per cent: counts in bins add up over workers and ranks exactly, means of means would not."""
STATE = {
    "packing_length": Whole(1),
    **dict.fromkeys(("num_packs", "num_single_long", "num_images", "num_padding", "num_pack_tokens"), Whole()),
    "fill_histogram": [Whole()],
    "sources": Named(
        {**dict.fromkeys(("num_read", "num_packed", "num_tokens"), Whole()), "num_dropped": Named(Whole())}
    ),
}
"""The shape of a saved state."""


@dataclass(slots=True)
class SourceCounts:
    """What became of the samples of one source."""

    num_read: int = 0
    num_packed: int = 0
    num_tokens: int = 0
    num_dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_held(self) -> int:
        """Read, but neither packed nor dropped yet."""
        return self.num_read - self.num_packed - sum(self.num_dropped.values())

    def as_json(self) -> dict[str, Any]:
        """Plain numbers under their full names."""
        return {
            "num_read": self.num_read,
            "num_packed": self.num_packed,
            "num_held": self.num_held,
            "num_tokens": self.num_tokens,
            "num_dropped": dict(sorted(self.num_dropped.items())),
        }


@dataclass(slots=True)
class Telemetry:
    """Counts for one epoch, one rank or one worker; `merge` adds them up."""

    packing_length: int
    num_packs: int = 0
    num_single_long: int = 0
    num_images: int = 0
    num_padding: int = 0  # tokens
    num_pack_tokens: int = 0  # of the packs that count for the fill
    fill_histogram: list[int] = field(default_factory=lambda: [0] * (NUM_FILL_BINS + 1))  # by whole per cent
    sources: dict[str, SourceCounts] = field(default_factory=dict)

    def read(self, source: str, num_samples: int = 1) -> None:
        """Count samples that came in."""
        self._of(source).num_read += num_samples

    def read_what_came(self) -> None:
        """Count as read what was packed or left out, where rows are not known before they come."""
        for counts in self.sources.values():
            counts.num_read = counts.num_packed + sum(counts.num_dropped.values())

    def packed(
        self,
        samples: Iterable[tuple[str, int]],
        *,
        num_images: int = 0,
        num_padding: int = 0,
        single_long: bool = False,
    ) -> None:
        """Count one pack of `(source, length)` samples; the fill is theirs, without the padding of the row."""
        num_tokens = 0
        for source, length in samples:
            counts = self._of(source)
            counts.num_packed += 1
            counts.num_tokens += length
            num_tokens += length
        self.num_packs += 1
        self.num_images += num_images
        self.num_padding += num_padding
        # How full it is says nothing about how well samples were put together.
        if single_long:
            self.num_single_long += 1
            return
        self.num_pack_tokens += num_tokens
        self.fill_histogram[min(NUM_FILL_BINS, NUM_FILL_BINS * num_tokens // self.packing_length)] += 1

    def dropped(self, source: str, reason: str, num_samples: int = 1) -> None:
        """Count samples that were left out; a word that is not in the registry of reasons is a mistake of ours."""
        about(reason)
        self._of(source).num_dropped[reason] += num_samples

    def merge(self, other: Telemetry) -> None:
        """Add the counts of another worker, rank or epoch."""
        self.num_packs += other.num_packs
        self.num_single_long += other.num_single_long
        self.num_images += other.num_images
        self.num_padding += other.num_padding
        self.num_pack_tokens += other.num_pack_tokens
        self.fill_histogram = [a + b for a, b in zip(self.fill_histogram, other.fill_histogram, strict=True)]
        for name, counts in other.sources.items():
            mine = self._of(name)
            mine.num_read += counts.num_read
            mine.num_packed += counts.num_packed
            mine.num_tokens += counts.num_tokens
            mine.num_dropped.update(counts.num_dropped)

    @property
    def num_read(self) -> int:
        """Samples that came in."""
        return sum(counts.num_read for counts in self.sources.values())

    @property
    def num_packed(self) -> int:
        """Samples in packs."""
        return sum(counts.num_packed for counts in self.sources.values())

    @property
    def num_tokens(self) -> int:
        """Tokens in packs."""
        return sum(counts.num_tokens for counts in self.sources.values())

    @property
    def num_held(self) -> int:
        """Samples that still wait; never negative, or a sample was counted twice."""
        return sum(counts.num_held for counts in self.sources.values())

    @property
    def num_dropped(self) -> Counter[str]:
        """Samples left out, by reason."""
        return sum((counts.num_dropped for counts in self.sources.values()), Counter())

    @property
    def is_closed(self) -> bool:
        """At the end of an epoch: read = packed + dropped, for every source."""
        return all(counts.num_held == 0 for counts in self.sources.values())

    @property
    def account(self) -> str:
        """The law of conservation in words; what is not reached was planned, but training stopped before it."""
        # A source of which more came out than went in is a mistake of ours, which must not hide in a sum of all.
        adds_up = all(counts.num_held >= 0 for counts in self.sources.values())
        return (
            f"counts {'add' if adds_up else 'do not add'} up: {self.num_read} read = {self.num_packed} packed + "
            f"{sum(self.num_dropped.values())} left out + {self.num_held} not reached"
        )

    @property
    def fill_mean(self) -> float:
        """Mean filled share of the packs that are not a single long sample."""
        num_counted = self.num_packs - self.num_single_long
        return self.num_pack_tokens / (num_counted * self.packing_length) if num_counted else 0.0

    def fill_percentile(self, per_cent: int) -> int:
        """Fill in whole per cent below which `per_cent` of the packs lie."""
        seen, wanted = 0, sum(self.fill_histogram) * per_cent / 100
        for fill, num_packs in enumerate(self.fill_histogram):
            seen += num_packs
            # The first bin that has packs: below the least fill there is nothing, whatever share is asked for.
            if num_packs and seen >= wanted:
                return fill
        return 0

    def state(self) -> dict[str, Any]:
        """The counts themselves, for a saved state."""
        counts = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {**counts, "sources": {name: source.as_json() for name, source in self.sources.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Telemetry:
        """Counts that go on from a saved state; one that cannot be is refused."""
        check_shape(state, STATE, "counted")
        if len(state["fill_histogram"]) != NUM_FILL_BINS + 1:
            raise StateMismatch(f"damaged: counted.fill_histogram has {len(state['fill_histogram'])} numbers")
        sources = {
            name: SourceCounts(
                counts["num_read"], counts["num_packed"], counts["num_tokens"], Counter(counts["num_dropped"])
            )
            for name, counts in state["sources"].items()
        }
        return cls(**{**{spec.name: state[spec.name] for spec in fields(cls)}, "sources": sources})

    def as_json(self, **labels: Any) -> dict[str, Any]:
        """Every count under its full name."""
        num_dropped = sum(self.num_dropped.values())
        return {
            **labels,
            "num_packs": self.num_packs,
            "num_samples": self.num_packed,
            "num_tokens": self.num_tokens,
            "num_images": self.num_images,
            "num_padding": self.num_padding,
            "fill_mean": round(self.fill_mean, 4),
            "fill_p5": self.fill_percentile(5),
            "fill_p50": self.fill_percentile(50),
            "fill_p95": self.fill_percentile(95),
            "fill_histogram": {str(fill): num_packs for fill, num_packs in enumerate(self.fill_histogram) if num_packs},
            "num_single_long": self.num_single_long,
            "single_long_per_cent": _per_cent(self.num_single_long, self.num_read),
            "num_dropped": dict(sorted(self.num_dropped.items())),
            "dropped_per_cent": _per_cent(num_dropped, self.num_read),
            "num_read": self.num_read,
            "num_held": self.num_held,
            "is_closed": self.is_closed,
            "account": self.account,
            "sources": {name: counts.as_json() for name, counts in sorted(self.sources.items())},
        }

    def line(self, **labels: Any) -> str:
        """One line for a person."""
        where = " ".join(f"{name} {value}" for name, value in labels.items())
        percentiles = ", ".join(f"p{p} {self.fill_percentile(p)}" for p in (5, 50, 95))
        num_dropped = sum(self.num_dropped.values())
        padding = f"{self.num_padding} of padding, " if self.num_padding else ""
        return (
            f"{where}: {counted(self.num_packs, 'pack')}, {counted(self.num_packed, 'sample')}, "
            f"{counted(self.num_tokens, 'token')}, {padding}fill {100 * self.fill_mean:.1f}% ({percentiles}), "
            f"{self.num_single_long} single-long ({_per_cent(self.num_single_long, self.num_read)}%), "
            f"{num_dropped} of {self.num_read} left out ({_per_cent(num_dropped, self.num_read)}%)"
            + (f": {by_reason(dict(sorted(self.num_dropped.items())))}" if num_dropped else "")
            + f"; {self.account}"
        )

    def _of(self, source: str) -> SourceCounts:
        return self.sources.setdefault(source, SourceCounts())


def _per_cent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0
