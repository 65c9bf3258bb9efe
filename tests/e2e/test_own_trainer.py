"""A class as projects write it around ms-swift, on two ranks of `torchrun`, by transformers' Trainer."""

import json
import os
import sys

import pytest

from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.ranks import Processes
from tests.own_run import FAMILY, NUM_EPOCHS, SEED, FusionCaptionDataset

RATIOS = {"target": 0.3, "source": 1.7}


def run(small_folder, output, files, *, die_at=-1):
    given = [f"{path}={ratio}" for path, ratio in files.items()]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    command = [sys.executable, *launcher, "-m", "tests.own_run", small_folder(FAMILY), output, die_at, *given]
    return Processes(command, os.environ, output / f"log{die_at}")


def trained(output):
    lines = [json.loads(line) for path in output.glob("trained_*.jsonl") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["step"])


@pytest.mark.slow
@pytest.mark.telling
def test_own_class_is_trained_by_its_own_schedule_through_a_kill_and_a_resume(small_folder, tmp_path):
    """OWN-9 OWN-6: three epochs, each drawn anew; killed and resumed in the middle of the third, every row once."""
    rows = {name: mixed_rows(tmp_path / name, 20, seed=len(name), largest=120) for name in RATIOS}
    files = {write_jsonl(tmp_path / f"{name}.jsonl", rows[name]): ratio for name, ratio in RATIOS.items()}
    killed = run(small_folder, tmp_path, files, die_at=20)
    assert killed.wait() != 0
    before = trained(tmp_path)
    assert {line["step"] for line in before if line["epoch"] == 2} >= {16, 17, 18, 19}, "two after the checkpoint"
    assert (tmp_path / "checkpoint-18").exists()
    for path in tmp_path.glob("trained_*.jsonl"):
        path.unlink()
    resumed = run(small_folder, tmp_path, files)
    assert resumed.wait() == 0, resumed.output[-3000:]
    after = trained(tmp_path)
    assert {line["step"] for line in after} == set(range(18, 24))
    both = [*(line for line in before if line["step"] < 18), *after]
    assert {(line["steps"], line["epoch"] == line["step"] // 8) for line in both} == {(24, True)}, "8 steps an epoch"
    data = FusionCaptionDataset({str(path): ratio for path, ratio in files.items()}, None, SEED)
    orders = set()
    for epoch in range(NUM_EPOCHS):
        data.set_epoch(epoch)
        expected = sorted(f"{name}-{row}" for name, row in data.schedule)
        assert sorted(one for line in both if line["epoch"] == epoch for one in line["ids"]) == expected
        orders.add(tuple(expected))
    assert len(orders) == NUM_EPOCHS, "every epoch draws other rows"
