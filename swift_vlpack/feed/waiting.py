"""Say, if a collective fails, at which point that was, which ranks have left, and with what error.

A rank that leaves with an error writes it to the store through which the ranks found each other; the others read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from textwrap import shorten
from typing import Any

import torch.distributed as dist

from swift_vlpack.errors import VLPackError

_OF_GLOO = ("gloo/", "Application timeout caused pair closure", "Connection closed by peer", "Connection reset by peer")
"""Texts by which an error of a gloo collective is recognized, because its class is just RuntimeError."""
_NO_STORE = (RuntimeError, ValueError, KeyError)  # one rank, a group without a TCP store, or a store that is gone


class RankGone(VLPackError):
    """A collective failed, usually because one of the ranks has left."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Raise `RankGone` if a collective fails inside this block: it names the point, `what`, and who has left."""
    try:
        yield
    except RankGone:  # an inner point has reported it
        raise
    except Exception as error:
        said = shorten(f"{type(error).__name__}: {error}", 300)  # in one line
        if is_of_collective(error):
            raise RankGone(f"{what}: a collective died ({said}); {_who_has_left()}") from None
        with suppress(*_NO_STORE):
            me = str(dist.get_rank())
            _store().set(me, f"{what}: {said}")
        raise


def is_of_collective(error: BaseException) -> bool:
    """Tell whether an error comes from the communication between ranks, not from their work."""
    is_of_gloo = type(error) is RuntimeError and any(part in str(error) for part in _OF_GLOO)
    return is_of_gloo or isinstance(error, (RankGone, dist.DistError))


def _who_has_left() -> str:
    with suppress(*_NO_STORE):
        store, ranks = _store(), map(str, range(dist.get_world_size()))
        if said := [f"rank {rank} left at {store.get(rank).decode()}" for rank in ranks if store.check([rank])]:
            return "; ".join(said)
    return "no rank has said why: look at the output of the others, and whether one was killed"


def _store() -> Any:
    address, seconds = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=10)
    client = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=seconds)  # type: ignore[attr-defined]
    return dist.PrefixStore("vlpack_left", client)  # type: ignore[attr-defined]
