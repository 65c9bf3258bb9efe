"""Count what happened to every sample, in numbers that add up over packs, steps, workers, ranks and epochs.

>>> counts = Counts(packing_length=10)
>>> counts.read("captions", 3)
>>> counts.packed([("captions", 6), ("captions", 4)])
>>> counts.dropped("captions", "oversize")
>>> counts.num_read, counts.num_packed, counts.num_dropped, counts.num_held
(3, 2, Counter({'oversize': 1}), 0)
>>> counts.is_closed
True
>>> both = Counts(packing_length=10)
>>> both.merge(counts)
>>> both.merge(counts)
>>> both.num_packs, both.num_tokens, both.fill_mean
(2, 20, 1.0)

The law: read = packed + left out + held, for every source. Counts are closed when nothing is held, as at the end of an
epoch. All counts are integers, so their sum is the same in any order; shares and means are computed from the sums.
`account.py` writes the counts of an epoch for people and machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from swift_vlpack.reasons import about

NUM_FILL_BINS = 100
"""Bins of fill, one for each whole per cent. Bins add up over ranks exactly; means or percentiles would not."""
_STATE = (
    "packing_length",
    "num_packs",
    "num_single_long",
    "num_images",
    "num_padding",
    "num_pack_tokens",
    "fill_histogram",
    "sources",
)
"""Fields of a saved state: the counts that the account of an epoch needs. All others are in the run log."""
_STATE_OF_UNITS = ("num_units", "num_in_units", "num_apart", "num_shared_tokens")
"""Further fields of a saved state, if samples shared prefixes."""
_MAY_BE_LEFT_OUT = {*_STATE_OF_UNITS, "num_failed_late"}
"""Numbers that a `steps` event has only if they are not 0."""
_STATE_OF_CUT_ROWS = ("further", "lost_tokens", "lost_images")
"""Further fields of a saved state, if rows were cut."""


@dataclass(slots=True)
class SourceCounts:
    """Counts of what became of the samples of one source."""

    num_read: int = 0
    num_packed: int = 0
    num_tokens: int = 0
    num_dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_held(self) -> int:
        """Return how many samples are read, but neither packed nor left out yet."""
        return self.num_read - self.num_packed - self.num_dropped.total()

    def merge(self, other: SourceCounts) -> None:
        """Add other counts of the source."""
        self.num_read += other.num_read
        self.num_packed += other.num_packed
        self.num_tokens += other.num_tokens
        if other.num_dropped:  # skip empty counters: a report may merge millions of counts, nearly all without any
            self.num_dropped.update(other.num_dropped)

    def without(self, other: SourceCounts) -> SourceCounts:
        """Subtract `other`, which counts some of these samples. Tokens stay: they are not counted by part."""
        num_dropped = Counter(self.num_dropped)
        num_dropped.subtract(other.num_dropped)
        num_packed = self.num_packed - other.num_packed
        return SourceCounts(self.num_read - other.num_read, num_packed, self.num_tokens, +num_dropped)

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers under their full names."""
        return {
            "num_read": self.num_read,
            "num_packed": self.num_packed,
            "num_held": self.num_held,
            "num_tokens": self.num_tokens,
            "num_dropped": dict(sorted(self.num_dropped.items())),
        }


@dataclass(slots=True)
class Counts:
    """Counts of samples and packs: of a pack, a step, a worker, a rank, an epoch or a whole run."""

    packing_length: int
    num_packs: int = 0
    num_single_long: int = 0
    num_images: int = 0
    num_vision_tokens: int = 0
    num_padding: int = 0
    num_pack_tokens: int = 0
    """Tokens in packs that are not a single long sample; only these packs count for the fill."""
    num_room: int = 0
    """Tokens that these packs could hold."""
    num_units: int = 0
    """Prefixes that several samples of a pack shared."""
    num_in_units: int = 0
    """Samples that shared a prefix."""
    num_apart: int = 0
    """Samples that were planned to share a prefix and, once they were encoded, did not."""
    num_shared_tokens: int = 0
    """Tokens that were not computed again: those of prefixes, for each of their samples but the first."""
    num_tokens_unpacked: int = 0
    """Tokens of the same samples in padded batches, padding included."""
    num_failed_late: int = 0
    """Rows that failed when they were loaded, and that un-packed training deletes before it draws its steps."""
    num_steps: int = 0
    """Optimizer steps. Ranks take a step together, so this field and the next two are set after ranks are merged."""
    num_tokens_slowest: int = 0
    """Sum over steps of the tokens of the rank that had most."""
    milliseconds: int = 0
    """Time of training, without evaluation and saving."""
    fill_histogram: list[int] = field(default_factory=lambda: [0] * (NUM_FILL_BINS + 1))
    """Packs by fill in whole per cent."""
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    further: dict[str, SourceCounts] = field(default_factory=dict)
    """Samples in `sources` that are part 1, 2, ... of a cut row. Without them, `sources` counts rows."""
    lost_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of parts that cutting left out, by reason."""
    lost_images: Counter[str] = field(default_factory=Counter)

    # -- counting -----------------------------------------------------------------------------------------------------

    def read(self, source: str, num_samples: int = 1, *, num_further: int = 0) -> None:
        """Count samples as read. `num_further` of them are parts 1, 2, ... of cut rows."""
        _of(self.sources, source).num_read += num_samples
        if num_further:
            _of(self.further, source).num_read += num_further

    def read_what_came(self) -> None:
        """Set the samples read to those packed or left out. A stream needs this: its rows are not known in advance."""
        for counts in (*self.sources.values(), *self.further.values()):
            counts.num_read = counts.num_packed + counts.num_dropped.total()

    def packed(
        self,
        samples: Iterable[tuple[str, int]],
        *,
        num_images: int = 0,
        num_vision_tokens: int = 0,
        num_padding: int = 0,
        single_long: bool = False,
        further: Iterable[str] = (),
    ) -> None:
        """Count one pack of `(source, length)` samples; `further` are the sources of further parts among them."""
        num_tokens = 0
        for source, length in samples:
            counts = _of(self.sources, source)
            counts.num_packed += 1
            counts.num_tokens += length
            num_tokens += length
        for source in further:
            _of(self.further, source).num_packed += 1
        self.num_packs += 1
        self.num_images += num_images
        self.num_vision_tokens += num_vision_tokens
        self.num_padding += num_padding
        # The fill of a single long sample says nothing about how well samples were put together.
        if single_long:
            self.num_single_long += 1
            return
        self.num_pack_tokens += num_tokens
        self.num_room += self.packing_length
        self.fill_histogram[min(NUM_FILL_BINS, NUM_FILL_BINS * num_tokens // self.packing_length)] += 1

    def shared(self, shared: Sequence[int], *, num_apart: int = 0) -> None:
        """Count the units of a pack: `shared` are the tokens that each sample shares with the one before it.

        The lengths that `packed` counts do not contain these tokens. `num_apart` samples left their unit once encoded.
        """
        self.num_apart += num_apart
        for before, here in pairwise((0, *shared)):
            begins_unit = bool(here and not before)
            self.num_units += begins_unit
            self.num_in_units += bool(here) + begins_unit  # the first sample of a unit shares with none before it
            self.num_shared_tokens += here

    def dropped(
        self,
        source: str,
        reason: str,
        num_samples: int = 1,
        *,
        is_further: bool = False,
        num_tokens: int = 0,
        num_images: int = 0,
    ) -> None:
        """Count samples that are left out, with the tokens and images that cutting lost. Raises for unknown reasons."""
        about(reason)  # raises
        _of(self.sources, source).num_dropped[reason] += num_samples
        if is_further:
            _of(self.further, source).num_dropped[reason] += num_samples
        if num_tokens:
            self.lost_tokens[reason] += num_tokens
            self.lost_images[reason] += num_images

    def merge(self, other: Counts) -> None:
        """Add other counts. The order of merging makes no difference."""
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fill_histogram = [a + b for a, b in zip(self.fill_histogram, other.fill_histogram, strict=True)]
        for mine, others in ((self.sources, other.sources), (self.further, other.further)):
            for name, counts in others.items():
                _of(mine, name).merge(counts)
        self.lost_tokens.update(other.lost_tokens)
        self.lost_images.update(other.lost_images)

    # -- derived numbers ----------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Return the tokens of samples in packs."""
        return sum(counts.num_tokens for counts in self.sources.values())

    @property
    def num_read(self) -> int:
        """Return how many samples came in."""
        return sum(counts.num_read for counts in self.sources.values())

    @property
    def num_packed(self) -> int:
        """Return how many samples are in packs."""
        return sum(counts.num_packed for counts in self.sources.values())

    @property
    def num_held(self) -> int:
        """Return how many samples are neither packed nor left out. A negative number is a bug: one counted twice."""
        return sum(counts.num_held for counts in self.sources.values())

    @property
    def num_dropped(self) -> Counter[str]:
        """Return how many samples are left out, by reason."""
        return sum((counts.num_dropped for counts in self.sources.values()), Counter())

    @property
    def num_padding_saved(self) -> int:
        """Return the padding that packing saves; negative if `packing_pad_to` adds more than padded batches have."""
        return self.num_tokens_unpacked - self.num_tokens_alone - self.num_padding

    @property
    def num_tokens_alone(self) -> int:
        """Return the tokens that the samples in packs have alone, when none shares a prefix."""
        return self.num_tokens + self.num_shared_tokens

    @property
    def tells_of_sharing(self) -> bool:
        """Tell whether there is anything to report of sharing: units, or samples that could have shared."""
        return bool(self.num_units or self.num_apart)

    @property
    def num_alone(self) -> int:
        """Return how many samples in packs share no prefix."""
        return self.num_packed - self.num_in_units

    @property
    def seconds(self) -> float:
        """Return the time of training, without evaluation and saving."""
        return self.milliseconds / 1000

    @property
    def rows(self) -> dict[str, SourceCounts]:
        """Return the counts of rows. A cut row is counted by its part 0, which is trained if any of its parts is."""
        nothing = SourceCounts()
        return {name: counts.without(self.further.get(name, nothing)) for name, counts in self.sources.items()}

    @property
    def is_closed(self) -> bool:
        """Tell whether nothing is held: read = packed + left out, for every source, in samples and in rows."""
        return all(counts.num_held == 0 for counts in (*self.sources.values(), *self.rows.values()))

    @property
    def fill_mean(self) -> float:
        """Return the mean fill of the packs that are not a single long sample."""
        return share(self.num_pack_tokens, self.num_room)

    def fill_percentile(self, per_cent: int) -> int:
        """Return the fill in whole per cent below which `per_cent` of the packs lie."""
        seen, wanted = 0, sum(self.fill_histogram) * per_cent / 100
        for fill, num_packs in enumerate(self.fill_histogram):
            seen += num_packs
            # Skip empty bins: for `per_cent` 0, `seen` reaches `wanted` before the first pack.
            if num_packs and seen >= wanted:
                return fill
        return 0

    # -- as JSON ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the counts of an epoch for a checkpoint; `from_state` reads them."""
        names = [*_STATE, *(_STATE_OF_CUT_ROWS if self.further or self.lost_tokens else ())]
        names += _STATE_OF_UNITS if self.num_units or self.num_apart else ()
        state = {name: getattr(self, name) for name in names}
        return {
            name: {of: counts.as_json() for of, counts in value.items()} if name in ("sources", "further") else value
            for name, value in state.items()
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counts:
        """Return the counts of a saved state."""
        state = {**dict.fromkeys(_STATE_OF_UNITS, 0), **{name: {} for name in _STATE_OF_CUT_ROWS}, **state}
        counts = cls(**{name: state[name] for name in (*_STATE, *_STATE_OF_UNITS)})
        counts.sources, counts.further = _sources_from(state["sources"]), _sources_from(state["further"])
        counts.lost_tokens, counts.lost_images = Counter(state["lost_tokens"]), Counter(state["lost_images"])
        counts.num_room = (counts.num_packs - counts.num_single_long) * counts.packing_length
        return counts

    def as_event(self) -> dict[str, Any]:
        """Return the fields of a `steps` event of the run log: what all ranks trained."""
        sources = {
            name: {"num_samples": counts.num_packed, "num_tokens": counts.num_tokens}
            for name, counts in sorted(self.sources.items())
            if counts.num_packed
        }
        numbers = {name: getattr(self, name) for name in NUMBERS}
        numbers = {name: number for name, number in numbers.items() if number or name not in _MAY_BE_LEFT_OUT}
        # The two sums are for people who read the file: `from_event` computes them from the sources.
        return {**numbers, "num_samples": self.num_packed, "num_tokens": self.num_tokens, "sources": sources}

    @classmethod
    def from_event(cls, event: Mapping[str, Any], packing_length: int) -> Counts:
        """Return the counts of a `steps` event. Packed samples count as read; fill percentiles are not known."""
        event = {**dict.fromkeys(_MAY_BE_LEFT_OUT, 0), **event}
        counts = cls(packing_length, **{name: event[name] for name in NUMBERS})
        for name, source in event["sources"].items():
            num_samples = source["num_samples"]
            counts.sources[name] = SourceCounts(num_samples, num_samples, source["num_tokens"])
        return counts


NUMBERS = tuple(spec.name for spec in fields(Counts) if spec.type == "int" and spec.name != "packing_length")
"""The fields that are plain sums: `merge` adds them, and `steps` events have them."""


def padded(lengths: Sequence[int], batch_size: int) -> int:
    """Count the tokens of samples in padded batches of `batch_size`, in this order.

    >>> padded([300, 500, 200], batch_size=2), padded([300, 500, 200], batch_size=1)
    (1200, 1000)
    """
    batches = (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))
    return sum(len(batch) * max(batch) for batch in batches)


def share(part: float, whole: float) -> float:
    """Return `part` as a share of `whole`; 0 if there is no whole."""
    return part / whole if whole else 0.0


def _of(counts: dict[str, SourceCounts], source: str) -> SourceCounts:
    return counts.setdefault(source, SourceCounts())


def _sources_from(state: Mapping[str, Any]) -> dict[str, SourceCounts]:
    names = ("num_read", "num_packed", "num_tokens")
    return {
        name: SourceCounts(**{of: counts[of] for of in names}, num_dropped=Counter(counts["num_dropped"]))
        for name, counts in state.items()
    }
