"""The tutorial, block by block, as a reader types it: its notebook is the page, and is run from the first cell on."""

import json
import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.doc_blocks import ROOT, blocks
from tests.tutorial_notebook import NOTEBOOK, PAGE, as_text

MINUTES = 60


def test_notebook_is_the_tutorial():
    """DOC-6"""
    assert NOTEBOOK.read_text(encoding="utf-8") == as_text(), "run `make docs-tables`"


def test_notebook_stores_nothing_of_the_machine_that_ran_it():
    """DOC-6"""
    book = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert str(Path.home()) not in NOTEBOOK.read_text(encoding="utf-8")
    assert str(ROOT) not in NOTEBOOK.read_text(encoding="utf-8")


@pytest.fixture
def said(tmp_path):
    """What every cell printed, by its text; and, under an empty text, the folder of the reader."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VLPACK_", "PYTHONPATH"))}
    clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    client = nbclient.NotebookClient(
        book, timeout=15 * MINUTES, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(env=clean)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    printed = {cell.source: "".join(output.get("text", "") for output in cell.outputs) for cell in code}
    return {"": printed[code[0].source].strip(), **printed}


@pytest.mark.slow
@pytest.mark.telling
def test_tutorial_runs_as_it_is_written(said):
    """DOC-1 DOC-6 TRAIN-3 CLI-6: data, plan, training, report, resume."""
    plan, pack, same, proof, report, lines = [block.text for block in blocks(PAGE, "text")]

    def printed(command):
        (text,) = [text for cell, text in said.items() if cell.startswith(f"%%bash -e\n{command}")]
        return text

    assert of_data(printed("vlpack plan --config train.yaml")) == of_data(plan)
    assert rows_of(printed("vlpack inspect --config train.yaml --pack 0")) == rows_of(pack)
    for line in same.splitlines():
        assert line in printed("sed '/packing_drop_last/d'")
    trained = said["%%bash -e\nvlpack sft train.yaml"]
    assert "isolation verified: max difference 0.0" in trained
    assert printed("python look.py").startswith(report)
    for line in lines.splitlines():
        assert line in printed("vlpack report output")
    for line in ("plan of epoch 0: 12 packs", "packing: epoch 0: 12 packs"):
        assert line in proof
        assert line in trained
    losses, resumed = (losses_of(Path(said[""]) / folder) for folder in ("output", "resumed"))
    assert resumed
    # But for the last place of fp32: libraries add up in another order where memory is aligned otherwise.
    assert resumed == pytest.approx({step: losses[step] for step in resumed}, abs=3e-6), "the very same losses"
    assert len(resumed) < len(losses)


def losses_of(folder):
    """The loss of every step that ms-swift logged."""
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return {line["global_step/max_steps"]: line["loss"] for line in lines if "loss" in line}


def of_data(report):
    """The lines of a plan that follow from the data alone."""
    labels = ("data", "unreadable", "lengths", "rows", "packs", "fill", "lower", "steps", "left")
    return [line.rstrip() for line in report.splitlines() if line.startswith(labels)]


def rows_of(shown):
    """The samples of a pack: letter, id, tokens."""
    return re.findall(r"^ ([A-Z])\s+(train:\d+)\s+(\d+) ", shown, flags=re.M)
