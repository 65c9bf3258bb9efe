"""The tutorial, block by block, as a reader types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, blocks, commands

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.fixture
def shell(tmp_path):
    """Run a command in the reader's folder; what it prints."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    clean |= {"PATH": f"{Path(sys.executable).parent}:{clean['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(command):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
@pytest.mark.telling
def test_tutorial_runs_as_it_is_written(shell, tmp_path):
    """DOC-1 TRAIN-3 CLI-6: data, plan, training, report, resume."""
    said = {}
    for block in blocks(PAGE):
        if block.name:
            (tmp_path / block.name).write_text(block.text)
        elif block.mark == "run in order":
            said |= {command: shell(command) for command in commands(block)}
    plan, train, report, _, resume = [said[command] for command in said if command not in SETUP]
    shown = [block.text for block in blocks(PAGE, "text")]
    assert [line for line in plan.splitlines() if line.startswith(SAME)] == [
        line for line in shown[0].splitlines() if line.startswith(SAME)
    ]
    assert "isolation verified: max difference 0.0" in train
    assert report.strip() == shown[2].strip()
    steps = [json.loads(line) for line in (tmp_path / "output" / "logging.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in (tmp_path / "resumed" / "logging.jsonl").read_text().splitlines()]
    losses = {line["global_step/max_steps"]: line["loss"] for line in steps if "loss" in line}
    resumed = {line["global_step/max_steps"]: line["loss"] for line in again if "loss" in line}
    assert resumed, resume
    assert resumed == {step: losses[step] for step in resumed}, "the very same losses"
    assert len(resumed) < len(losses)


SETUP = ("python make_data.py", "python -m tests.tiny tiny_model")
SAME = ("data", "unreadable", "lengths", "rows", "packs", "fill", "lower", "steps", "left")
