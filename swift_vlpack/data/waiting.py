"""A rank that waits for others says for whom; one whose collective dies, who has left and why.

Ranks meet in the same order at the same points. Each announces the number of the point it has come to in the store
that the run was started with, and the error that it leaves with; one that has waited for long, or in vain, looks there.
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

from swift_vlpack.core.errors import VLPackError

logger = logging.getLogger(__name__)

SECONDS_BEFORE_IT_IS_SAID = 180.0
"""And then again after twice as long, and so on."""
_CONNECTING = timedelta(seconds=10)
_OF_GLOO = ("gloo/", "Application timeout caused pair closure", "Connection closed by peer", "Connection reset by peer")
"""What an error of a collective over gloo has in its text; its class is RuntimeError."""
_LONGEST_ERROR = 300
_num_points = 0


class RankGone(VLPackError):
    """Something between the ranks died, for the most part because one of them has left."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around something that all ranks have to come to."""
    global _num_points
    # Numbers and not names: the same point comes again with every step.
    _num_points += 1
    with _watched(_store(), _num_points, what, SECONDS_BEFORE_IT_IS_SAID):
        yield


@contextmanager
def _watched(store: Any, point: int, what: str, seconds: float) -> Iterator[None]:
    if store is None:
        yield
        return
    with suppress(RuntimeError):  # of a store that is gone: the collective will tell
        store.set(str(dist.get_rank()), f"{point} {what}")
    is_over = threading.Event()
    # A daemon: it must not keep a run alive that ends by an error.
    watcher = threading.Thread(target=_watch, args=(store, point, what, seconds, is_over), daemon=True)
    watcher.start()
    try:
        yield
    except RankGone:  # told by a point within this one
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
    """Whether an error says that ranks could not talk to each other, and nothing of what they talked about."""
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
    # Twice as long each time: a rank that hangs for a day says so in ten lines, not in five hundred.
    while not is_over.wait(max(seconds, waited)):
        waited += max(seconds, waited)
        with suppress(RuntimeError):
            if missing := _missing(store, point):
                logger.warning(
                    "rank %d has waited %.0f s for the others at %r; not there: %s",
                    dist.get_rank(), waited, what, "; ".join(missing),
                )  # fmt: skip


def _missing(store: Any, point: int) -> list[str]:
    """The ranks that have not come to a point, and where they were last."""
    missing = []
    for rank in range(dist.get_world_size()):
        number, _, what = store.get(str(rank)).decode().partition(" ") if store.check([str(rank)]) else ("0", "", "")
        if int(number) < point:
            missing.append(f"rank {rank}, last at {what!r}" if what else f"rank {rank}, which has come to no point yet")
    return missing


@cache
def _store() -> Any:
    """The store that the ranks found each other by, for a client of our own; None where there is none to be found."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A client of our own: what waits in one holds its lock, and torch's has collectives to serve.
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECTING)  # type: ignore[attr-defined]
    except (KeyError, ValueError, RuntimeError) as error:
        logger.info("ranks that wait cannot say for whom: %s", error)
        return None
    return dist.PrefixStore("vlpack_points", client)  # type: ignore[attr-defined]
