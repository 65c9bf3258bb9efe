"""Checkpoints of packed runs: they load where this package is not, and none goes before the next one is whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swift_vlpack.host.checkpoints import rotate
from swift_vlpack.host.launch import plugin_path
from swift_vlpack.host.state import FILE, StateNotSaved, save_state
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import packed_argv, train

FAMILY = "qwen3_vl"

WITHOUT_THE_PACKAGE = """
import json, os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "swift_vlpack":
            raise ModuleNotFoundError("swift_vlpack is not on this machine")

sys.meta_path.insert(0, Hidden())
from swift.pipelines import export_main, infer_main

lora, full, rows = sys.argv[1:]
common = ["--use_hf", "true"]
export_main(["--adapters", lora, "--merge_lora", "true", "--output_dir", lora + "-merged", *common])
for number, folder in enumerate((full, lora + "-merged")):
    answers = infer_main(
        ["--model", folder, "--val_dataset", rows, "--max_new_tokens", "2", "--result_path", f"{full}-{number}.jsonl",
         "--stream", "false", "--temperature", "0", *common]
    )
    assert len(answers) == 2, answers
import torch
torch.load(os.path.join(full, "training_args.bin"), weights_only=False)
print("plugin of the user:", sys.modules.get("marker_of_the_user"))
"""


@pytest.fixture(autouse=True)
def environment():
    packing_options(
        packing_strategy="exact", packing_drop_last="false", packing_max_samples="1", packing_verify="false"
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rows = [text_row(f"question {n}") for n in range(8)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def flags(folder_of, output, dataset, **options):
    usual = {"save_strategy": "steps", "save_steps": 1, "split_dataset_ratio": 0, "num_train_epochs": 1}
    return packed_argv(folder_of(FAMILY), FAMILY, output, dataset=dataset, **{**usual, **options})


@pytest.mark.slow
@pytest.mark.telling
def test_checkpoints_load_where_the_package_is_not(tiny_folder, texts, tmp_path):
    """TRAIN-10: adapters and full weights, by ms-swift's own export and infer; what else the user loaded stays."""
    plugin = tmp_path / "plugin_of_the_user.py"
    plugin.write_text("import sys\nsys.modules['marker_of_the_user'] = 'loaded'\n")
    for tuner, attn in (("lora", "sdpa"), ("full", "vlpack")):
        train(
            flags(
                tiny_folder, tmp_path / tuner, texts, max_steps=1, tuner_type=tuner, attn_impl=attn,
                external_plugins=[plugin_path(), plugin],
            )
        )  # fmt: skip
    sys.modules.pop("marker_of_the_user")
    checkpoints = [tmp_path / tuner / "checkpoint-1" for tuner in ("lora", "full")]
    two_rows = write_jsonl(tmp_path / "two.jsonl", [text_row("question 1"), text_row("question 2")])
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, *map(str, (*checkpoints, two_rows))],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "plugin of the user: loaded" in done.stdout
    for checkpoint in checkpoints:
        for path in (checkpoint.parent / "args.json", checkpoint / "args.json"):
            saved = json.loads(path.read_text())
            assert [Path(plugin).name for plugin in saved["external_plugins"]] == [plugin.name]
            assert (saved["packing"], saved["callbacks"]) == (True, [])
        named = [path.name for path in checkpoint.glob("*.json") if str(plugin_path()) in path.read_text()]
        assert named == []


def checkpoints(output):
    """Complete or not, by number."""
    return {int(path.name.split("-")[1]): (path / FILE).is_file() for path in output.glob("checkpoint-*")}


class Killed(BaseException):
    """Like a kill: nothing of ours catches it."""


def test_kill_before_the_state_is_written_leaves_the_checkpoint_before(small_folder, texts, tmp_path, monkeypatch):
    """RESUME-13: under `--save_total_limit 1`, with the run going on from what is left."""
    from swift_vlpack.host import trainer

    def killed_at_three(checkpoint, *args):
        if checkpoint.name == "checkpoint-3":
            raise Killed
        save_state(checkpoint, *args)

    output = tmp_path / "out"
    monkeypatch.setattr(trainer, "save_state", killed_at_three)
    monkeypatch.setenv("VLPACK_RECORD_PACKS", "true")
    few = {"save_total_limit": 1, "tuner_type": "lora"}
    with pytest.raises(Killed):
        train(flags(small_folder, output, texts, **few))
    assert checkpoints(output) == {2: True, 3: False}
    assert (output / "last-checkpoint").resolve() == output / "checkpoint-2"
    monkeypatch.setattr(trainer, "save_state", save_state)
    train(
        flags(small_folder, output, texts, **few, add_version="false", resume_from_checkpoint=output / "checkpoint-2")
    )
    assert checkpoints(output) == {8: True}
    lines = (output / "vlpack" / "packs_rank0.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in lines]
    assert sorted(pack["ids"][0] for pack in trained[:2] + trained[3:]) == sorted(f"rows:{n}" for n in range(8))


def test_state_that_cannot_be_written_costs_no_checkpoint(small_folder, texts, tmp_path, monkeypatch):
    """RESUME-9 RESUME-13"""
    from swift_vlpack.host import trainer

    def blocked_at_two(checkpoint, *args):
        if checkpoint.name == "checkpoint-2":
            (checkpoint / f".{FILE}.partial").mkdir()  # where the new file would be written
        save_state(checkpoint, *args)

    monkeypatch.setattr(trainer, "save_state", blocked_at_two)
    with pytest.raises(StateNotSaved, match=rf"checkpoint-2/{FILE} cannot be written.*resume from an earlier one"):
        train(flags(small_folder, tmp_path, texts, save_total_limit=1, tuner_type="lora"))
    assert checkpoints(tmp_path) == {1: True, 2: False}


@pytest.mark.slow
@pytest.mark.telling
def test_everything_is_on_the_disk_before_an_older_checkpoint_goes(small_folder, texts, tmp_path, monkeypatch):
    """RESUME-13: the best one stays as without packing, and what is saved does not show how it was kept."""
    events = []
    fsync, rmtree = os.fsync, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(Path(os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **keys: events.append(str(path)) or rmtree(path, **keys))
    train(
        flags(
            small_folder, tmp_path, texts, max_steps=3, save_total_limit=1, tuner_type="lora", val_dataset=texts,
            eval_strategy="steps", eval_steps=1, load_best_model_at_end="true", metric_for_best_model="loss",
            greater_is_better="true", learning_rate=1e-2,
        )
    )  # fmt: skip
    monkeypatch.undo()
    gone = events.index(str(tmp_path / "checkpoint-2"))
    before = [event for event in events[:gone] if isinstance(event, Path)]
    third = tmp_path / "checkpoint-3"
    state = before.index(third / f".{FILE}.partial")
    weights = [
        third / name for name in ("adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "args.json")
    ]
    assert max(map(before.index, [*weights, third, tmp_path])) < state
    assert third in before[state:], "the name of the state, too"
    assert checkpoints(tmp_path) == {1: True}, "the best one, as the trainer keeps it at the end"
    assert torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False).save_total_limit == 1


def made(folder, number, *, is_complete=True):
    checkpoint = folder / f"checkpoint-{number}"
    checkpoint.mkdir()
    if is_complete:
        (checkpoint / FILE).write_text("{}")
    os.utime(checkpoint, (0, 0))  # a file system that keeps no times
    return checkpoint


def test_rotation_takes_incomplete_ones_first_and_never_the_new_or_the_best(tmp_path):
    """RESUME-13"""
    for number in (2, 4, 6):
        made(tmp_path, number)
    made(tmp_path, 20, is_complete=False)  # of a run that was killed, before it was resumed from 4
    (tmp_path / "checkpoint-merged").mkdir()
    new = made(tmp_path, 8)
    (tmp_path / "last-checkpoint").symlink_to("checkpoint-8")
    rotate(new, 4, None)
    assert sorted(checkpoints_of(tmp_path)) == [2, 4, 6, 8]
    rotate(new, 2, str(tmp_path / "checkpoint-2"))
    assert sorted(checkpoints_of(tmp_path)) == [2, 8]
    rotate(new, 1, str(tmp_path / "checkpoint-2"))
    assert sorted(checkpoints_of(tmp_path)) == [2, 8], "the best and the newest, whatever the limit"
    for unlimited in (None, 0, -1):
        rotate(new, unlimited, None)
    assert sorted(checkpoints_of(tmp_path)) == [2, 8]
    assert (tmp_path / "checkpoint-merged").is_dir()


def checkpoints_of(folder):
    return [int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*[0-9]")]
