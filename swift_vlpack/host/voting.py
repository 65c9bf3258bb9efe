"""Let ranks vote on the next step: they exchange one number for each step, in a process group of its own on the CPU."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from swift_vlpack.feed.agreement import Vote
from swift_vlpack.feed.waiting import waiting
from swift_vlpack.host.ranks import num_ranks

_LEAVING = timedelta(seconds=10)
"""Longest wait for a pending vote when the process ends. If this rank has failed, the others may never vote."""

_voting: list[Ranks] = []
"""Groups whose last vote may still be pending."""


class Ranks:
    """A group of all ranks, for votes. Every rank has to make its groups in the same order."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        """Make the group. A rank waits `timeout` for the slowest one; the default is torch's half an hour."""
        # Use gloo on the CPU: a vote over NCCL would queue after the kernels of the step that it should overlap with.
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if num_ranks() > 1 else None
        self._on_its_way: dist.Work | None = None
        if self._group is not None:
            _voting.append(self)
            _at_exit(_settle)  # also if the run fails

    def vote(self, mine: Vote) -> Callable[[], Vote]:
        """Start a vote. Returns a function that waits for the outcome."""
        if self._group is None:
            return lambda: mine
        votes = torch.tensor([int(mine)])
        work: Any = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._on_its_way = work

        def outcome() -> Vote:
            with waiting("the vote on the next step"):
                work.wait()
            # Read the tensor only after the wait: until then it holds this rank's own vote.
            return Vote(int(votes))

        return outcome

    def settle(self) -> None:
        """Wait for the last vote, although its outcome is not needed, and end the group.

        gloo's thread frees the tensor of the vote, for which it needs Python. If Python ends first, the process aborts
        ("terminate called without an active exception"; 4 of 100 runs on two cores, 0 of 90 with this wait).
        """
        if self._on_its_way is not None:
            try:
                self._on_its_way.wait(_LEAVING)
            except RuntimeError:  # another rank has left, and a group that waits for it cannot be ended
                return
        self._on_its_way = self._group = None


def leave_at_exit() -> None:
    """Let the ranks leave their groups before Python ends. Call it only after a run that has ended well."""
    if num_ranks() > 1:
        _at_exit(_leave)


def _at_exit(work: Callable[[], None]) -> None:
    atexit.unregister(work)
    atexit.register(work)


def _settle() -> None:
    while _voting:
        _voting.pop().settle()


def _leave() -> None:
    _settle()
    if dist.is_initialized():
        gc.collect()  # a group ends when its last owner is collected, and trainer and model are in reference cycles
        dist.destroy_process_group()
        gc.collect()
