"""What travels from the data to the trainer: addresses in, encoded samples out, a record of what happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from swift_vlpack.errors import VLPackError
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.faults import Fault
from swift_vlpack.runlog.counts import Counts

Encoded = dict[str, Any]


class SampleId(NamedTuple):
    """A row of a source: its name, and the row's number in the file or data set it came from.

    Where the loader made that unknowable, `is_loaded`: the number is the row's place in what was loaded.
    """

    source: str
    row: int
    is_loaded: bool = False
    part: int | None = None
    """Which part of the row, where it is longer than a pack and cut."""

    @property
    def is_further_part(self) -> bool:
        """Whether this is not what its row is counted by, which is the row itself or its part 0."""
        return bool(self.part)

    def __str__(self) -> str:
        part = "" if self.part is None else f"/{self.part}"
        return f"{self.source}:{'loaded-' if self.is_loaded else ''}{self.row}{part}"


class Address(NamedTuple):
    """Where a sample is to be found: position in the loaded rows of a source, and which tokens of the row it is."""

    source: int
    row_index: int
    span: Span | None = None
    """None where it is the whole row."""


class PackAddress(NamedTuple):
    """Everything a worker needs to build one pack, so that it needs neither a plan nor sizes of its own."""

    epoch: int
    number: int
    samples: tuple[Address, ...]
    sizes: tuple[tuple[int, int, int, int], ...]
    """The fields of `RowSize` of each sample, as they were planned."""


class LeftOut(NamedTuple):
    """A sample that is in no pack, and why."""

    sample_id: SampleId
    reason: str
    detail: str = ""
    """The error in words."""
    files: tuple[str, ...] = ()
    """The files at fault, where that is known."""
    num_tokens: int = 0
    """Of a part that cutting left out."""
    num_images: int = 0

    def count_in(self, counts: Counts) -> None:
        """Count the sample, and what cutting lost with it."""
        key, lost = self.sample_id, {"num_tokens": self.num_tokens, "num_images": self.num_images}
        counts.dropped(key.source, self.reason, is_further=key.is_further_part, **lost)


class SampleError(VLPackError):
    """A row cannot be encoded; names the row and the reason that is counted."""

    def __init__(
        self, sample_id: SampleId, reason: str, detail: str, is_lasting: bool = True, files: tuple[str, ...] = ()
    ) -> None:
        """`is_lasting` says that the same row would fail again; `files` are those at fault."""
        super().__init__(f"{sample_id}: {reason}: {detail}")
        self.sample_id = sample_id
        self.reason = reason
        self.detail = detail
        self.is_lasting = is_lasting
        self.files = files

    @property
    def fault(self) -> Fault:
        """What was wrong, without the row."""
        return Fault(self.reason, self.detail, self.files)

    def of_part(self, part: int | None) -> SampleError:
        """The same of a part of the row: each of them is left out, and counted, by its own name."""
        sample_id = self.sample_id._replace(part=part)
        return SampleError(sample_id, self.reason, self.detail, self.is_lasting, self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle would call the class with the one text of the error, on the way out of a worker.
        return type(self), (self.sample_id, self.reason, self.detail, self.is_lasting, self.files)


class TooManyFailures(VLPackError):
    """So many consecutive rows could not be read that the data, not a row, must be broken."""


@dataclass(frozen=True, slots=True)
class PackRecord:
    """What one pack is made of; travels beside the tensors and ends in the counters."""

    epoch: int
    number: int
    sample_ids: tuple[SampleId, ...]
    lengths: tuple[int, ...]
    num_images: int
    single_long: bool = False
    left_out: tuple[LeftOut, ...] = field(default=())
    progress: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """Where its worker stands after this pack, as JSON; none where packs are planned."""
    sequence_multiple: int = 1
    """The row is padded to a multiple of so many tokens."""
    num_padding: int = 0
    """Tokens of the row behind its samples, a segment of their own; known when the row is made."""
    num_vision_tokens: int = field(default=0, compare=False)
    """Tokens that stand for images, videos and sounds; known when the row is made."""

    @property
    def boundaries(self) -> Boundaries:
        """Where samples start in the row."""
        return Boundaries(self.lengths)

    @property
    def lengths_in_sequence(self) -> tuple[int, ...]:
        """Of the samples and what is behind them: of all tokens of the row."""
        return (*self.lengths, self.num_padding) if self.num_padding else self.lengths

    def in_sequence_of(self, num_tokens: int, num_vision_tokens: int) -> PackRecord:
        """The record of the row that was made."""
        num_padding = num_tokens - sum(self.lengths) if self.sequence_multiple > 1 else 0
        return replace(self, num_padding=num_padding, num_vision_tokens=num_vision_tokens)

    def count_in(self, counts: Counts) -> None:
        """Count the pack when it has been trained. One without samples, which fills a step up, is no pack."""
        if self.sample_ids:
            counts.packed(
                [(key.source, length) for key, length in zip(self.sample_ids, self.lengths, strict=True)],
                num_images=self.num_images,
                num_vision_tokens=self.num_vision_tokens,
                num_padding=self.num_padding,
                single_long=self.single_long,
                further=[key.source for key in self.sample_ids if key.is_further_part],
            )

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.sample_ids[:8]))
        more = len(self.sample_ids) - 8
        return f"pack {self.number} of epoch {self.epoch} [{shown}{f', and {more} more' if more > 0 else ''}]"


class PackedSamples(list[Encoded]):
    """The encoded samples of one pack, a plain list for the collator, with their record."""

    def __init__(self, samples: Iterable[Encoded], record: PackRecord) -> None:
        super().__init__(samples)
        self.record = record

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self), self.record)
