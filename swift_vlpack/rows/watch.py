"""Abandon reads that never end: run work in a thread, and leave the thread behind if it waits too long.

Nothing else helps against a read from a network mount that is gone: no signal and no timeout of Python ends it.

>>> watched(lambda: 2 + 2)
4
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

READ_SECONDS = 60.0
"""Abandon the read of a row after this time without progress."""
LEAST_SECONDS = 2.0
"""Each abandoned read halves the limit for later reads of the process, down to this."""
_SHARE_OF_WORK = 0.1  # a process that computed for a larger share of the limit is busy, not waiting
_LOOKS = 10  # checks for progress within the limit

T = TypeVar("T")
_num_abandoned = 0  # threads of this process


class ReadStuck(Exception):
    """Work was abandoned. `where` is the row that the work was at, as the argument `where` of `watched` returned it."""

    def __init__(self, where: Any, seconds: float) -> None:
        super().__init__(f"nothing was read for {seconds:g} seconds")
        self.where = where


def seconds_to_wait() -> float:
    """Return the limit for the next read."""
    # The limit shrinks, so that a thousand files on a mount that is gone do not take a thousand minutes.
    return max(min(LEAST_SECONDS, READ_SECONDS), READ_SECONDS / 2**_num_abandoned)


def restore_limit() -> None:
    """Give later reads the whole limit again: a read that was abandoned has succeeded when it was done once more."""
    # A read of another row is no reason: it may be on another disk than the mount that is gone.
    global _num_abandoned
    _num_abandoned = 0


def watched(work: Callable[[], T], where: Callable[[], Any] = lambda: "") -> T:
    """Do `work` in a thread and return its result.

    `where` returns the row that the work is at, or None between rows. Raises `ReadStuck` if the work stays at one row
    for `seconds_to_wait` and computes next to nothing in that time. Only time in which the work could run counts: none
    in which this process was stopped, or the work waited for a processor.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        # Catch exits too: every error is raised again in the calling thread.
        except BaseException as error:
            outcome.append((False, error))

    global _num_abandoned
    seconds = seconds_to_wait()
    # A daemon thread, because a thread that waits for a dead mount never ends, and the process must be able to exit.
    thread = threading.Thread(target=run, daemon=True, name="vlpack-read")
    thread.start()
    place, worked, queued, waited = where(), time.process_time(), 0.0, 0.0
    while not outcome:
        began = time.monotonic()
        thread.join(seconds / _LOOKS)
        # A wait that came back late says that this process could not run.
        waited += min(seconds / _LOOKS, time.monotonic() - began)
        now = where(), time.process_time(), _seconds_in_queue(thread)
        # The work has gone on to another row, or it computes: decoding a large image is slow, but not stuck.
        if now[0] != place or now[1] - worked > _SHARE_OF_WORK * seconds:
            (place, worked, queued), waited = now, 0.0
        elif not outcome and place is not None and waited - (now[2] - queued) >= seconds:
            _num_abandoned += 1
            raise ReadStuck(place, seconds)
    is_good, value = outcome[0]
    if not is_good:
        raise value
    return value


def _seconds_in_queue(thread: threading.Thread) -> float:
    """Return for how long a thread has waited for a processor; 0 if the system does not say."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
