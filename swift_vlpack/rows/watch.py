"""Give up reads that never end: work runs in a thread, which is left behind if it waits for a disk for too long.

Nothing else ends a read from a network mount that is gone: no signal reaches it, and no timeout of Python's.

>>> watched(lambda: 2 + 2)
4
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

READ_SECONDS = 60.0
"""A process that makes no progress on a row for this long gives up its reads."""
LEAST_SECONDS = 2.0
"""Each read that was given up halves the limit for later reads of the process, down to this."""
_SHARE_OF_WORK = 0.1  # if a core worked for a larger share of the time, the process is busy and not waiting
_LOOKS = 10  # how often to look within the limit

T = TypeVar("T")
_num_left_behind = 0  # threads of this process


class Waits(Exception):
    """Work was left behind; `where` tells where it was."""

    def __init__(self, where: Any, seconds: float) -> None:
        super().__init__(f"nothing was read for {seconds:g} seconds")
        self.where = where


def seconds_to_wait() -> float:
    """Return the limit for the next read."""
    # It shrinks, so that a thousand files of a mount that is gone do not take a thousand minutes.
    return max(min(LEAST_SECONDS, READ_SECONDS), READ_SECONDS / 2**_num_left_behind)


def watched(work: Callable[[], T], where: Callable[[], Any] = lambda: "") -> T:
    """Do `work` and return its result. Raises `Waits` if it neither ends, nor moves on (`where`), nor computes."""
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        # Everything that the work raises, exits too, is raised again in the thread that waits for it.
        except BaseException as error:
            outcome.append((False, error))

    global _num_left_behind
    seconds = seconds_to_wait()
    # A daemon, because nothing ends a thread that waits for a dead mount, and the process must be able to exit.
    thread = threading.Thread(target=run, daemon=True, name="vlpack-read")
    thread.start()
    place, since, worked = where(), time.monotonic(), time.process_time()
    while not outcome:
        thread.join(seconds / _LOOKS)
        now = where(), time.monotonic(), time.process_time()
        # It moved on, or a core works: a large image that is being decoded is slow and not stuck.
        if now[0] != place or now[2] - worked > _SHARE_OF_WORK * seconds:
            place, since, worked = now
        elif not outcome and place is not None and now[1] - since >= seconds:
            _num_left_behind += 1
            raise Waits(place, seconds)
    is_good, value = outcome[0]
    if not is_good:
        raise value
    return value
