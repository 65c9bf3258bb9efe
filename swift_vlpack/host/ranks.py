"""Exchange small facts between the ranks of a run, never data.

gathered(3)                      returns [3, ...] on every rank: the values of all ranks
results_of_all(lambda: work())   returns the results of all ranks on every rank; if one rank fails, all ranks stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from swift.utils import get_dist_setting

from swift_vlpack.errors import VLPackError
from swift_vlpack.feed.waiting import waiting

Result = TypeVar("Result")

_counted_as: ContextVar[int | None] = ContextVar("counted_as", default=None)


class RankFailed(VLPackError):
    """Another rank has failed, so this rank stops too."""


@contextmanager
def counted_as(num_ranks: int) -> Iterator[None]:
    """Let `num_ranks_of_run` return this number, so that a command can plan a run without starting its ranks."""
    token = _counted_as.set(num_ranks)
    try:
        yield
    finally:
        _counted_as.reset(token)


def num_ranks_of_run() -> int:
    """Return how many ranks share the packs: as many as were launched, unless `counted_as` sets another number."""
    # Read the launcher's variables, because a plan may be made before `torch.distributed` is initialised.
    return _counted_as.get() or max(1, get_dist_setting()[2])


def num_ranks() -> int:
    """Return the number of processes in `torch.distributed`; 1 if it is not initialised."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process."""
    return int(dist.get_rank()) if num_ranks() > 1 else 0


def gathered(mine: Any, what: str = "what every rank found") -> list[Any]:
    """Return the values of all ranks, in order of rank. All ranks must call it. `what` names the values in errors."""
    everyone: list[Any] = [mine]
    if num_ranks() > 1:
        everyone = [None] * num_ranks()
        with waiting(what):
            dist.all_gather_object(everyone, mine)
    return everyone


def results_of_all(work: Callable[[], Result], what: str = "what every rank found") -> list[Result]:
    """Do the work on every rank and return all results. If it fails on one rank, all ranks raise instead of waiting."""
    mine: Any = None
    error: Exception | None = None
    try:
        mine = work()
    except Exception as caught:
        error = caught
    # Send the text and not the error: some errors cannot be pickled, and then no rank would learn of the failure.
    everyone = gathered((mine, None if error is None else f"{type(error).__name__}: {error}"), what)
    # Prefer this rank's own error, because it has a traceback.
    if error is not None:
        raise error
    for other, (_, said) in enumerate(everyone):
        if said is not None:
            raise RankFailed(f"rank {other} failed: {said}")
    return [result for result, _ in everyone]


class RanksOfRun:
    """The ranks of `torch.distributed`, for code that takes a `Comm`."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return rank()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return num_ranks()

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Do the work on every rank. Returns the results of all ranks, in order of rank."""
        return results_of_all(work)
