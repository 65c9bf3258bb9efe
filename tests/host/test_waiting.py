"""Ranks that wait for others, as real processes over gloo."""

import os
import subprocess
import sys

import pytest

from tests.e2e.ranks import ROOT, free_port

TWO_RANKS = """
import logging, os, sys, time
import torch.distributed as dist
from swift_vlpack.data import waiting
from swift_vlpack.host.ranks import check_equal, gathered, rank

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


@pytest.mark.slow
@pytest.mark.telling
def test_rank_that_waits_says_for_whom_and_where():
    """RANKS-8: at the very first point, and at a later one; in words, and no more often than they are worth."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS], env={**environ, "RANK": str(rank)}, text=True, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    logs = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], logs
    said = [[line for line in log.splitlines() if "has waited" in line] for log in logs]
    assert "rank 0 has waited" in said[0][0]
    assert "'the first point'; not there: rank 1, which has come to no point yet" in said[0][0]
    assert 1 < len(said[0]) < 5, "again after twice as long"
    assert all("at 'plan'; not there: rank 0, last at 'the second point'" in line for line in said[1])
    assert said[1]
