"""Define plain values for packs, samples and steps as they are shown: no tensors, no layout.

`make_values.py` makes packs from the objects of training. `terminal.py` shows them as text, `browser.py` as a page of
their JSON, and `as_json` writes it for other programs. Field names are keys of that JSON, so do not rename them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PROMPT, SUPERVISED, MASKED, VISION = ("prompt", "supervised", "masked", "vision")
"""Kinds of tokens: in the prompt; in an answer and trained; in an answer and not trained; of an image or a video."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one kind, as text."""

    kind: str
    num_tokens: int
    text: str


@dataclass(frozen=True)
class Picture:
    """An image or a video of a sample."""

    kind: str
    num_tokens: int | None
    """None if it is not known which tokens of the sample belong to it."""
    width: int | None = None
    """Pixels of the file; None if its size cannot be read here."""
    height: int | None = None
    name: str = ""
    thumbnail: str | None = None
    """A small copy as a data URI, for pages."""

    def __str__(self) -> str:
        size = "" if self.width is None else f" {self.width}x{self.height}"
        return f"{self.kind}{size}" + ("" if self.num_tokens is None else f" = {self.num_tokens} tokens")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of a sequence: a sample, or the prefix or the rest of one."""

    start: int
    """Index of its first token in the sequence."""
    num_tokens: int
    num_vision: int
    num_supervised: int = 0
    positions: Mapping[str, tuple[int, int]]
    """Lowest and highest position on each axis."""
    pictures: Sequence[Picture] = ()
    pieces: Sequence[Piece] = ()
    where: str = ""
    """File and line of a sample, or as much of it as is known."""


@dataclass(frozen=True, kw_only=True)
class Member(Segment):
    """A sample of a pack. A branch does not include its prefix."""

    id: str
    source: str
    prefix: int | None = None
    """Index of its prefix in `PackShown.prefixes`; None for a sample that shares none."""


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Segment):
    """The beginning that several samples of a pack share, which the sequence has once."""

    members: Sequence[int]
    """Indices of its branches among the members of the pack."""


@dataclass(frozen=True, kw_only=True)
class SequenceTensors:
    """The tensors of a packed sequence, as the trainer gets them, in lists."""

    input_ids: list[int]
    labels: list[int]
    position_ids: list[list[int]]
    cu_seqlens: list[int]
    """Start of every sample, then of the padding if there is any, then the end of the sequence.

    If samples share prefixes, the starts are those of prefixes and branches.
    """
    parents: list[int] = field(default_factory=list)
    """Index of the prefix of each segment, -1 for none; empty if no samples share a prefix."""


@dataclass(frozen=True, kw_only=True)
class PackShown:
    """A pack: its samples, its tensors, its place in the run, and the samples that were left out of it."""

    epoch: int
    number: int
    num_packs: int | None
    """Packs of the epoch; None if packs are made as rows come."""
    rank: int
    step: int | None
    """The optimizer step that trains the pack."""
    packing_length: int
    members: Sequence[Member]
    left_out: Sequence[Mapping[str, str]] = ()
    sequence: SequenceTensors | None = None
    prefixes: Sequence[SharedPrefix] = ()

    @property
    def segments(self) -> list[Member | SharedPrefix]:
        """Return prefixes and samples as they follow each other in the sequence."""
        return sorted((*self.prefixes, *self.members), key=lambda one: one.start)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all samples, those of a prefix once."""
        return sum(one.num_tokens for one in self.segments)

    @property
    def num_tokens_alone(self) -> int:
        """Return the tokens that the samples have alone, when none shares a prefix."""
        return self.num_tokens + sum(one.num_tokens * (len(one.members) - 1) for one in self.prefixes)

    @property
    def fill(self) -> float:
        """Return tokens over capacity; above 1 for a single-long sample, which is packed alone."""
        return self.num_tokens / self.packing_length

    @property
    def num_supervised(self) -> int:
        """Return the tokens with a label."""
        return sum(member.num_supervised for member in self.members)

    @property
    def num_vision(self) -> int:
        """Return the tokens that stand for images and videos."""
        return sum(one.num_vision for one in self.segments)

    def as_json(self) -> dict[str, Any]:
        """Return the pack for the page and for other programs."""
        made = asdict(self)
        made["row"] = made.pop("sequence")  # an older name of this key, which scripts read (docs/concepts.md)
        names = ("num_tokens", "num_tokens_alone", "num_supervised", "num_vision")
        return {**made, "fill": round(self.fill, 4), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True)
class TrainedPack:
    """A pack of an optimizer step on record: which samples it has, without their content."""

    rank: int
    epoch: int
    number: int
    ids: Sequence[str]
    where: Sequence[str]
    lengths: Sequence[int]
    """Tokens of each sample alone, also of those that it shares."""
    shared: Sequence[int] = ()
    """The tokens that each sample shares with the one before it; empty if none does."""


@dataclass(frozen=True, kw_only=True)
class StepShown:
    """An optimizer step on record: the packs that it trained, and its loss in the log."""

    step: int
    packs: Sequence[TrainedPack]
    loss: float | None = None
    loss_of: tuple[int, int] | None = None
    """First and last of the steps that the loss is the mean of."""
    notes: Sequence[str] = ()

    @property
    def num_samples(self) -> int:
        """Return the samples of all packs."""
        return sum(len(pack.ids) for pack in self.packs)

    def as_json(self) -> dict[str, Any]:
        """Return the step for other programs."""
        return {**asdict(self), "num_samples": self.num_samples}
