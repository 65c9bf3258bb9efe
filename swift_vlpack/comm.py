"""Define what shared work needs of the ranks of a run, and the run of one process that needs no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
OfAll = Callable[[Callable[[], Any]], list[Any]]
"""The type of `Comm.results_of_all`, for work that needs nothing else of the ranks."""


class Comm(Protocol):
    """The ranks of a run; the host has one over torch.distributed."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Do the work on every rank. Returns the results of all ranks, in order of rank.

        All ranks must call it. If the work fails on one rank, all ranks raise instead of waiting for that one.
        """


class Alone:
    """A run of one process."""

    rank = 0
    num_ranks = 1

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Return the one result."""
        return [work()]


ALONE = Alone()
