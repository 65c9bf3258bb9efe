"""Checkpoints of packed runs: they load where this package is not, and none goes before the next one is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_vlpack.launch import plugin_path
from tests.host.runs import packed_argv, train
from tests.rows import text_row, write_jsonl

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
def environment(monkeypatch):
    for key in [key for key in os.environ if key.startswith("VLPACK_")]:
        monkeypatch.delenv(key)
    for name, value in {"strategy": "exact", "drop_last": "false", "max_samples": "1", "verify": "false"}.items():
        monkeypatch.setenv(f"VLPACK_PACKING_{name.upper()}", value)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rows = [text_row(f"question {n}") for n in range(8)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def flags(tiny_folder, output, dataset, **options):
    usual = {"save_strategy": "steps", "save_steps": 1, "split_dataset_ratio": 0, "num_train_epochs": 1}
    return packed_argv(tiny_folder(FAMILY), FAMILY, output, dataset=dataset, **{**usual, **options})


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
