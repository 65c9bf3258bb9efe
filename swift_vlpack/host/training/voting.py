"""Votes on the next step: one number a step, over a group of their own on the CPU."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from swift_vlpack.data.feeds.agreement import Vote
from swift_vlpack.data.waiting import waiting
from swift_vlpack.host.ranks import num_ranks

_LEAVING = timedelta(seconds=10)
"""Longest wait of an ending process for a pending vote: if this rank failed, the others may never vote."""


class Ranks:
    """The ranks of the run, over a CPU group of their own; every rank has to make it, in the same order."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        """`timeout` is how long a rank waits for the slowest; without it torch's half an hour."""
        # gloo, on the CPU: a vote over NCCL would wait in line behind the kernels of the step that it is to overlap.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if num_ranks() > 1 else None
        self._on_its_way: dist.Work | None = None
        if self._group is not None:
            atexit.register(self._settle)

    def vote(self, mine: Vote) -> Callable[[], Vote]:
        """Start a vote; what comes back waits for its outcome."""
        if self._group is None:
            return lambda: mine
        votes = torch.tensor([int(mine)])
        work = self._on_its_way = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def outcome() -> Vote:
            with waiting("the vote on the next step"):
                work.wait()
            # Read behind the wait: until then it is this rank's own vote.
            return Vote(int(votes))

        return outcome

    def _settle(self) -> None:
        """Wait for the pending vote on the step after the last one, whose outcome is not needed, and end the group.

        gloo's thread frees the tensor of the vote, and needs Python for that. If Python ends first, the process aborts
        ("terminate called without an active exception"; 4 of 100 runs on two cores, 0 of 90 with this wait).
        """
        if self._on_its_way is not None:
            try:
                self._on_its_way.wait(_LEAVING)
            except RuntimeError:  # another rank has left; a group that waits for it cannot end
                return
        self._on_its_way = self._group = None
