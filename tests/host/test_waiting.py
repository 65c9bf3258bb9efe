"""Ranks that wait for others, as real processes over gloo."""

import os
import subprocess
import sys

import pytest

from tests.e2e.ranks import ROOT, free_port

TWO_RANKS = """
import logging, os, sys, time
import torch.distributed as dist
from swift_vlpack.feed import waiting
from swift_vlpack.host.ranks import gathered, rank
from swift_vlpack.host.same_on_ranks import check_equal

logging.basicConfig(level=logging.INFO)
waiting.SECONDS_BEFORE_IT_IS_SAID = 0.5
dist.init_process_group("gloo")
if rank() == 1:
    time.sleep(4)
gathered(1, "the first point")
gathered(2, "the second point")
if rank() == 0:
    time.sleep(2)
check_equal("plan", {"digest": "a"})
for number in range(2000):
    gathered(number)
dist.destroy_process_group()
"""


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
        ("killed", "not there: rank 1, last at 'the first point'"),
    ],
)
def test_collective_that_dies_says_who_has_left(how, told):
    """RANKS-13: with its error where it had one, and where it was last where it had none."""
    logs, codes = on_two_ranks(ONE_LEAVES, how)
    assert codes[0] == 0, logs[0]
    (line,) = [line for line in logs[0].splitlines() if line.startswith("TOLD")]
    assert "TOLD the isolation proof: a collective died (RuntimeError: " in line
    assert line.endswith(told)


@pytest.mark.slow
@pytest.mark.telling
def test_rank_that_waits_says_for_whom_and_where():
    """RANKS-8: at the very first point, and at a later one; in words, and no more often than they are worth."""
    logs, codes = on_two_ranks(TWO_RANKS)
    assert codes == [0, 0], logs
    said = [[line for line in log.splitlines() if "has waited" in line] for log in logs]
    assert "rank 0 has waited" in said[0][0]
    assert "'the first point'; not there: rank 1, which has come to no point yet" in said[0][0]
    assert 1 < len(said[0]) < 5, "again after twice as long"
    assert all("at 'plan'; not there: rank 0, last at 'the second point'" in line for line in said[1])
    assert said[1]
