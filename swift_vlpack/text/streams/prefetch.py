"""A thread that works ahead: what it makes waits in order, its errors reach whoever asks, and it ends when told to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import finalize


class _Shared:
    """What the thread and its owner have in common; the thread knows nothing else, so the owner can be collected."""

    def __init__(self, make: Callable[[], Any], depth: int) -> None:
        self.make = make
        self.depth = depth
        self.made: deque[Any] = deque()
        self.error: BaseException | None = None
        self.is_stopped = False
        self.changed = threading.Condition()

    def run(self) -> None:
        """Make one after the other until there is an error (the end is one), or nobody wants more."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: len(self.made) < self.depth or self.is_stopped)
                if self.is_stopped:
                    return
            try:
                made = self.make()
            except BaseException as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.made.append(made)
                self.changed.notify_all()

    def stop(self) -> None:
        """Let the thread end at its next step."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()


class Prefetcher:
    """Calls `make` ahead of `next`, at most `depth` times; `make` ends it by `StopIteration`."""

    def __init__(self, make: Callable[[], Any], depth: int) -> None:
        self._shared = _Shared(make, depth)
        self._thread = threading.Thread(target=self._shared.run, name="vlpack-prefetch", daemon=True)
        self._thread.start()
        self._end = finalize(self, self._shared.stop)

    def next(self) -> Any:
        """What was made first; the error that came in its place, with the traceback of the thread."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.made or shared.error is not None)
            if shared.made:
                made = shared.made.popleft()
                shared.changed.notify_all()
                return made
            assert shared.error is not None
            raise shared.error

    def close(self) -> None:
        """End the thread and wait until it has; it finishes what it is making."""
        self._end()
        self._thread.join()
