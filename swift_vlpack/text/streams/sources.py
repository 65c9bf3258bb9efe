"""Where documents come from: one after the other, with an address each and a place that fits into JSON.

A source that can `fetch` a document by its address lets states hold addresses in place of texts.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from swift_vlpack.core.errors import DataError

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text, None where the row has none, and where to find it again, None where nobody can."""

    text: str | None
    address: Any


class Source(Protocol):
    """Documents of one epoch after another."""

    name: str
    can_fetch: bool

    def start(self, epoch: int) -> None:
        """Go to the first document of an epoch."""

    def read(self) -> Document | None:
        """The next document; None at the end of the epoch. After an error, `load(state())` reads it again."""

    def state(self) -> Any:
        """Where it stands, as JSON."""

    def load(self, state: Any) -> None:
        """Stand there again."""

    def fetch(self, address: Any) -> str | None:
        """The text of a document."""

    def fingerprint(self) -> Any:
        """What must be the same for a state to mean the same documents."""


def text_of(row: Any, text_key: str, where: str) -> str | None:
    """The text of a row: the row itself, or what it has under `text_key`."""
    found = row
    if isinstance(row, Mapping):
        if text_key not in row:
            raise DataError(f"{where} has no {text_key!r}; it has {', '.join(map(str, row))}: name it with text_key=")
        found = row[text_key]
    if found is not None and not isinstance(found, str):
        raise DataError(f"{where}: {text_key} must be a text, got {type(found).__name__}")
    return found


class RowSource:
    """Rows that can be asked for by number: a list, a data set with a length."""

    can_fetch = True

    def __init__(self, rows: Sequence[Any], text_key: str, name: str) -> None:
        self.name = name
        self._rows = rows
        self._text_key = text_key
        self._next = 0

    def start(self, epoch: int) -> None:
        """All epochs are the same."""
        self._next = 0

    def read(self) -> Document | None:
        """The row at the cursor."""
        if self._next >= len(self._rows):
            return None
        document = Document(self.fetch(self._next), self._next)
        self._next += 1
        return document

    def state(self) -> Any:
        """The number of the next row."""
        return self._next

    def load(self, state: Any) -> None:
        """Go there; nothing is read."""
        self._next = int(state)

    def fetch(self, address: Any) -> str | None:
        """The text of a row."""
        return text_of(self._rows[address], self._text_key, f"{self.name}: row {address}")

    def fingerprint(self) -> Any:
        """How many rows there are, and the first and the last."""
        ends = (0, len(self._rows) - 1) if len(self._rows) else ()
        return [len(self._rows), *(_digest(self.fetch(row)) for row in ends)]


class StreamSource:
    """Rows that come in order only: a Hugging Face streaming data set, or a function that makes an iterator.

    A data set with a `state_dict` is moved to its place, others are read again up to it. Where the move ends is proved:
    the place is that before the last row, which must come again. datasets 4.8 forgets rows behind `map` and `filter`.
    """

    can_fetch = False

    def __init__(self, rows: Any, text_key: str, name: str) -> None:
        self.name = name
        self._given = rows
        self._text_key = text_key
        self._can_seek = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict") and not _shuffles(rows)
        self._rows: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._epoch = self._num_read = 0
        self._before: Any = None
        """The data set's own place before its last row; None at the beginning."""
        self._place: Any = None
        """And behind it."""
        self._last = ""
        """The digest of that row."""

    def start(self, epoch: int) -> None:
        """From the beginning, whatever state or epoch was there before."""
        self._epoch, self._num_read, self._before, self._place, self._last = epoch, 0, None, None, ""
        self._rows = self._given() if callable(self._given) else _unused(self._given)
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)
        self._iterator = iter(self._rows)

    def read(self) -> Document | None:
        """The next row."""
        for row in self._iterator:
            text = text_of(row, self._text_key, f"{self.name}: row {self._num_read} of epoch {self._epoch}")
            place = copy.deepcopy(self._rows.state_dict()) if self._can_seek else None
            self._before, self._place = self._place, place
            self._last = _digest(text)
            self._num_read += 1
            return Document(text, None)
        return None

    def state(self) -> Any:
        """Epoch, rows read, the data set's own place before the last one, and what that one was."""
        return [self._epoch, self._num_read, self._before, self._last]

    def load(self, state: Any) -> None:
        """Move there, or read up to there."""
        epoch, num_read, before, last = state
        self.start(epoch)
        if not num_read:
            return
        if self._can_seek and num_read > 1:
            self._rows.load_state_dict(before)
            self._iterator, self._place = iter(self._rows), before
            if self.read() is not None and self._last == last:
                self._num_read = num_read
                return
            logger.warning("%s: its own state leads elsewhere; its first %d rows are read again", self.name, num_read)
            self.start(epoch)
        for _ in range(num_read):
            self.read()
        if (self._num_read, self._last) != (num_read, last):
            raise DataError(
                f"{self.name}: row {num_read - 1} of epoch {epoch} is not what it was; the data has changed"
            )

    def fetch(self, address: Any) -> str | None:
        """Nobody can."""
        raise NotImplementedError

    def fingerprint(self) -> Any:
        """Nothing is known of a stream before it is read."""
        return None


def _digest(text: str | None) -> str:
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def source_of(given: Any, text_key: str) -> Source:
    """The source of whatever has rows or texts in it."""
    name = type(given).__name__
    if isinstance(given, Mapping):
        raise DataError(f"these are several data sets ({', '.join(map(str, given))}); give one of them")
    if all(hasattr(given, method) for method in ("start", "read", "state", "load", "fetch", "fingerprint")):
        source: Source = given
        return source
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return RowSource(given, text_key, name)
    if isinstance(given, Iterator):
        raise DataError(f"a {name} can be read once and never again from its place; give the function that makes it")
    if callable(given) or isinstance(given, Iterable):
        return StreamSource(given, text_key, getattr(given, "__name__", name))
    raise DataError(f"a {name} is no source of documents; give paths, a data set, a list, or a function of an iterator")


def _unused(rows: Any) -> Any:
    """A copy of what would remember its place; what does not begins anew by itself."""
    if not hasattr(rows, "load_state_dict"):
        return rows
    try:
        return copy.deepcopy(rows)
    except TypeError:  # something in it that has no copy, such as an open file
        return rows


def _shuffles(rows: Any) -> bool:
    """Whether a Hugging Face data set has a shuffle buffer of its own; it has no public way to ask."""
    inner = getattr(rows, "_ex_iterable", None)
    while inner is not None:
        if "BufferShuffled" in type(inner).__name__:
            return True
        inner = getattr(inner, "ex_iterable", None)
    return False
