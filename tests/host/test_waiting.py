"""Ranks that leave others, as real processes over gloo."""

import os
import subprocess
import sys

import pytest

from tests.e2e.ranks import ROOT, free_port

ONE_LEAVES = """
import os, sys
import torch
import torch.distributed as dist
from swift_vlpack.feed.waiting import RankGone, waiting
from swift_vlpack.host.ranks import gathered, rank

dist.init_process_group("gloo")
gathered(1, "the first point")
how = sys.argv[1]
if rank() == 1 and how == "killed":
    os._exit(9)
try:
    with waiting("the isolation proof"):
        if rank() == 1:
            raise torch.OutOfMemoryError("no memory\\nof many lines")
        dist.all_reduce(torch.ones(1))
except RankGone as error:
    print("TOLD", error, file=sys.stderr)
    assert "\\n" not in str(error) and error.__cause__ is None
    sys.stderr.flush()
    os._exit(0)  # a group whose collective died keeps a thread of gloo, which now and then aborts the end of Python
"""


def on_two_ranks(script, *args):
    """What the ranks write, and their exit codes. Rank 0 has the store, as torchrun would, and is waited for last."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *args], env={**environ, "RANK": str(rank)}, text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    logs = [process.communicate(timeout=300)[1] for process in processes]
    return logs, [process.returncode for process in processes]


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "rank 1 left at the isolation proof: OutOfMemoryError: no memory of many lines"),
        ("killed", "no rank has said why: look at the output of the others, and whether one was killed"),
    ],
)
def test_collective_that_dies_says_who_has_left(how, told):
    """RANKS-13: with its error where it had one."""
    logs, codes = on_two_ranks(ONE_LEAVES, how)
    assert codes[0] == 0, logs[0]
    (line,) = [line for line in logs[0].splitlines() if line.startswith("TOLD")]
    assert "TOLD the isolation proof: a collective died (RuntimeError: " in line
    assert line.endswith(told)
