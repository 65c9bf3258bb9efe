"""The public door: what editors and type checkers see, and what a shell shows of its objects."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import swift_vlpack
from swift_vlpack import Item, Packer, PackingConfig, plan
from swift_vlpack.errors import ConfigError, DataError

SOURCE = Path(swift_vlpack.__file__)
CONFIG = PackingConfig(packing_length=8, packing_strategy="exact")


def test_checkers_and_shells_see_every_public_name():
    """OWN-11: also those that are loaded when they are first asked for; looking loads nothing."""
    (block,) = (line for line in ast.parse(SOURCE.read_text()).body if isinstance(line, ast.If))
    declared = {alias.name: line.module for line in block.body for alias in line.names}
    assert declared == swift_vlpack._NEED_TORCH
    code = "import sys, swift_vlpack as v; print(set(v.__all__) <= set(dir(v)), 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True False\n"


@pytest.mark.slow
@pytest.mark.telling
def test_type_checker_knows_the_types(tmp_path):
    """OWN-11"""
    code = (
        "import swift_vlpack as v\nreveal_type(v.PackingDataset)\nreveal_type(v.Collator)\nreveal_type(v.prove)\n"
        "reveal_type(v.RowSource(name='a', rows=[]).ratio)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--follow-imports", "silent", "-c", code]
    environ = {**os.environ, "MYPYPATH": str(SOURCE.parent.parent)}
    said = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False).stdout
    shown = [line.partition("Revealed type is ")[2] for line in said.splitlines() if "Revealed" in line]
    assert len(shown) == 4, said
    assert "PlannedPackingDataset" in shown[0]
    assert "Collator" in shown[1]
    assert "float" in shown[3]
    assert not [line for line in shown if line == '"Any"']


def test_objects_say_in_a_line_what_they_are():
    """OWN-12"""
    from swift_vlpack import LengthIndex, RowSource
    from swift_vlpack.rows.sizes import RowSize

    made = plan([5, 3, 8], CONFIG)
    packer = Packer(CONFIG)
    packer.push(Item("a", 3))
    sizes = LengthIndex.of([RowSize(length=5), RowSize(length=3)])
    shown = [
        repr(one) for one in (made, packer, sizes, RowSource(name="chat", rows=[{"a": "x" * 999}] * 2, sizes=sizes))
    ]
    assert shown == [
        "<Plan: 2 packs of 8 tokens by exact, 3 items, mean fill 100.0%>",
        "<Packer by exact, packs of 8 tokens: 1 item pushed, 1 held, 0 packed>",
        "<LengthIndex: 2 rows, 8 tokens>",
        "<RowSource chat: 2 rows, ratio 1>",
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", Path("rows.jsonl")])
def test_name_of_a_file_is_no_data_set(name):
    """OWN-13: its letters would be the rows."""
    from swift_vlpack import PackingDataset

    with pytest.raises(DataError, match=r"takes rows, not the name of a file; read 'rows.jsonl' first: \[json.loads"):
        PackingDataset(name, template=None, config=CONFIG)


def test_wrong_arguments_are_named():
    """OWN-13: a number for the options, no template, an option that there is not, and an empty file of texts."""
    from swift_vlpack import PackingDataset

    with pytest.raises(ConfigError, match=r"are a PackingConfig, got 10; give PackingConfig\(packing_length=10\)"):
        plan([3], 10)
    for take in (Packer, lambda config: PackingDataset([], None, config)):
        with pytest.raises(ConfigError, match="are a PackingConfig, got None"):
            take(None)
    with pytest.raises(ConfigError, match="data:0 is no encoded sample, as it has no input_ids: give PackingDataset a"):
        PackingDataset([{"messages": []}], None, CONFIG)
    with pytest.raises(ConfigError, match="planned packs have no option num_epoch; did you mean num_epochs"):
        PackingDataset([{"messages": []}], None, CONFIG, num_epoch=3)


def test_text_file_without_a_byte_is_named(tmp_path):
    """TEXT-29"""
    from swift_vlpack.text import TextStream

    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"there is no document in .*empty\.txt: the file is empty"):
        TextStream(tmp_path / "empty.txt", tokenizer="byte", seq_len=4)
