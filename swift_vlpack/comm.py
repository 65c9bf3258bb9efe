"""Share work among the ranks of a run: every rank does its part, and gets the results of all ranks.

>>> ALONE.num_ranks, ALONE.results_of_all(lambda: "sizes of my rows")
(1, ['sizes of my rows'])

Such work takes a `Comm`. `ALONE` is the `Comm` of a single process; `host/ranks.py` has that of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
OfAll = Callable[[Callable[[], Any]], list[Any]]
"""The type of `Comm.results_of_all`, for functions that need nothing else of a `Comm`."""


class Comm(Protocol):
    """The ranks of a run."""

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
        """Do the work. Returns a list of its single result."""
        return [work()]


ALONE = Alone()
