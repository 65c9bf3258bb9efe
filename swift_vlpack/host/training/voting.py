"""Votes on the next step: one number a step, over a group of their own on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from swift_vlpack.data.feeds.agreement import Vote
from swift_vlpack.data.waiting import waiting
from swift_vlpack.host.ranks import num_ranks


class Ranks:
    """The ranks of the run, over a CPU group of their own; every rank has to make it, in the same order."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        """`timeout` is how long a rank waits for the slowest; without it torch's half an hour."""
        # gloo, on the CPU: a vote over NCCL would wait in line behind the kernels of the step that it is to overlap.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if num_ranks() > 1 else None

    def vote(self, mine: Vote) -> Callable[[], Vote]:
        """Start a vote; what comes back waits for its outcome."""
        if self._group is None:
            return lambda: mine
        votes = torch.tensor([int(mine)])
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def outcome() -> Vote:
            with waiting("the vote on the next step"):
                work.wait()
            # Read behind the wait: until then it is this rank's own vote.
            return Vote(int(votes))

        return outcome
