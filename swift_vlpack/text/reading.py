"""Read the documents of a source epoch by epoch, shuffle them within a buffer, and retry reads that fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from swift_vlpack.errors import ConfigError, DataError, SourceError, VLPackError
from swift_vlpack.plan.shuffle import sort_keys
from swift_vlpack.text.checks import check_whole
from swift_vlpack.text.sources import Document, Source

logger = logging.getLogger(__name__)

_KEYS_AT_A_TIME = 256
"""Random numbers of the shuffle that are drawn at a time, because a call for each document would be slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """The options of reading a source."""

    shuffle_buffer_size: int = 0
    """Documents in the buffer from which the next one is drawn; 0 or 1 keeps the order of the source."""
    seed: int = 0
    repeat: bool = False
    """Begin another epoch at the end of the source, without end."""
    max_retries: int = 3
    """How often a read that failed is tried again."""
    retry_delay_sec: float = 1.0
    """Wait before the first retry; twice as long before each further one."""
    rank: int = 0
    """Number of this reader. It keeps every document whose number modulo `num_ranks` is `rank`."""
    num_ranks: int = 1

    def __post_init__(self) -> None:
        names = ("shuffle_buffer_size", "max_retries", "rank")
        check_whole(0, *names, **{name: getattr(self, name) for name in names})
        check_whole(1, "num_ranks", num_ranks=self.num_ranks)
        if self.rank >= self.num_ranks:
            raise ConfigError(f"rank counts from 0 to {self.num_ranks - 1} (num_ranks - 1), got {self.rank}")
        delay = self.retry_delay_sec
        if not isinstance(delay, Real) or isinstance(delay, bool) or not 0 <= delay < math.inf:
            raise ConfigError(f"retry_delay_sec must be a number of at least 0, got {delay!r}")


class Documents:
    """Yield the documents of a source in the order of training, by `read`. `sleep` waits between retries."""

    def __init__(self, source: Source, options: ReadOptions, sleep: Callable[[float], object]) -> None:
        self._source = source
        self._options = options
        self._sleep = sleep
        self._held: list[Document] = []
        self._keys: tuple[int, int, list[int]] = (-1, -1, [])
        self._is_started = False
        self.epoch = 0
        self._num_read = self._num_drawn = 0  # of the epoch
        self._is_read_out = False
        """True once the source has no more documents in this epoch. The buffer may still hold some."""

    def read(self) -> Document | None:
        """Return the next document; None if there is none left."""
        while True:
            self._fill()
            if self._held:
                self._num_drawn += 1
                return self._held.pop(self._drawn(len(self._held)))
            if not self._options.repeat:
                return None
            if not self._num_drawn:
                of = f" for rank {self._options.rank} of {self._options.num_ranks}" if self._num_read else ""
                raise DataError(f"{self._source.name}: an epoch without a document{of} cannot be repeated")
            self._begin(self.epoch + 1)

    def snapshot(self) -> dict[str, Any]:
        """Return the position. A document in the buffer is saved by its address if the source can fetch it again."""
        return {
            "epoch": self.epoch,
            "source": self._source.state() if self._is_started else None,
            "num_read": self._num_read,
            "num_drawn": self._num_drawn,
            "is_read_out": self._is_read_out,
            "held": [[one.address, None if self._source.can_fetch else one.text] for one in self._held],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a position returned by `snapshot()`."""
        self._is_started = saved["source"] is not None
        if self._is_started:
            self._retried(lambda: self._source.load(saved["source"]))
        self.epoch, self._num_read, self._num_drawn = saved["epoch"], saved["num_read"], saved["num_drawn"]
        self._is_read_out = saved["is_read_out"]
        self._held = [
            Document(self.fetch(address) if text is None else text, address) for address, text in saved["held"]
        ]

    @property
    def is_started(self) -> bool:
        """Tell whether reading has begun."""
        return self._is_started

    def fetch(self, address: Any) -> str | None:
        """Return a document by its address; None if the source cannot fetch."""
        return self._retried(lambda: self._source.fetch(address)) if self._source.can_fetch else None

    def fingerprint(self) -> Any:
        """Return what must be equal for a saved position to mean the same documents; may read a few rows."""
        return self._retried(self._source.fingerprint)

    def _begin(self, epoch: int) -> None:
        self.epoch, self._num_read, self._num_drawn, self._is_read_out = epoch, 0, 0, False
        self._is_started = True
        self._retried(lambda: self._source.start(epoch))

    def _fill(self) -> None:
        if not self._is_started:
            self._begin(self.epoch)
        while not self._is_read_out and len(self._held) < max(1, self._options.shuffle_buffer_size):
            # An iterator that raised is at its end and may have skipped a row, so the source moves back to its position
            # before a retry.
            document = self._retried(self._source.read, lambda: self._source.load(self._source.state()))
            if document is None:
                self._is_read_out = True
            else:
                if self._num_read % self._options.num_ranks == self._options.rank:
                    self._held.append(document)
                self._num_read += 1

    def _drawn(self, num_held: int) -> int:
        """Return the index of the next document in the buffer. It depends only on seed, epoch and the number drawn."""
        if self._options.shuffle_buffer_size < 2:
            return 0
        chunk, at = divmod(self._num_drawn, _KEYS_AT_A_TIME)
        if self._keys[:2] != (self.epoch, chunk):
            keys = sort_keys(_KEYS_AT_A_TIME, self._options.seed, "documents", self.epoch, chunk).tolist()
            self._keys = (self.epoch, chunk, keys)
        return self._keys[2][at] % num_held

    def _retried(self, action: Callable[[], Any], recover: Callable[[], Any] = lambda: None) -> Any:
        """Run `action`. After an error, wait, run `recover` and retry, up to `max_retries` times."""
        for attempt in range(self._options.max_retries + 1):
            try:
                if attempt:
                    recover()
                return action()
            except VLPackError:  # noqa: PERF203 - retrying is what the loop is for
                raise  # broken data or options stay broken
            except Exception as error:
                self._wait_or_give_up(attempt, error)
        raise AssertionError("the last attempt returns or raises")

    def _wait_or_give_up(self, attempt: int, error: Exception) -> None:
        where = f"{self._source.name}: document {self._num_read + 1} of epoch {self.epoch}"
        said = f"{type(error).__name__}: {error}"
        if attempt == self._options.max_retries:
            raise SourceError(f"{where} cannot be read, after {attempt + 1} attempts ({said})") from error
        delay = self._options.retry_delay_sec * 2**attempt
        logger.warning("%s: %s; trying again in %.1f s", where, said, delay)
        self._sleep(delay)
