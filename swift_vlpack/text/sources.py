"""Read documents from anything that has rows or texts. The position of a source is JSON, so that a stream can resume.

If a source can `fetch` a document by its address, saved states hold addresses, otherwise texts.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

_PROVING_ROWS = 8
"""Fewest rows that are read again to prove that a data set was moved to the right position."""


class Document(NamedTuple):
    """A text (None if the row has none), and the address to fetch it from again (None if the source cannot)."""

    text: str | None
    address: Any


class Source(Protocol):
    """A source of documents, one epoch after another."""

    name: str
    can_fetch: bool

    def start(self, epoch: int) -> None:
        """Move to the first document of an epoch."""

    def read(self) -> Document | None:
        """Return the next document; None at the end of the epoch. After an error, `load(state())` reads it again."""

    def state(self) -> Any:
        """Return the position, as JSON."""

    def load(self, state: Any) -> None:
        """Restore a position returned by `state()`."""

    def fetch(self, address: Any) -> str | None:
        """Return the text of the document at an address. Only called if `can_fetch`."""

    def fingerprint(self) -> Any:
        """Return what must be equal for a state to mean the same documents."""


def text_of(row: Any, text_key: str, where: str) -> str | None:
    """Return the text of a row, which is a text itself or has it in the field `text_key`. Raises `DataError`."""
    found = row
    if isinstance(row, Mapping):
        if text_key not in row:
            raise DataError(f"{where} has no {text_key!r}; it has {', '.join(map(str, row))}: name it with text_key=")
        found = row[text_key]
    if found is not None and not isinstance(found, str):
        raise DataError(f"{where}: {text_key} must be a text, got {type(found).__name__}")
    return found


class RowSource:
    """Read rows by number, from a list or a data set with a length."""

    can_fetch = True

    def __init__(self, rows: Sequence[Any], text_key: str, name: str) -> None:
        self.name = name
        self._rows = rows
        self._text_key = text_key
        self._next = 0

    def start(self, epoch: int) -> None:
        """Move to the first row. All epochs are the same."""
        self._next = 0

    def read(self) -> Document | None:
        """Return the next row."""
        if self._next >= len(self._rows):
            return None
        document = Document(self.fetch(self._next), self._next)
        self._next += 1
        return document

    def state(self) -> Any:
        """Return the number of the next row."""
        return self._next

    def load(self, state: Any) -> None:
        """Move to a row by its number. Reads nothing."""
        self._next = int(state)

    def fetch(self, address: Any) -> str | None:
        """Return the text of a row."""
        return text_of(self._rows[address], self._text_key, f"{self.name}: row {address + 1}")

    def fingerprint(self) -> Any:
        """Return the number of rows, and digests of the first and the last row."""
        ends = (0, len(self._rows) - 1) if len(self._rows) else ()
        return [len(self._rows), *(_digest(self.fetch(row)) for row in ends)]


class _Anchor(NamedTuple):
    """A position that a data set can be moved to: its innermost state changes with the next row."""

    num_read: int
    digest: str  # digest of all rows before
    state: Any  # the data set's own state; None at the start of the epoch
    state_after: str  # digest of the innermost state after the next row


class StreamSource:
    """Read rows that come in order only: a Hugging Face streaming data set, or a function that makes an iterator.

    To resume, a data set with a `state_dict` is moved to a position a few rows back and read on from there; any other
    source is read again from the start. Data sets may skip rows when a state is loaded (datasets 4.8 does after `map`,
    `filter`, `rename_column` and `interleave_datasets`). So the new position is proved: the rows read on the way must
    be the same as before, and the data set's own state must change at the same rows, to the same values. Equal rows
    alone prove nothing, because texts may repeat.
    """

    can_fetch = False

    def __init__(self, rows: Any, text_key: str, name: str) -> None:
        self.name = name
        # Copy the data set here and not in the prefetch thread: the caller may change its own data set meanwhile.
        self._given = rows if callable(rows) else _unused(rows)
        self._text_key = text_key
        self.num_shards: int | None = rows.num_shards if hasattr(rows, "_ex_iterable") else None
        self._can_seek = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict") and not _forgets(rows)
        self._rows: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._epoch = self._num_read = 0
        self._digest = ""
        """Digest of all rows of the epoch that were read so far."""
        self._place: Any = None
        """The data set's own state after the last row; None at the start, or if the data set has no state."""
        self._anchors: deque[_Anchor] = deque()
        """The latest anchors, oldest first: enough to prove the position by `_PROVING_ROWS` rows."""

    def start(self, epoch: int) -> None:
        """Move to the first row of an epoch."""
        self._epoch, self._num_read, self._digest, self._place = epoch, 0, "", None
        self._anchors = deque()
        self._rows = self._given() if callable(self._given) else _unused(self._given)
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)
        self._iterator = iter(self._rows)

    def read(self) -> Document | None:
        """Return the next row."""
        for row in self._iterator:
            text = text_of(row, self._text_key, f"{self.name}: row {self._num_read + 1} of epoch {self._epoch}")
            if self._can_seek:
                self._remember(copy.deepcopy(self._rows.state_dict()))
            self._digest = _digest(self._digest + _digest(text))
            self._num_read += 1
            return Document(text, None)
        return None

    def state(self) -> Any:
        """Return epoch, number of rows read, their digest, the oldest anchor, and the proof of the position."""
        anchor = self._anchors[0][:3] if self._anchors else None
        return [self._epoch, self._num_read, self._digest, anchor, self._proof()]

    def load(self, state: Any) -> None:
        """Move to a saved position; if that is not possible, warn and read all rows up to it.

        Raises `DataError` if the rows up to the position are not the same as before.
        """
        epoch, num_read, digest, anchor, proof = state
        self.start(epoch)
        if self._can_seek and anchor is not None and anchor[0]:
            self._move(*anchor)
            if self._reads(num_read, digest) and self._proof() == proof:
                return
            logger.warning(
                "%s: its own state leads to another position, so its first %d rows are read again", self.name, num_read
            )
            self.start(epoch)
        elif num_read > _PROVING_ROWS:
            logger.warning("%s cannot seek, so its first %d rows are read again", self.name, num_read)
        if not self._reads(num_read, digest):
            raise DataError(
                f"{self.name}: the first {num_read} rows of epoch {epoch} are not those of the saved state: the data "
                "has changed; restore it, or load no state"
            )

    def fetch(self, address: Any) -> str | None:
        """Not supported: rows come in order only."""
        raise NotImplementedError

    def fingerprint(self) -> Any:
        """Return None: a stream can be identified only by reading it, which `load` does."""
        return None

    def _remember(self, state: Any) -> None:
        """Keep an anchor if the innermost state of the data set changed with this row.

        A data set that reads in chunks counts all rows of a chunk as read with the first one. A state that is saved
        within a chunk would skip the rest of the chunk, so only the first row of a chunk makes an anchor.
        """
        digest = _digest(json.dumps(plain(_innermost(state)), sort_keys=True, default=repr))
        if not self._anchors or digest != self._anchors[-1].state_after:
            self._anchors.append(_Anchor(self._num_read, self._digest, self._place, digest))
        self._place = state
        while len(self._anchors) > 1 and self._anchors[1].num_read <= self._num_read + 1 - _PROVING_ROWS:
            self._anchors.popleft()

    def _proof(self) -> str:
        changes = [(anchor.num_read, anchor.state_after) for anchor in self._anchors]
        return _digest(json.dumps([changes, plain(self._place)], sort_keys=True, default=repr))

    def _move(self, num_read: int, digest: str, place: Any) -> None:
        self._rows.load_state_dict(copy.deepcopy(place))  # a data set keeps this object and changes it
        self._iterator = iter(self._rows)
        self._num_read, self._digest, self._place = num_read, digest, place

    def _reads(self, num_read: int, digest: str) -> bool:
        """Read on to row `num_read`. Returns whether the digest of all rows up to there is `digest`."""
        while self._num_read < num_read:
            if self.read() is None:
                return False
        return self._digest == digest


def _innermost(state: Any) -> Any:
    """Return the state of the source of a Hugging Face data set, inside the states of `map`, `filter` and the like."""
    while isinstance(state, dict) and "examples_iterable" in state:
        state = state["examples_iterable"]
    return state


def shares_among_workers(source: Source, num_workers: int) -> bool:
    """Tell whether a source divides its rows among loader workers by itself, as Hugging Face streams do.

    Raises `ConfigError` if there are more workers than shards: a worker gets whole shards, so some would have no row.
    """
    if not isinstance(source, StreamSource) or source.num_shards is None:
        return False
    if num_workers > source.num_shards:
        raise ConfigError(
            f"{source.name} has {counted(source.num_shards, 'shard')} for {num_workers} workers, which share them; set "
            f"num_workers to {source.num_shards} at most, or to 0 and prefetch to N"
        )
    return True


def _digest(text: str | None) -> str:
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Convert a value to what JSON can hold."""
    if isinstance(value, dict):
        return {str(name): plain(inside) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inside) for inside in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def source_of(given: Any, text_key: str) -> Source:
    """Make a source of anything that has rows or texts."""
    name = type(given).__name__
    if isinstance(given, Mapping):
        raise DataError(f"the source is several data sets ({', '.join(map(str, given))}); give one of them")
    if all(hasattr(given, method) for method in ("start", "read", "state", "load", "fetch", "fingerprint")):
        source: Source = given
        return source
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return RowSource(given, text_key, name)
    if isinstance(given, Iterator):
        raise DataError(
            f"a {name} can be read once only, so a stream of it cannot resume; give a function that makes it"
        )
    if callable(given) or isinstance(given, Iterable):
        return StreamSource(given, text_key, getattr(given, "__name__", name))
    raise DataError(
        f"a {name} is not a source of documents; give paths, a data set, a list, or a function that makes an iterator"
    )


def _unused(rows: Any) -> Any:
    """Return a copy of rows that remember their position. Other rows start again by themselves."""
    if not hasattr(rows, "load_state_dict"):
        return rows
    try:
        return copy.deepcopy(rows)
    except TypeError:  # the data set holds something that cannot be copied, such as an open file
        return rows


def _forgets(rows: Any) -> bool:
    """Tell whether a Hugging Face data set holds rows that its own state leaves out.

    States have no shuffle buffers. And if a batched `map` regroups rows, or several data sets take turns, a batch may
    begin within a chunk that the state counts as read. The library has no public way to ask, so this looks at the names
    of its classes.
    """
    found: list[Any] = [getattr(rows, "_ex_iterable", None)]
    while found:
        inner = found.pop()
        name = type(inner).__name__
        if "BufferShuffled" in name or "MultiSources" in name or getattr(inner, "batched", False):
            return True
        if hasattr(inner, "ex_iterable"):
            found.append(inner.ex_iterable)
    return False
