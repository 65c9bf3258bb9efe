"""Define plain values for packs, samples and steps as they are shown: no tensors, no layout.

`make_values.py` makes these values from the objects of training. `terminal.py` and `browser.py` show them, and
`as_json` writes them for other programs. Field names are keys of that JSON, so do not rename them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PROMPT, SUPERVISED, MASKED, VISION = KINDS = ("prompt", "supervised", "masked", "vision")
"""Kinds of tokens: in the prompt; in an answer and trained; in an answer and not trained; of an image or a video."""


class Piece(NamedTuple):
    """Consecutive tokens of one kind, as text."""

    kind: str
    num_tokens: int
    text: str


class Picture(NamedTuple):
    """An image or a video of a sample."""

    kind: str
    num_tokens: int | None
    """None if it is not known which tokens of the sample belong to it."""
    width: int | None = None
    """Pixels of the file; None if its size cannot be read here."""
    height: int | None = None
    name: str = ""
    thumbnail: str | None = None
    """A small copy as a data URI."""

    def __str__(self) -> str:
        size = "" if self.width is None else f" {self.width}x{self.height}"
        return f"{self.kind}{size}" + ("" if self.num_tokens is None else f" = {self.num_tokens} tokens")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A sample of a pack."""

    id: str
    where: str
    """File and line, or as much of it as is known."""
    source: str
    start: int
    """Index of its first token in the sequence."""
    num_tokens: int
    """Tokens of the sample; those of a branch do not include its prefix."""
    num_supervised: int
    num_vision: int
    positions: Mapping[str, tuple[int, int]]
    """Lowest and highest position on each axis."""
    pictures: Sequence[Picture] = ()
    pieces: Sequence[Piece] = ()
    prefix: int | None = None
    """Index of its prefix in `PackShown.prefixes`; None for a sample that shares none."""

    @property
    def share_of_vision(self) -> float:
        """Return the share of vision tokens among its tokens."""
        return self.num_vision / max(1, self.num_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the sample for other programs, without thumbnails."""
        share = round(self.share_of_vision, 4)
        shown = {"pictures": _without_thumbnails(self.pictures), "pieces": _as_dicts(self.pieces)}
        made = {**asdict(self), **shown, "share_of_vision": share}
        if self.prefix is None:  # for programs that know no prefixes
            del made["prefix"]
        return made


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The beginning that several samples of a pack share, which the sequence has once."""

    members: Sequence[int]
    """Indices of its branches among the members of the pack."""
    start: int
    num_tokens: int
    num_vision: int
    positions: Mapping[str, tuple[int, int]]
    pictures: Sequence[Picture] = ()
    pieces: Sequence[Piece] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the prefix for other programs, without thumbnails."""
        return {**asdict(self), "pictures": _without_thumbnails(self.pictures), "pieces": _as_dicts(self.pieces)}


def _without_thumbnails(pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    # A thumbnail is a copy of the image for pages only.
    return [{name: value for name, value in one._asdict().items() if name != "thumbnail"} for one in pictures]


def _as_dicts(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [piece._asdict() for piece in pieces]


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
        """Return the pack for other programs."""
        made = asdict(self)
        made["row"] = made.pop("sequence")  # an older name of this key, which scripts read (docs/concepts.md)
        made["members"] = [member.as_json() for member in self.members]
        made["prefixes"] = [prefix.as_json() for prefix in self.prefixes]
        if not self.prefixes:  # as it was before samples could share any
            del made["prefixes"]
            if made["row"] is not None:
                del made["row"]["parents"]
        counts = {"num_tokens": self.num_tokens, "fill": round(self.fill, 4), "num_supervised": self.num_supervised}
        return {**made, **counts, "num_vision": self.num_vision}


@dataclass(frozen=True, kw_only=True)
class TrainedPack:
    """A pack of an optimizer step: which samples it has, without their content."""

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
    """An optimizer step: the packs that it trained, and its loss in the log."""

    step: int
    packs: Sequence[TrainedPack]
    known_from: str
    """Says in words whether the packs are those of the plan or of the record."""
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
        made = {**asdict(self), "num_samples": self.num_samples}
        for pack in made["packs"]:
            if not any(pack["shared"]):
                del pack["shared"]
        return made
