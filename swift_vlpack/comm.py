"""Let the ranks of a run share work (`Comm`); `ALONE` is the run of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Comm(Protocol):
    """The ranks of a run; the host has one over torch.distributed."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""

    @property
    def num_ranks(self) -> int:
        """Count the ranks."""

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Do the work on every rank. Returns all results on every rank, in order of rank.

        All ranks must call it. If the work fails on one rank, all raise instead of waiting for it.
        """


class Alone:
    """A run of one process."""

    rank = 0
    num_ranks = 1

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Return the one result."""
        return [work()]


ALONE = Alone()
