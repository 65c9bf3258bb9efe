"""The tutorial, block by block, as a reader types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, blocks, commands

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.fixture
def shell(tmp_path):
    """Run a command in the reader's folder; what it prints."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VLPACK_", "PYTHONPATH"))}
    # What `source .venv/bin/activate` and `export CHECKOUT=$PWD` of the page leave; what is installed is all there is.
    clean |= {"PATH": f"{Path(sys.executable).parent}:{clean['PATH']}", "CHECKOUT": str(ROOT), "OMP_NUM_THREADS": "1"}

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
    plan, pack, proof, report, lines = [block.text for block in blocks(PAGE, "text")]
    assert of_data(said["vlpack plan --config train.yaml"]) == of_data(plan)
    assert rows_of(said["vlpack inspect --config train.yaml --pack 0"]) == rows_of(pack)
    assert "isolation verified: max difference 0.0" in said["vlpack sft train.yaml"]
    assert said["python look.py"] == report
    for line in lines.splitlines():
        assert line in said["vlpack report output"]
    for line in ("plan of epoch 0: 12 packs", "packing: epoch 0: 12 packs"):
        assert line in proof
        assert line in said["vlpack sft train.yaml"]
    steps = [json.loads(line) for line in (tmp_path / "output" / "logging.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in (tmp_path / "resumed" / "logging.jsonl").read_text().splitlines()]
    losses = {line["global_step/max_steps"]: line["loss"] for line in steps if "loss" in line}
    resumed = {line["global_step/max_steps"]: line["loss"] for line in again if "loss" in line}
    assert resumed
    # But for the last place of fp32: libraries add up in another order where memory is aligned otherwise.
    assert resumed == pytest.approx({step: losses[step] for step in resumed}, abs=3e-6), "the very same losses"
    assert len(resumed) < len(losses)


def of_data(report):
    """The lines of a plan that follow from the data alone."""
    labels = ("data", "unreadable", "lengths", "rows", "packs", "fill", "lower", "steps", "left")
    return [line.rstrip() for line in report.splitlines() if line.startswith(labels)]


def rows_of(shown):
    """The samples of a pack: letter, id, tokens."""
    return re.findall(r"^ ([A-Z])\s+(train:\d+)\s+(\d+) ", shown, flags=re.M)
