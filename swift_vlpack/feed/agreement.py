"""Ranks agree, pack by pack, before they consume: all go on, or all are at the end of the epoch.

    fetch the next pack -> vote (asynchronous) -> train the pack before -> read the votes -> ...

One number a step goes round, on the CPU, while the step before it trains. A rank that has run dry while another has a
pack left trains a pack without loss; when nobody has one, the epoch ends for all. Nothing fetched is thrown away. A
rank that fails lets the others know, so that they stop with it instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Protocol, TypeVar

from swift_vlpack.errors import VLPackError

T = TypeVar("T")


class AnotherRankFailed(VLPackError):
    """Training cannot go on without the rank that could not get its next pack."""


class Vote(IntEnum):
    """What a rank has for the next step; the largest vote counts."""

    DRY = 0
    PACK = 1
    FAILED = 2


class Voting(Protocol):
    """The ranks of a run, as far as they vote."""

    def vote(self, mine: Vote) -> Callable[[], Vote]:
        """Start a vote; what comes back waits for its outcome."""


def in_step(packs: Iterable[T], empty: Callable[[], T], ranks: Voting) -> Iterator[T]:
    """This rank's packs, then empty ones for as long as another rank has packs: equally many on all ranks."""
    iterator = iter(packs)
    pack, error, mine = _fetch(iterator)
    outcome = ranks.vote(mine)
    while (decided := outcome()) is Vote.PACK:
        current = empty() if mine is Vote.DRY else pack
        # Before the current pack is given out: it trains while the vote is on its way.
        pack, error, mine = _fetch(iterator)
        outcome = ranks.vote(mine)
        yield current  # type: ignore[misc]  # a vote for PACK comes with one
    # The rank's own error before the word that one has failed: it has the cause.
    if error is not None:
        raise error
    if decided is Vote.FAILED:
        raise AnotherRankFailed("another rank could not get its next pack; its log has the cause")


def _fetch(packs: Iterator[T]) -> tuple[T | None, Exception | None, Vote]:
    try:
        return next(packs), None, Vote.PACK
    except StopIteration:
        return None, None, Vote.DRY
    # Raised once all have heard of it: the others would wait for this rank's vote.
    except Exception as error:
        return None, error, Vote.FAILED
