"""Share work among the ranks of a run: every rank does its part, and every rank gets the results of all.

>>> ALONE.num_ranks, ALONE.results_of_all(lambda: "sizes of my rows")
(1, ['sizes of my rows'])

`Comm` is what such work asks for. `ALONE` is the run of one process; `host/` has the ranks of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
OfAll = Callable[[Callable[[], Any]], list[Any]]
"""The type of `Comm.results_of_all`, for work that needs nothing else of the ranks."""


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
        """Return the one result."""
        return [work()]


ALONE = Alone()
