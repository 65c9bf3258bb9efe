"""Make windows of documents: `Sequential` cuts documents where a window is full, `Bins` packs them whole.

Both hold parts of documents. A state has the address of a part's document if the source can fetch the document again,
otherwise the tokens of the part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.items import Pack
from swift_vlpack.plan.packer import Packer
from swift_vlpack.plan.parts import Cutting, Part, Run, parts_of
from swift_vlpack.text.tokenizer import Tokens


class Held(NamedTuple):
    """A part of a document, with the tokens of the whole document."""

    tokens: Tokens
    address: Any
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Return the number of tokens of the part."""
        return self.stop - self.start

    @property
    def own(self) -> Tokens:
        """Return the tokens of the part."""
        return self.tokens[self.start : self.stop]

    def saved(self) -> list[Any]:
        """Return the part for a state: [address, start, stop, None], or [None, 0, length, tokens] without address."""
        if self.address is None:
            return [None, 0, self.length, self.own]
        return [self.address, self.start, self.stop, None]


Fetch = Callable[[Any], Tokens]
"""Returns the tokens of the whole document at an address."""


def restored(saved: list[Any], fetch: Fetch) -> Held:
    """Read a part that `Held.saved` returned. Raises `DataError` if its document has become shorter."""
    address, start, stop, tokens = saved
    if address is None:
        return Held(np.array(tokens, dtype=np.int32), None, start, stop)
    found = fetch(address)
    if len(found) < stop:
        raise DataError(
            f"the document at {address} has {len(found)} tokens, and the state holds its first {stop}; the data has "
            "changed: restore it, or load no state"
        )
    return Held(found, address, start, stop)


class Sequential:
    """Make windows in the order of the stream: a document that does not fit continues in the next window.

    A document is cut when a window leaves, not into all its parts at once as `plan.parts` cuts rows: a text can have a
    hundred million tokens, and a state then holds the rest of it as a single part.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pending: deque[Held] = deque()
        self._num_tokens = 0
        self._is_over = False

    def add(self, document: Held) -> None:
        """Take a whole document."""
        self._pending.append(document)
        self._num_tokens += document.length

    def end(self) -> None:
        """Make the rest leave as a shorter window, because no more documents come."""
        self._is_over = True

    def take(self) -> list[Held] | None:
        """Return the parts of the next window; None while more documents are needed for it."""
        if not self._num_tokens or (self._num_tokens < self._size and not self._is_over):
            return None
        parts, free = [], min(self._size, self._num_tokens)
        self._num_tokens -= free
        while free:
            first = self._pending.popleft()
            stop = min(first.stop, first.start + free)
            parts.append(first._replace(stop=stop))
            if stop < first.stop:
                self._pending.appendleft(first._replace(start=stop))
            free -= parts[-1].length
        return parts

    def snapshot(self) -> dict[str, Any]:
        """Return the waiting parts."""
        return {"pending": [part.saved() for part in self._pending], "is_over": self._is_over}

    def load(self, saved: dict[str, Any], fetch: Fetch) -> None:
        """Restore a snapshot. `fetch` reads the documents of parts that were saved by address."""
        self._pending = deque(restored(part, fetch) for part in saved["pending"])
        self._num_tokens = sum(part.length for part in self._pending)
        self._is_over = saved["is_over"]


class Bins:
    """Make windows of whole documents with `Packer`. Documents longer than a window are cut into parts."""

    def __init__(self, config: PackingConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._packer = Packer(config, seed=seed, label=None)
        self._cutting = Cutting(how="split", capacity=config.packing_length)
        self._parts: dict[Any, Held] = {}  # the held parts, by their id in the packer
        self._num_parts = 0
        self._ready: deque[list[Held]] = deque()

    def add(self, document: Held) -> None:
        """Give a document to the packer, in parts if it is longer than a window."""
        for part in parts_of([Run(document.length)], self._cutting) or [Part(0, 0, document.length)]:
            held = document._replace(start=document.start + part.start, stop=document.start + part.stop)
            self._parts[self._num_parts] = held
            packs = self._packer.push((self._num_parts, held.length))
            self._num_parts += 1
            self._leave(packs)

    def end(self) -> None:
        """Make all bins leave, however full."""
        self._leave(self._packer.flush())

    def take(self) -> list[Held] | None:
        """Return the parts of the oldest bin that is ready."""
        return self._ready.popleft() if self._ready else None

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the packer, the parts it holds, and the bins that are ready."""
        return {
            "packer": self._packer.state(),
            "parts": [[number, part.saved()] for number, part in self._parts.items()],
            "num_parts": self._num_parts,
            "ready": [[part.saved() for part in parts] for parts in self._ready],
        }

    def load(self, saved: dict[str, Any], fetch: Fetch) -> None:
        """Restore a snapshot."""
        self._packer = Packer(self._config, seed=self._seed, label=None)
        self._packer.load(saved["packer"])
        self._parts = {number: restored(part, fetch) for number, part in saved["parts"]}
        self._num_parts = saved["num_parts"]
        self._ready = deque([restored(part, fetch) for part in parts] for parts in saved["ready"])

    def _leave(self, packs: list[Pack]) -> None:
        self._ready.extend([self._parts.pop(number) for number in pack.ids] for pack in packs)
