"""Name, address and record samples: the small objects that data, dataloader workers and the trainer exchange.

>>> part = SampleId("captions", 17, part=2)
>>> str(part), part.is_further_part
('captions:17/2', True)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from swift_vlpack.errors import VLPackError
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.faults import Fault
from swift_vlpack.runlog.counts import Counts

Encoded = dict[str, Any]


class SampleId(NamedTuple):
    """The name of a sample: its source, the number of its row, and which part of the row it is."""

    source: str
    row: int
    """The row's number in its file or data set, from 0."""
    is_loaded: bool = False
    """True if `row` counts the loaded rows, because the number in the file is not known."""
    part: int | None = None
    """Number of the part, if the row is cut; None for a whole row."""

    @property
    def is_further_part(self) -> bool:
        """Tell whether this is a part other than part 0, by which counts of rows count a cut row."""
        return bool(self.part)

    def __str__(self) -> str:
        part = "" if self.part is None else f"/{self.part}"
        return f"{self.source}:{'loaded-' if self.is_loaded else ''}{self.row}{part}"


class Address(NamedTuple):
    """The place of a sample: its source, its row among the loaded rows of the source, and its tokens in the row."""

    source: int
    """Index of the source in the data set."""
    row_index: int
    span: Span | None = None
    """None for a whole row."""


class PackAddress(NamedTuple):
    """Everything a dataloader worker needs to build one pack, so that workers need no copy of the plan."""

    epoch: int
    number: int
    samples: tuple[Address, ...]
    sizes: tuple[tuple[int, int, int, int], ...]
    """The planned size of each sample: the fields of `RowSize`."""
    shared: tuple[int, ...] = ()
    """The tokens that each sample shares with the one before it; empty if none does."""


class LeftOut(NamedTuple):
    """A sample that is trained in no pack, and why."""

    sample_id: SampleId
    reason: str
    """A reason of `reasons.py`, which is counted."""
    detail: str = ""
    """The error in words."""
    files: tuple[str, ...] = ()
    """The files at fault, if these are known."""
    num_tokens: int = 0
    """Tokens that cutting lost, for a part."""
    num_images: int = 0
    """Images that cutting lost, for a part."""

    def count_in(self, counts: Counts) -> None:
        """Add the sample, and the tokens and images lost with it, to the counts."""
        key, lost = self.sample_id, {"num_tokens": self.num_tokens, "num_images": self.num_images}
        counts.dropped(key.source, self.reason, is_further=key.is_further_part, **lost)


class SampleError(VLPackError):
    """A row cannot be encoded. The error has the name of the row, and the reason that is counted."""

    def __init__(
        self, sample_id: SampleId, reason: str, detail: str, is_lasting: bool = True, files: tuple[str, ...] = ()
    ) -> None:
        """`is_lasting` is False for a failure that may pass, such as a timeout; `files` are the files at fault."""
        super().__init__(f"{sample_id}: {reason}: {detail}")
        self.sample_id = sample_id
        self.reason = reason
        self.detail = detail
        self.is_lasting = is_lasting
        self.files = files

    @property
    def fault(self) -> Fault:
        """The reason, the error in words and the files at fault."""
        return Fault(self.reason, self.detail, self.files)

    def of_part(self, part: int | None) -> SampleError:
        """Return the error under the name of a part of the row, because each part is counted by its own name."""
        sample_id = self.sample_id._replace(part=part)
        return SampleError(sample_id, self.reason, self.detail, self.is_lasting, self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        # Needed to leave a worker process: by default, pickle calls the class with the text of the error alone.
        return type(self), (self.sample_id, self.reason, self.detail, self.is_lasting, self.files)


class TooManyFailures(VLPackError):
    """Too many rows could not be read: the data must be broken, or a mount is gone."""

    sources: Sequence[Any] = ()
    """The `RowSource`s of the rows, if it was found before training, so that the rows can be listed."""


@dataclass(frozen=True, slots=True)
class PackRecord:
    """Record of one pack: its samples, and what was left out. Workers send it to the trainer along with the tensors."""

    epoch: int
    number: int
    sample_ids: tuple[SampleId, ...]
    lengths: tuple[int, ...]
    """The tokens of each sample alone, also of those that it shares."""
    num_images: int
    single_long: bool = False
    left_out: tuple[LeftOut, ...] = field(default=())
    progress: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """How far the worker of the pack has read after it, as JSON, for a resume; empty for planned packs."""
    sequence_multiple: int = 1
    """The sequence is padded to a multiple of this many tokens."""
    num_padding: int = 0
    """Padding tokens after the samples, a segment of their own; known once the sequence is made."""
    num_vision_tokens: int = field(default=0, compare=False)
    """Tokens that stand for images, videos and sounds; known once the sequence is made."""
    num_targets: int = field(default=0, compare=False)
    """Tokens that the loss predicts; known once the sequence is made."""
    shared: tuple[int, ...] = ()
    """The tokens that each sample shares with the one before it; empty if none does."""
    num_apart: int = 0
    """Samples that were planned to share a prefix and, once they were encoded, did not."""

    @property
    def boundaries(self) -> Boundaries:
        """Return the places where samples start in the sequence, and prefixes with their branches."""
        return Boundaries.of_samples(self.lengths, self.shared)

    @property
    def lengths_in_sequence(self) -> tuple[int, ...]:
        """Return the lengths of the segments, and of the padding after them if there is any."""
        lengths = self.boundaries.lengths if self.shared else self.lengths
        return (*lengths, self.num_padding) if self.num_padding else lengths

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample that are not those of the sample before it: together, those of the sequence."""
        if not self.shared:
            return self.lengths
        return tuple(length - shared for length, shared in zip(self.lengths, self.shared, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, without padding."""
        return sum(self.own_lengths)

    def in_sequence_of(self, num_tokens: int, num_vision_tokens: int, num_targets: int) -> PackRecord:
        """Return the record with the numbers that are known once the sequence is made."""
        num_padding = num_tokens - self.num_tokens if self.sequence_multiple > 1 else 0
        return replace(self, num_padding=num_padding, num_vision_tokens=num_vision_tokens, num_targets=num_targets)

    def count_in(self, counts: Counts) -> None:
        """Add a trained pack to the counts. A pack without samples, which only completes a step, is not counted."""
        if self.sample_ids:
            counts.packed(
                [(key.source, length) for key, length in zip(self.sample_ids, self.own_lengths, strict=True)],
                num_images=self.num_images,
                num_vision_tokens=self.num_vision_tokens,
                num_padding=self.num_padding,
                single_long=self.single_long,
                further=[key.source for key in self.sample_ids if key.is_further_part],
            )
            counts.shared(self.shared, num_apart=self.num_apart)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.sample_ids[:8]))
        more = len(self.sample_ids) - 8
        return f"pack {self.number} of epoch {self.epoch} [{shown}{f', and {more} more' if more > 0 else ''}]"


class PackedSamples(list[Encoded]):
    """The encoded samples of one pack with their record; a plain list for the host's collator."""

    def __init__(self, samples: Iterable[Encoded], record: PackRecord) -> None:
        super().__init__(samples)
        self.record = record

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self), self.record)
