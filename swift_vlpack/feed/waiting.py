"""Report which ranks are missing if a rank waits for long, and which ranks have left, and why, if a collective fails.

All ranks reach the same points (a collective, a vote, a checkpoint) in the same order. Each rank writes two things to
the store through which the ranks found each other: the number of the last point that it has reached, and the error with
which it leaves. A rank that waits reads what the other ranks wrote.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from swift_vlpack.errors import VLPackError

logger = logging.getLogger(__name__)

SECONDS_BEFORE_IT_IS_SAID = 180.0
"""Seconds of waiting before the first warning. Each further warning comes when the time has doubled."""
_CONNECTING = timedelta(seconds=10)
_OF_GLOO = ("gloo/", "Application timeout caused pair closure", "Connection closed by peer", "Connection reset by peer")
"""Texts by which an error of a gloo collective is recognized, because its class is just RuntimeError."""
_LONGEST_ERROR = 300
"""Most characters of an error that is sent to the other ranks."""
_num_points = 0


class RankGone(VLPackError):
    """A collective failed, usually because one of the ranks has left."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Watch work inside this block that ends only when all ranks have reached it.

    After a while, log which ranks are missing. Raises `RankGone`, which names the ranks that have left, if a collective
    fails. `what` names the point in logs and errors.
    """
    global _num_points
    # Number the points, because the same name comes again in every step.
    _num_points += 1
    with _watched(_store(), _num_points, what, SECONDS_BEFORE_IT_IS_SAID):
        yield


@contextmanager
def _watched(store: Any, point: int, what: str, seconds: float) -> Iterator[None]:
    if store is None:
        yield
        return
    with suppress(RuntimeError):  # the store is gone; the collective will fail and report it
        store.set(str(dist.get_rank()), f"{point} {what}")
    is_over = threading.Event()
    # Make it a daemon thread, so that it does not keep a run alive that ends with an error.
    watcher = threading.Thread(target=_watch, args=(store, point, what, seconds, is_over), daemon=True)
    watcher.start()
    try:
        yield
    except RankGone:  # an inner point has reported it
        raise
    except Exception as error:
        if not is_of_collective(error):
            with suppress(RuntimeError):
                store.set(_left(dist.get_rank()), f"{what}: {_one_line(error)}")
            raise
        raise RankGone(f"{what}: a collective died ({_one_line(error)}); {_who_has_left(store, point)}") from None
    finally:
        is_over.set()


def is_of_collective(error: BaseException) -> bool:
    """Tell whether an error comes from the communication between ranks, not from their work."""
    if isinstance(error, (RankGone, dist.DistError)):
        return True
    return type(error) is RuntimeError and any(part in str(error) for part in _OF_GLOO)


def _who_has_left(store: Any, point: int) -> str:
    try:
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        left = [rank for rank in others if store.check([_left(rank)])]
        said = [f"rank {rank} left at {store.get(_left(rank)).decode()}" for rank in left]
        said += [f"not there: {missing}" for missing in _missing(store, point)]
    except RuntimeError:
        said = []
    return "; ".join(said) or "no rank has said why: look at the output of the others, and whether one was killed"


def _left(rank: int) -> str:
    return f"left {rank}"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]


def _watch(store: Any, point: int, what: str, seconds: float, is_over: threading.Event) -> None:
    waited = 0.0
    # Double the time, so that a rank that hangs for a day logs ten lines and not five hundred.
    while not is_over.wait(max(seconds, waited)):
        waited += max(seconds, waited)
        with suppress(RuntimeError):
            if missing := _missing(store, point):
                logger.warning(
                    "rank %d has waited %.0f s for the others at %r; not there: %s",
                    dist.get_rank(), waited, what, "; ".join(missing),
                )  # fmt: skip


def _missing(store: Any, point: int) -> list[str]:
    """Describe the ranks that have not reached a point, with the last point of each."""
    missing = []
    for rank in range(dist.get_world_size()):
        number, _, what = store.get(str(rank)).decode().partition(" ") if store.check([str(rank)]) else ("0", "", "")
        if int(number) < point:
            missing.append(f"rank {rank}, last at {what!r}" if what else f"rank {rank}, which has come to no point yet")
    return missing


@cache
def _store() -> Any:
    """Connect to the store through which the ranks found each other; None in a run of one rank, or if it fails."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Use a client of our own: a call that waits holds the lock of its client, and collectives need torch's client.
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECTING)  # type: ignore[attr-defined]
    except (KeyError, ValueError, RuntimeError) as error:
        logger.info("a rank that waits cannot say which ranks are missing: %s", error)
        return None
    return dist.PrefixStore("vlpack_points", client)  # type: ignore[attr-defined]
