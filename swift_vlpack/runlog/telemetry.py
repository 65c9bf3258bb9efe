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

from swift_vlpack.envelope import Named, Whole, check_shape
from swift_vlpack.errors import StateMismatch
from swift_vlpack.reasons import about
from swift_vlpack.words import by_reason, counted

NUM_FILL_BINS = 100
"""Whole per cent: counts in bins add up over workers and ranks exactly, means of means would not."""
_COUNTS = Named({**dict.fromkeys(("num_read", "num_packed", "num_tokens"), Whole()), "num_dropped": Named(Whole())})
STATE = {
    "packing_length": Whole(1),
    **dict.fromkeys(("num_packs", "num_single_long", "num_images", "num_padding", "num_pack_tokens"), Whole()),
    "fill_histogram": [Whole()],
    "sources": _COUNTS,
}
"""The shape of a saved state."""
_OF_PARTS = {"further": _COUNTS, "lost_tokens": Named(Whole()), "lost_images": Named(Whole())}
"""What it has besides where rows were cut."""


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

    def merge(self, other: SourceCounts) -> None:
        """Add the counts of another worker, rank or epoch."""
        self.num_read += other.num_read
        self.num_packed += other.num_packed
        self.num_tokens += other.num_tokens
        self.num_dropped.update(other.num_dropped)

    def without(self, other: SourceCounts) -> SourceCounts:
        """The counts of the rows among the samples, of which `other` are further parts; tokens are not told apart."""
        num_dropped = Counter(self.num_dropped)
        num_dropped.subtract(other.num_dropped)
        packed = self.num_packed - other.num_packed
        return SourceCounts(self.num_read - other.num_read, packed, self.num_tokens, +num_dropped)

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
    further: dict[str, SourceCounts] = field(default_factory=dict)
    """Those of them that are parts of rows, but not part 0: without them the samples are the rows."""
    lost_tokens: Counter[str] = field(default_factory=Counter)
    """Of parts that cutting left out, by reason."""
    lost_images: Counter[str] = field(default_factory=Counter)

    def read(self, source: str, num_samples: int = 1, *, num_further: int = 0) -> None:
        """Count samples that came in, of which so many are further parts of rows."""
        self._of(source).num_read += num_samples
        if num_further:
            self._further(source).num_read += num_further

    def read_what_came(self) -> None:
        """Count as read what was packed or left out, where rows are not known before they come."""
        for counts in (*self.sources.values(), *self.further.values()):
            counts.num_read = counts.num_packed + sum(counts.num_dropped.values())

    def packed(
        self,
        samples: Iterable[tuple[str, int]],
        *,
        num_images: int = 0,
        num_padding: int = 0,
        single_long: bool = False,
        further: Iterable[str] = (),
    ) -> None:
        """Count one pack of `(source, length)` samples; the fill is theirs, without the padding of the row.

        `further` are the sources of further parts among them.
        """
        num_tokens = 0
        for source, length in samples:
            counts = self._of(source)
            counts.num_packed += 1
            counts.num_tokens += length
            num_tokens += length
        for source in further:
            self._further(source).num_packed += 1
        self.num_packs += 1
        self.num_images += num_images
        self.num_padding += num_padding
        # How full it is says nothing about how well samples were put together.
        if single_long:
            self.num_single_long += 1
            return
        self.num_pack_tokens += num_tokens
        self.fill_histogram[min(NUM_FILL_BINS, NUM_FILL_BINS * num_tokens // self.packing_length)] += 1

    def dropped(self, source: str, reason: str, num_samples: int = 1, *, is_further: bool = False) -> None:
        """Count samples that were left out; a word that is not in the registry of reasons is a mistake of ours."""
        about(reason)
        self._of(source).num_dropped[reason] += num_samples
        if is_further:
            self._further(source).num_dropped[reason] += num_samples

    def lost(self, reason: str, *, num_tokens: int, num_images: int) -> None:
        """Count what was in a part that cutting left out."""
        if num_tokens:  # of other samples nobody says it
            self.lost_tokens[reason] += num_tokens
            self.lost_images[reason] += num_images

    def merge(self, other: Telemetry) -> None:
        """Add the counts of another worker, rank or epoch."""
        self.num_packs += other.num_packs
        self.num_single_long += other.num_single_long
        self.num_images += other.num_images
        self.num_padding += other.num_padding
        self.num_pack_tokens += other.num_pack_tokens
        self.fill_histogram = [a + b for a, b in zip(self.fill_histogram, other.fill_histogram, strict=True)]
        for name, counts in other.sources.items():
            self._of(name).merge(counts)
        for name, counts in other.further.items():
            self._further(name).merge(counts)
        self.lost_tokens.update(other.lost_tokens)
        self.lost_images.update(other.lost_images)

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
        """At the end of an epoch: read = packed + dropped, for every source, in samples and in rows."""
        return all(counts.num_held == 0 for counts in (*self.sources.values(), *self.rows.values()))

    @property
    def account(self) -> str:
        """The law of conservation in words; what is not reached was planned, but training stopped before it."""
        # A source of which more came out than went in is a mistake of ours, which must not hide in a sum of all.
        adds_up = all(counts.num_held >= 0 for counts in (*self.sources.values(), *self.rows.values()))
        return (
            f"counts {'add' if adds_up else 'do not add'} up: {self.num_read} read = {self.num_packed} packed + "
            f"{sum(self.num_dropped.values())} left out + {self.num_held} not reached"
        ) + (f"; in rows: {_in_words(self.rows)}" if self.further else "")

    @property
    def rows(self) -> dict[str, SourceCounts]:
        """What became of the rows: a row that is cut is counted by its part 0, which is trained if any of it is."""
        nothing = SourceCounts()
        return {name: counts.without(self.further.get(name, nothing)) for name, counts in self.sources.items()}

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
        counts = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name not in _OF_PARTS}
        state = {**counts, "sources": {name: source.as_json() for name, source in self.sources.items()}}
        if self.further or self.lost_tokens:
            further = {name: source.as_json() for name, source in self.further.items()}
            state |= {"further": further, "lost_tokens": self.lost_tokens, "lost_images": self.lost_images}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Telemetry:
        """Counts that go on from a saved state; one that cannot be is refused."""
        of_parts = {**{name: {} for name in _OF_PARTS}, **state}
        check_shape(of_parts, {**STATE, **_OF_PARTS}, "counted")
        if len(state["fill_histogram"]) != NUM_FILL_BINS + 1:
            raise StateMismatch(f"damaged: counted.fill_histogram has {len(state['fill_histogram'])} numbers")
        counts = {name: _counts_from(of_parts[name]) for name in ("sources", "further")}
        lost = {name: Counter(of_parts[name]) for name in ("lost_tokens", "lost_images")}
        return cls(**{**{spec.name: of_parts[spec.name] for spec in fields(cls)}, **counts, **lost})

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
            **(self._of_cut_rows() if self.further or self.lost_tokens else {}),
        }

    def _of_cut_rows(self) -> dict[str, Any]:
        """The same in rows, and what was lost where they were cut."""
        rows = {name: counts.as_json() for name, counts in sorted(self.rows.items())}
        for counts in rows.values():
            del counts["num_tokens"]  # of all their parts, as beside their source
        lost = {
            reason: {
                "num_parts": self.num_dropped[reason],
                "num_tokens": num_tokens,
                "num_images": self.lost_images[reason],
            }
            for reason, num_tokens in sorted(self.lost_tokens.items())
        }
        return {"rows": rows, "lost_by_cutting": lost}

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

    def _further(self, source: str) -> SourceCounts:
        return self.further.setdefault(source, SourceCounts())


def _counts_from(state: Mapping[str, Any]) -> dict[str, SourceCounts]:
    return {
        name: SourceCounts(
            counts["num_read"], counts["num_packed"], counts["num_tokens"], Counter(counts["num_dropped"])
        )
        for name, counts in state.items()
    }


def _in_words(rows: Mapping[str, SourceCounts]) -> str:
    num_read, num_packed, num_held = (
        sum(getattr(counts, name) for counts in rows.values()) for name in ("num_read", "num_packed", "num_held")
    )
    num_left_out = num_read - num_packed - num_held
    return f"{num_read} read = {num_packed} packed + {num_left_out} left out + {num_held} not reached"


def _per_cent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0
