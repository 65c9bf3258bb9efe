"""Let ranks agree before every pack: either all train one more, or the epoch ends for all.

    fetch the next pack -> vote (asynchronous) -> train the pack before -> read the votes -> ...

Each step costs one number, which is exchanged on the CPU while the step before trains. A rank that has no pack left
trains one without loss as long as another rank has packs; then the epoch ends for all. No fetched pack is thrown away.
A rank that fails votes so, and the other ranks stop with it instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Protocol, TypeVar

from swift_vlpack.errors import VLPackError

T = TypeVar("T")


class AnotherRankFailed(VLPackError):
    """Another rank could not get its next pack, and training cannot go on without it."""


class Vote(IntEnum):
    """The vote of a rank on its next step. The largest vote of all ranks counts, so a failure stops all ranks."""

    DRY = 0
    PACK = 1
    FAILED = 2


class Voting(Protocol):
    """A group of ranks that can vote."""

    def vote(self, mine: Vote) -> Callable[[], Vote]:
        """Start a vote. Returns a function that waits for the outcome."""


def in_step(packs: Iterable[T], empty: Callable[[], T], ranks: Voting) -> Iterator[T]:
    """Yield this rank's packs, then empty ones as long as another rank has packs. All ranks yield the same number."""
    iterator = iter(packs)
    pack, error, mine = _fetch(iterator)
    outcome = ranks.vote(mine)
    while (decided := outcome()) is Vote.PACK:
        current = empty() if mine is Vote.DRY else pack
        # Start the next vote before the current pack is yielded, so that the pack trains meanwhile.
        pack, error, mine = _fetch(iterator)
        outcome = ranks.vote(mine)
        yield current  # type: ignore[misc]  # a vote for PACK comes with one
    # Prefer this rank's own error, because it has the cause.
    if error is not None:
        raise error
    if decided is Vote.FAILED:
        raise AnotherRankFailed("another rank could not get its next pack; its log has the cause")


def _fetch(packs: Iterator[T]) -> tuple[T | None, Exception | None, Vote]:
    try:
        return next(packs), None, Vote.PACK
    except StopIteration:
        return None, None, Vote.DRY
    # Return the error, so that `in_step` raises it after the vote: otherwise the other ranks would wait for this one.
    except Exception as error:
        return None, error, Vote.FAILED
