"""Cut rows that are longer than a pack, by a pure function of their runs of text and media.

Text can be cut between any two tokens. An image or a video stays whole, with its begin and end tokens.

>>> row = [Run(6), Run(5, images=1, patches=20, is_whole=True), Run(3)]
>>> for part in parts_of(row, Cutting(how="split", capacity=8)):
...     print(part.number, part.start, part.stop, part.images)
0 0 6 0
1 6 14 1

Every token is in exactly one part, except that a part may repeat `stride` tokens of the part before as context. Trained
parts are numbered from 0, in the order of the row; left-out parts, which have a reason, follow them. `CutRows` holds
the parts of all cut rows of a source. The same functions cut the documents of `swift_vlpack.text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.reasons import Reason

_REASONS = (
    None,
    Reason.OVERFLOW,
    Reason.TRUNCATED,
    Reason.IMAGE_OVER_LENGTH,
    Reason.CANNOT_BE_CUT,
    Reason.TOO_SHORT,
)
"""The reasons why a part is left out, by their codes in files of parts, which never change; None if it is packed."""


class Run(NamedTuple):
    """Consecutive tokens of a row that are all text, or all one image or video."""

    length: int
    images: int = 0
    patches: int = 0
    is_whole: bool = False
    """True for an image or a video, which must not be cut."""


class Span(NamedTuple):
    """The place of a part in its row, which is all that a worker needs to make it."""

    number: int
    start: int
    stop: int
    num_repeated: int = 0
    """Tokens at the start that repeat the end of the part before: context that is not trained."""

    @property
    def length(self) -> int:
        """Return the number of tokens, repeated ones included."""
        return self.stop - self.start


class Part(NamedTuple):
    """A part of a row: its place, its sizes, and the reason if it is left out."""

    number: int
    start: int
    stop: int
    num_repeated: int = 0
    images: int = 0
    patches: int = 0
    reason: Reason | None = None
    """Why the part is in no pack; None for a part to be packed."""
    supervised: int = 0
    """Tokens with a label; 0 if they were not counted."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the part as seven numbers, for arrays and files. `number` is left out: it is the place in the list."""
        return (*self[1:6], self.supervised, _REASONS.index(self.reason))

    @classmethod
    def of_numbers(cls, number: int, numbers: Sequence[int]) -> Part:
        """Make a part of what `numbers` returned."""
        start, stop, num_repeated, images, patches, supervised, code = map(int, numbers)
        return cls(number, start, stop, num_repeated, images, patches, _REASONS[code], supervised)

    @property
    def span(self) -> Span:
        """Return the place of the part, without its sizes."""
        return Span(*self[:4])

    @property
    def num_new(self) -> int:
        """Return the number of tokens that no earlier part has."""
        return self.stop - self.start - self.num_repeated

    @property
    def length(self) -> int:
        """Return the number of tokens, repeated ones included."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """The options for rows longer than a pack: `split`, `truncate` or `drop` them."""

    how: str
    capacity: int
    stride: int = 0
    """Tokens of context at the start of a part; fewer after an image, or before an image that needs the room."""
    min_len: int = 1
    """Fewest tokens of a part. Shorter parts are left out."""
    max_images: int | None = None
    max_patches: int | None = None
    num_added: int = 0
    """Tokens that are put before every later part, such as a BOS. They take room, but are not tokens of the row."""

    @classmethod
    def of(cls, config: PackingConfig) -> Cutting | None:
        """Read the options of cutting, and check them together. Returns None if rows stay whole."""
        _check(config)
        if not config.cuts_rows:
            return None
        return cls(
            how=config.packing_overflow,
            capacity=config.packing_length,
            stride=config.packing_stride,
            min_len=config.packing_min_len,
            max_images=config.packing_max_images,
            max_patches=config.packing_max_patches,
        )


def _check(config: PackingConfig) -> None:
    """Raise `ConfigError` for options that contradict each other.

    `PackingConfig` cannot check this, because `packing_overflow` and `packing_length` may still come from ms-swift's
    flags.
    """
    how, capacity = config.packing_overflow, config.packing_length
    for name, is_default, served in (
        ("packing_stride", config.packing_stride == 0, ("split",)),
        ("packing_min_len", config.packing_min_len == 1, ("split", "truncate")),
    ):
        if not is_default and how not in served:
            raise ConfigError(
                f"{name}={getattr(config, name)} has no effect under packing_overflow={how}; set packing_overflow "
                f"to {' or '.join(served)}, or leave it out"
            )
    if config.packing_stride >= capacity:
        raise ConfigError(
            f"packing_stride={config.packing_stride} leaves no room for a new token in a part of "
            f"packing_length={capacity}"
        )
    if config.packing_min_len > capacity:
        raise ConfigError(
            f"packing_min_len={config.packing_min_len} is more than packing_length={capacity}, so every part would be "
            "left out; lower packing_min_len"
        )


def parts_of(runs: Sequence[Run] | None, cutting: Cutting, num_tokens: int | None = None) -> list[Part]:
    """Cut a row into parts. Returns no parts if the row fits a pack, because then it stays whole.

    `runs` is None if it is unknown which tokens are an image. A row that is longer than a pack cannot be cut then.
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


class _Cutter:
    """Fill one part after the other with the runs of a row."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._parts: list[Part] = []
        self._at = 0  # number of tokens of the row that were placed
        self._after_media = 0  # end of the last image: context must not begin before it
        self._open(0)

    def split(self, runs: Sequence[Run]) -> list[Part]:
        """Return all parts, in the order of the row."""
        for run in runs:
            if run.is_whole:
                self._put_medium(run)
            else:
                self._put_text(run.length)
        return [*self._parts, *self._closed()]

    def first(self, runs: Sequence[Run]) -> Part:
        """Return the first part, with everything that fits from the start of the row."""
        for run in runs:
            taken = run.length if self._fits(run) else 0 if run.is_whole else self._room
            self._add(run if taken == run.length else Run(taken))
            if taken < run.length:
                break
        return self._part()

    @property
    def _room(self) -> int:
        num_added = self._cutting.num_added if self._new else 0
        return self._cutting.capacity - (self._at - self._start) - num_added

    def _fits(self, run: Run) -> bool:
        uses = (
            (run.length, self._room),
            (run.images, _left(self._cutting.max_images, self._images)),
            (run.patches, _left(self._cutting.max_patches, self._patches)),
        )
        return all(not used or used <= left for used, left in uses)

    def _put_medium(self, run: Run) -> None:
        if run.length > self._cutting.capacity:
            self._close()
            lost = Part(0, self._at, self._at + run.length, 0, run.images, run.patches, Reason.IMAGE_OVER_LENGTH)
            self._parts.append(lost)
            self._at = self._after_media = lost.stop
            self._open(0)
            return
        if not self._fits(run) and self._at > self._new:
            self._close()
            self._open(self._cutting.capacity - run.length)
        self._add(run)
        self._after_media = self._at

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
        """Open a part here that begins with at most `most_repeated` tokens of context."""
        num_repeated = min(self._cutting.stride, most_repeated, self._at - self._after_media)
        self._start, self._new = self._at - num_repeated, self._at
        self._images = self._patches = 0

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
    num_added = cutting.num_added if part.start + part.num_repeated else 0
    is_short = part.reason is None and part.length + num_added < cutting.min_len
    return part._replace(reason=Reason.TOO_SHORT) if is_short else part


def _numbered(parts: list[Part]) -> list[Part]:
    # A row is counted by its part 0, so part 0 must be a trained part, if there is one.
    parts = sorted(parts, key=lambda part: (part.reason is not None, part.start))
    return [part._replace(number=number) for number, part in enumerate(parts)]


@dataclass(frozen=True, eq=False)
class CutRows:
    """The parts of the cut rows of one source, as arrays. All other rows are whole samples.

    >>> cut = CutRows.of({4: [Part(0, 0, 8, images=1), Part(1, 8, 10, reason=Reason.OVERFLOW)]})
    >>> cut.num_parts(np.array([3, 4])).tolist(), cut.parts(4)[1].reason.value
    ([1, 2], 'overflow')
    """

    rows: NDArray[np.int64]
    """The numbers of the rows that are cut, ascending."""
    offsets: NDArray[np.int64]
    """(num_rows + 1,): the parts of `rows[i]` are those from `offsets[i]` to `offsets[i + 1]`."""
    columns: NDArray[np.int64]
    """(7, num_parts): the numbers of each part, as `Part.numbers` returns them."""

    @classmethod
    def of(cls, parts: Mapping[int, Sequence[Part]]) -> CutRows:
        """Make the arrays from the parts of each row that is cut."""
        rows = sorted(parts)
        flat = [part.numbers for row in rows for part in parts[row]]
        columns = np.array(flat, dtype=np.int64).reshape(-1, 7).T.copy()
        return cls(np.array(rows, dtype=np.int64), np.cumsum([0, *(len(parts[row]) for row in rows)]), columns)

    @property
    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        """Return all arrays."""
        return self.rows, self.offsets, self.columns

    def __len__(self) -> int:
        return len(self.rows)

    def num_parts(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Return the number of parts of each of these rows; 1 for a row that is not cut."""
        place = self._places(rows)
        counts: NDArray[np.int64] = np.where(place >= 0, np.diff(self.offsets, append=0)[place], 1)
        return counts

    def first_parts(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Return the column of the first part of each of these rows; -1 for a row that is not cut."""
        place = self._places(rows)
        firsts: NDArray[np.int64] = np.where(place >= 0, self.offsets[place], -1)
        return firsts

    def parts(self, row: int) -> list[Part]:
        """Return the parts of a row; none if it is not cut."""
        place = int(self._places(np.array([row]))[0])
        if place < 0:
            return []
        inside = self.columns[:, self.offsets[place] : self.offsets[place + 1]]
        return [Part.of_numbers(number, column) for number, column in enumerate(inside.T.tolist())]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CutRows):
            return NotImplemented
        return all(np.array_equal(one, another) for one, another in zip(self.arrays, other.arrays, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _places(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        if not len(self.rows):
            return np.full(len(rows), -1)
        place = np.searchsorted(self.rows, rows)
        found = np.minimum(place, len(self.rows) - 1)
        places: NDArray[np.int64] = np.where(self.rows[found] == rows, found, -1)
        return places
