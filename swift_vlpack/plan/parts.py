"""Rows that are longer than a pack: where they are cut, as a pure function of the runs of tokens they are made of.

Text can be cut between any two tokens; an image or a video, with the tokens that begin and end it, stays whole.

>>> row = [Run(6), Run(5, images=1, patches=20, is_whole=True), Run(3)]
>>> for part in parts_of(row, Cutting(how="split", capacity=8)):
...     print(part.number, part.start, part.stop, part.images)
0 0 6 0
1 6 14 1

Every token is in exactly one part, but for those of `stride`, which a part repeats as context. Parts that are to be
trained are numbered from 0 on, in the order of the row; behind them come those that are left out, with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.reasons import Reason


class Run(NamedTuple):
    """Tokens of one kind that follow one another in a row."""

    length: int
    images: int = 0
    patches: int = 0
    is_whole: bool = False
    """Whether it must not be cut: an image or a video."""


class Span(NamedTuple):
    """Some tokens of a row that are a sample of their own, and which part of the row that is."""

    number: int
    start: int
    stop: int
    num_repeated: int = 0
    """Tokens at its start that are in the part before too, as context that is not trained."""
    row_length: int = 0
    """Of a part of a window the tokens of its row: that alone says whether the row is still what it was."""

    @property
    def length(self) -> int:
        """Tokens, with those that are repeated."""
        return self.stop - self.start


class Part(NamedTuple):
    """A span with what it holds; `reason` says why it is in no pack."""

    number: int
    start: int
    stop: int
    num_repeated: int = 0
    images: int = 0
    patches: int = 0
    reason: Reason | None = None

    @property
    def span(self) -> Span:
        """Where it is."""
        return Span(*self[:4])

    @property
    def length(self) -> int:
        """Tokens, with those that are repeated."""
        return self.stop - self.start


class Taken(NamedTuple):
    """What a pack that is not full yet holds already."""

    tokens: int = 0
    images: int = 0
    patches: int = 0


NOTHING = Taken()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """What becomes of rows longer than a pack: `split`, `truncate` or `drop`; `window`: of all rows, end to end."""

    how: str
    capacity: int
    stride: int = 0
    """Tokens of context with which a part begins; fewer behind an image, and before one that needs the room."""
    min_len: int = 1
    """Shorter parts are left out."""
    max_images: int | None = None
    max_patches: int | None = None

    @classmethod
    def of(cls, config: PackingConfig) -> Cutting | None:
        """What the options ask for, checked together; None where rows stay as they are."""
        _check(config)
        if not config.cuts_rows:
            return None
        return cls(
            how=WINDOW if config.packing_strategy == WINDOW else config.packing_overflow,
            capacity=config.packing_length,
            stride=config.packing_stride,
            min_len=config.packing_min_len,
            max_images=config.packing_max_images,
            max_patches=config.packing_max_patches,
        )


def _check(config: PackingConfig) -> None:
    """Not in the options themselves: `packing_overflow` and `packing_length` may still come from ms-swift's flags."""
    how, capacity = config.packing_overflow, config.packing_length
    if config.packing_strategy == WINDOW:
        _check_windows(config)
    for name, is_default, served in (
        ("packing_stride", config.packing_stride == 0, ("split",)),
        ("packing_min_len", config.packing_min_len == 1, ("split", "truncate")),
    ):
        if not is_default and how not in served:
            raise ConfigError(
                f"{name}={getattr(config, name)} would do nothing under packing_overflow={how}; set packing_overflow "
                f"to {' or '.join(served)}, or leave it out"
            )
    if config.packing_stride >= capacity:
        raise ConfigError(
            f"packing_stride={config.packing_stride} leaves no room for a new token in a part of "
            f"packing_length={capacity}"
        )
    if config.packing_min_len > capacity:
        raise ConfigError(
            f"packing_min_len={config.packing_min_len} is more than packing_length={capacity}: no part is so long"
        )


def _check_windows(config: PackingConfig) -> None:
    how = config.packing_overflow
    if how != "keep":
        raise ConfigError(
            f"packing_strategy=window cuts rows wherever a pack is full, so packing_overflow={how} would do nothing; "
            "leave it out, or take another strategy"
        )
    for name, is_default, why in (
        ("packing_stride", config.packing_stride == 0, "windows repeat nothing"),
        ("packing_min_len", config.packing_min_len == 1, "windows have no least length"),
    ):
        if not is_default:
            raise ConfigError(
                f"{name}={getattr(config, name)} would do nothing under packing_strategy=window: {why}; leave it out"
            )


def parts_of(runs: Sequence[Run] | None, cutting: Cutting, num_tokens: int | None = None) -> list[Part]:
    """The parts of a row; none where it is not longer than a pack, and stays whole.

    `runs` is None where nobody knows which tokens are an image: then the row, of `num_tokens`, cannot be cut.
    """
    num_tokens = sum(run.length for run in runs or ()) if num_tokens is None else num_tokens
    if num_tokens <= cutting.capacity:
        return []
    if cutting.how == "drop":
        return [_everything(runs, num_tokens, Reason.OVERFLOW)]
    if runs is None:
        return [_everything(runs, num_tokens, Reason.CANNOT_BE_CUT)]
    cutter = _Cutter(cutting)
    made = _truncated(cutter, runs, num_tokens) if cutting.how == "truncate" else cutter.split(runs)
    return _numbered([_unless_too_short(part, cutting) for part in made])


def window_parts(runs: Sequence[Run] | None, cutting: Cutting, whole: Run, taken: Taken = NOTHING) -> list[Part]:
    """The parts of a row that begins behind what the open pack holds; none where it fits there in one piece.

    `whole` is the row as one run, which is all that is known of it where `runs` is None.

    >>> text, cutting = Run(9), Cutting(how=WINDOW, capacity=6)
    >>> [part[1:3] for part in window_parts([text], cutting, text, Taken(4))]
    [(0, 2), (2, 8), (8, 9)]
    """
    if runs is None and whole.length > cutting.capacity:
        return [_everything([whole], whole.length, Reason.CANNOT_BE_CUT)]
    made = _Cutter(cutting, taken).split([whole._replace(is_whole=True)] if runs is None else runs)
    return [] if len(made) == 1 and made[0].reason is None else _numbered(made)


class _Cutter:
    """Fills one part after the other with runs; what is open has not been given out."""

    def __init__(self, cutting: Cutting, taken: Taken = NOTHING) -> None:
        self._cutting = cutting
        self._parts: list[Part] = []
        self._at = 0  # tokens behind
        self._behind_media = 0  # where the last image ended: context begins there at the earliest
        self._open(0)
        self._taken = taken

    def split(self, runs: Sequence[Run]) -> list[Part]:
        """All parts, in the order of the row."""
        for run in runs:
            if run.is_whole:
                self._put_medium(run)
            else:
                self._put_text(run.length)
        return [*self._parts, *self._closed()]

    def first(self, runs: Sequence[Run]) -> Part:
        """What fits one part, from the start on."""
        for run in runs:
            taken = run.length if self._fits(run) else 0 if run.is_whole else self._room
            self._add(run if taken == run.length else Run(taken))
            if taken < run.length:
                break
        return self._part()

    @property
    def _room(self) -> int:
        return self._cutting.capacity - self._taken.tokens - (self._at - self._start)

    def _fits(self, run: Run) -> bool:
        uses = (
            (run.length, self._room),
            (run.images, _left(self._cutting.max_images, self._taken.images + self._images)),
            (run.patches, _left(self._cutting.max_patches, self._taken.patches + self._patches)),
        )
        return all(not used or used <= left for used, left in uses)

    def _put_medium(self, run: Run) -> None:
        if run.length > self._cutting.capacity:
            taken = self._taken_so_far()
            self._close()
            lost = Part(0, self._at, self._at + run.length, 0, run.images, run.patches, Reason.IMAGE_OVER_LENGTH)
            self._parts.append(lost)
            self._at = self._behind_media = lost.stop
            self._open(0)
            self._taken = taken
            return
        if not self._fits(run) and (self._at > self._new or any(self._taken)):
            self._close()
            self._open(self._cutting.capacity - run.length)
        self._add(run)
        self._behind_media = self._at

    def _put_text(self, num_tokens: int) -> None:
        while num_tokens:
            if not self._room:
                self._close()
                self._open(self._cutting.stride)
            taken = min(num_tokens, self._room)
            self._add(Run(taken))
            num_tokens -= taken

    def _add(self, run: Run) -> None:
        self._at += run.length
        self._images += run.images
        self._patches += run.patches

    def _open(self, most_repeated: int) -> None:
        """Begin a part here, with so many tokens of context at most."""
        num_repeated = min(self._cutting.stride, most_repeated, self._at - self._behind_media)
        self._start, self._new = self._at - num_repeated, self._at
        self._images = self._patches = 0
        self._taken = NOTHING

    def _taken_so_far(self) -> Taken:
        """Of the pack that the next part begins in: windows go on in it, other parts have one of their own."""
        if self._cutting.how != WINDOW:
            return NOTHING
        own = Taken(self._at - self._start, self._images, self._patches)
        return Taken(*map(sum, zip(self._taken, own, strict=True)))

    def _part(self) -> Part:
        return Part(0, self._start, self._at, self._new - self._start, self._images, self._patches)

    def _closed(self) -> list[Part]:
        return [self._part()] if self._at > self._new else []

    def _close(self) -> None:
        self._parts += self._closed()


def _left(cap: int | None, used: int) -> float:
    return float("inf") if cap is None else cap - used


def _truncated(cutter: _Cutter, runs: Sequence[Run], num_tokens: int) -> list[Part]:
    kept = cutter.first(runs)
    whole = _everything(runs, num_tokens, Reason.TRUNCATED)
    if not kept.length:  # the row begins with an image that no pack has room for
        return [whole._replace(reason=Reason.IMAGE_OVER_LENGTH)]
    images, patches = whole.images - kept.images, whole.patches - kept.patches
    return [kept, Part(0, kept.stop, num_tokens, 0, images, patches, Reason.TRUNCATED)]


def _everything(runs: Sequence[Run] | None, num_tokens: int, reason: Reason) -> Part:
    images, patches = (sum(getattr(run, name) for run in runs or ()) for name in ("images", "patches"))
    return Part(0, 0, num_tokens, 0, images, patches, reason)


def _unless_too_short(part: Part, cutting: Cutting) -> Part:
    is_short = part.reason is None and part.length < cutting.min_len
    return part._replace(reason=Reason.TOO_SHORT) if is_short else part


def _numbered(parts: list[Part]) -> list[Part]:
    # A row is counted with its part 0, so that comes from what is trained, if anything is.
    parts = sorted(parts, key=lambda part: (part.reason is not None, part.start))
    return [part._replace(number=number) for number, part in enumerate(parts)]
