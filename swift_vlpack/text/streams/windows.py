"""Two ways from documents to windows: cut wherever a window is full, or packed into bins. Both are places in JSON.

What they hold are parts of documents. A state has a part by its address where the source can fetch the document again,
and else by its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.packer import Packer
from swift_vlpack.plan.records import Pack
from swift_vlpack.text.cutting import pieces_of

Tokens = NDArray[np.signedinteger[Any]]  # of two bytes a number where that is enough, else of four


class Part(NamedTuple):
    """Tokens `start` to `end` of a document."""

    tokens: Tokens  # of the whole document
    address: Any
    start: int
    end: int

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.end - self.start

    @property
    def own(self) -> Tokens:
        """Its tokens themselves."""
        return self.tokens[self.start : self.end]

    def saved(self) -> list[Any]:
        """For a state: by address, or the tokens."""
        if self.address is None:
            return [None, 0, self.length, self.own]
        return [self.address, self.start, self.end, None]


Fetch = Callable[[Any], Tokens]
"""Address in, the tokens of the whole document out."""


def restored(saved: list[Any], fetch: Fetch) -> Part:
    """A part out of a state."""
    address, start, end, tokens = saved
    if address is None:
        return Part(np.array(tokens, dtype=np.int32), None, start, end)
    found = fetch(address)
    if len(found) < end:  # in states of before, an empty document was its BOS and EOS
        raise DataError(
            f"the document at {address} has {len(found)} tokens, and the state holds its first {end}; the data has "
            "changed, or an earlier version saved the state: begin anew"
        )
    return Part(found, address, start, end)


class Windows(Protocol):
    """Documents in, the parts of one window after another out."""

    def add(self, document: Part) -> None:
        """One more whole document."""

    def end(self) -> None:
        """No more documents come: what is held may leave."""

    def take(self) -> list[Part] | None:
        """The parts of the next window; None while it takes more documents."""

    def snapshot(self) -> dict[str, Any]:
        """What it holds."""

    def load(self, saved: dict[str, Any], fetch: Fetch) -> None:
        """Hold it again."""


class Sequential:
    """A rolling buffer: windows leave in the order of the stream, and a document goes on in the next one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pending: deque[Part] = deque()
        self._num_tokens = 0
        self._is_over = False

    def add(self, document: Part) -> None:
        """Append it."""
        self._pending.append(document)
        self._num_tokens += document.length

    def end(self) -> None:
        """The rest leaves as a shorter window."""
        self._is_over = True

    def take(self) -> list[Part] | None:
        """The first tokens of the buffer."""
        if not self._num_tokens or (self._num_tokens < self._size and not self._is_over):
            return None
        parts, free = [], min(self._size, self._num_tokens)
        self._num_tokens -= free
        while free:
            first = self._pending.popleft()
            end = min(first.end, first.start + free)
            parts.append(first._replace(end=end))
            if end < first.end:
                self._pending.appendleft(first._replace(start=end))
            free -= parts[-1].length
        return parts

    def snapshot(self) -> dict[str, Any]:
        """The buffer."""
        return {"pending": [part.saved() for part in self._pending], "is_over": self._is_over}

    def load(self, saved: dict[str, Any], fetch: Fetch) -> None:
        """The same buffer."""
        self._pending = deque(restored(part, fetch) for part in saved["pending"])
        self._num_tokens = sum(part.length for part in self._pending)
        self._is_over = saved["is_over"]


class Bins:
    """The packer of the core over whole documents; longer ones are cut into pieces that fill a window."""

    def __init__(self, config: PackingConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._packer = Packer(config, seed=seed, label=None)
        self._parts: dict[Any, Part] = {}  # by the number that the packer knows them under
        self._num_parts = 0
        self._ready: deque[list[Part]] = deque()

    def add(self, document: Part) -> None:
        """Hand its pieces to the packer."""
        for piece in pieces_of(document.length, max_length=self._config.packing_length):
            part = document._replace(start=document.start + piece.start, end=document.start + piece.end)
            self._parts[self._num_parts] = part
            packs = self._packer.push((self._num_parts, part.length))
            self._num_parts += 1
            self._leave(packs)

    def end(self) -> None:
        """All bins leave."""
        self._leave(self._packer.flush())

    def take(self) -> list[Part] | None:
        """The oldest bin that is ready."""
        return self._ready.popleft() if self._ready else None

    def snapshot(self) -> dict[str, Any]:
        """The packer, what it holds, and the bins that wait."""
        return {
            "packer": self._packer.state(),
            "parts": [[number, part.saved()] for number, part in self._parts.items()],
            "num_parts": self._num_parts,
            "ready": [[part.saved() for part in parts] for parts in self._ready],
        }

    def load(self, saved: dict[str, Any], fetch: Fetch) -> None:
        """The same again."""
        self._packer = Packer(self._config, seed=self._seed, label=None)
        self._packer.load(saved["packer"])
        self._parts = {number: restored(part, fetch) for number, part in saved["parts"]}
        self._num_parts = saved["num_parts"]
        self._ready = deque([restored(part, fetch) for part in parts] for parts in saved["ready"])

    def _leave(self, packs: list[Pack]) -> None:
        self._ready.extend([self._parts.pop(number) for number in pack.ids] for pack in packs)
