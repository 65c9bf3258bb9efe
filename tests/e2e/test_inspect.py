"""`vlpack inspect` as a user starts it: a process of its own, by flags or an output directory."""

import json
import os
import subprocess
import sys

import pytest

from swift_vlpack.host.launch import plugin_path
from tests.data_rows import mixed_rows, write_jsonl
from tests.host.runs import SMALL_VOCABULARY, argv, train

FAMILY = "qwen2_5_vl"


def vlpack(*args):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLPACK_")}
    command = [sys.executable, "-m", "swift_vlpack", *map(str, args)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.telling
def test_inspect_from_the_command_line(small_folder, tmp_path):
    """SEE-1 SEE-3 SEE-8 SEE-15 CLI-12: text, JSON and a page; what libraries print is no part of them."""
    data = write_jsonl(tmp_path / "train.jsonl", mixed_rows(tmp_path / "images", 12, largest=120))
    output = tmp_path / "run"
    flags = argv(
        small_folder(FAMILY), FAMILY, output, dataset=data, packing="true",
        external_plugins=[plugin_path(), SMALL_VOCABULARY], split_dataset_ratio=0, num_train_epochs=1,
    )  # fmt: skip
    done = vlpack("inspect", *flags, "--packing_strategy", "exact")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("epoch 0: ")
    noise = ("trust_remote_code", "FutureWarning", "torch_dtype", "Map (num_proc")
    assert [word for word in noise if word in done.stderr] == [], "SEE-15"
    assert "\x1b" not in done.stdout
    assert not output.exists()
    os.environ.update({"VLPACK_PACKING_STRATEGY": "exact", "VLPACK_PACKING_VERIFY": "false"})
    train(flags)
    seen = json.loads(vlpack("inspect", "--run", output, "--step", 1, "--json").stdout)
    assert seen["steps"][0]["loss"] > 0
    planned = json.loads(vlpack("inspect", *flags, "--packing_strategy", "exact", "--step", 1, "--json").stdout)
    assert [pack["ids"] for pack in seen["steps"][0]["packs"]] == [
        [member["id"] for member in pack["members"]] for pack in planned["packs"]
    ]
    done = vlpack("inspect", *flags, "--html", tmp_path / "packs.html")
    assert (tmp_path / "packs.html").read_text().startswith("<!doctype html>"), done.stderr[-2000:]
    assert done.stdout.startswith(f"{tmp_path / 'packs.html'}: ")
    loud = vlpack("inspect", *flags, "--html", tmp_path / "packs.html", "--verbose")
    assert "trust_remote_code" in loud.stderr
    wrong = vlpack("inspect", *flags, "--pack", 999)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].startswith("vlpack inspect: --pack 999: epoch 0 has ")
