"""What work that is shared by the ranks of a run asks of them, and the run of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Comm(Protocol):
    """The ranks of a run; the host has one over torch.distributed."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Do the work on every rank and give everyone all results, in order of rank.

        All ranks have to call it; where the work fails on one, all raise instead of waiting for it.
        """


class Alone:
    """A run of one process."""

    rank = 0
    num_ranks = 1

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """The one result."""
        return [work()]


ALONE = Alone()
