"""Several ranks of one run as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_SECONDS = 120  # a rank that does not come to a meeting breaks it for all


class OtherRankFailed(Exception):
    """As the host has one."""


class _Meeting:
    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.results: list[Any] = [None] * num_ranks


class ThreadRank:
    """What `Comm` asks of a rank."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.num_ranks = meeting.barrier.parties
        self._meeting = meeting

    def results_of_all(self, work: Callable[[], Any]) -> list[Any]:
        error = None
        try:
            mine = work()
        except Exception as caught:
            mine, error = None, caught
        self._meeting.results[self.rank] = (mine, error)
        self._meeting.barrier.wait(_SECONDS)
        everyone = list(self._meeting.results)
        self._meeting.barrier.wait(_SECONDS)  # before anybody brings the next result
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(everyone):
            if other is not None:
                raise OtherRankFailed(f"rank {rank} failed: {other}")
        return [result for result, _ in everyone]


def on_ranks(num_ranks: int, case: Callable[[ThreadRank], Any]) -> list[Any]:
    """What each rank gives, or the error that it ends with."""
    meeting = _Meeting(num_ranks)
    given: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            given[rank] = case(ThreadRank(rank, meeting))
        except Exception as error:
            given[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return given
