"""What is shown of a pack and of a step, as plain values: whoever has tensors makes these, whoever shows reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

PROMPT, SUPERVISED, MASKED, VISION = KINDS = ("prompt", "supervised", "masked", "vision")
"""What a token is: of what was asked, of the answer and trained, of the answer and not trained, or of an image."""


class Piece(NamedTuple):
    """Tokens of one kind that follow one another, as text."""

    kind: str
    num_tokens: int
    text: str


class Picture(NamedTuple):
    """An image or a video of a sample."""

    kind: str
    num_tokens: int | None
    """None where it is not known which tokens are its own."""
    width: int | None = None
    """Of the file, in pixels; None where that cannot be read here."""
    height: int | None = None
    name: str = ""
    thumbnail: str | None = None
    """A data URI."""

    def __str__(self) -> str:
        size = "" if self.width is None else f" {self.width}x{self.height}"
        return f"{self.kind}{size}" + ("" if self.num_tokens is None else f" = {self.num_tokens} tokens")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A sample of a pack."""

    id: str
    where: str
    source: str
    start: int
    """Its first token in the row."""
    num_tokens: int
    num_supervised: int
    num_vision: int
    positions: Mapping[str, tuple[int, int]]
    """Lowest and highest of each row of positions."""
    pictures: Sequence[Picture] = ()
    pieces: Sequence[Piece] = ()

    @property
    def share_of_vision(self) -> float:
        """Vision tokens among its tokens."""
        return self.num_vision / max(1, self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The tensors that the trainer gets, as lists."""

    input_ids: list[int]
    labels: list[int]
    position_ids: list[list[int]]
    cu_seqlens: list[int]


@dataclass(frozen=True, kw_only=True)
class PackShown:
    """A pack with all that is in it."""

    epoch: int
    number: int
    num_packs: int | None
    """Of the epoch; None where nobody knows."""
    rank: int
    step: int | None
    """The optimizer step that trains it."""
    packing_length: int
    members: Sequence[Member]
    left_out: Sequence[Mapping[str, str]] = ()
    row: Row | None = None

    @property
    def num_tokens(self) -> int:
        """Of all samples."""
        return sum(member.num_tokens for member in self.members)

    @property
    def fill(self) -> float:
        """Share of the capacity; above 1 where a sample too long for it has the row to itself."""
        return self.num_tokens / self.packing_length

    @property
    def num_supervised(self) -> int:
        """Tokens with a label."""
        return sum(member.num_supervised for member in self.members)

    @property
    def num_vision(self) -> int:
        """Tokens that stand for images and videos."""
        return sum(member.num_vision for member in self.members)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        counts = {"num_tokens": self.num_tokens, "fill": round(self.fill, 4), "num_supervised": self.num_supervised}
        made = asdict(self)
        made["members"] = [member_json(member) for member in self.members]
        return {**made, **counts, "num_vision": self.num_vision}


def member_json(member: Member) -> dict[str, Any]:
    """A sample for machines."""
    pictures = [{**one._asdict(), "thumbnail": None} for one in member.pictures]
    for one in pictures:
        del one["thumbnail"]  # which is for pages
    pieces = [piece._asdict() for piece in member.pieces]
    share = round(member.share_of_vision, 4)
    return {**asdict(member), "pictures": pictures, "pieces": pieces, "share_of_vision": share}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One pack of an optimizer step, without its content."""

    rank: int
    epoch: int
    number: int
    ids: Sequence[str]
    where: Sequence[str] = ()
    lengths: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class StepShown:
    """What an optimizer step trained, and what the log says of it."""

    step: int
    packs: Sequence[Trained]
    known_from: str
    """Whether it was computed again or recorded."""
    loss: float | None = None
    loss_of: tuple[int, int] | None = None
    """The steps whose mean the loss is."""
    loss_before: float | None = None
    """The loss that was logged before it, of a jump."""
    notes: Sequence[str] = ()

    @property
    def num_samples(self) -> int:
        """Of all packs."""
        return sum(len(pack.ids) for pack in self.packs)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "num_samples": self.num_samples}
