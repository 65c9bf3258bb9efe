"""The real command line, in a subprocess."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from swift_vlpack.host.launch import plugin_path
from tests.data_rows import mixed_rows, write_jsonl
from tests.host.runs import argv, epoch_report, log_lines

FAMILY = "qwen2_5_vl"
BIN = Path(sys.executable).parent
PROOF = r"isolation verified: max difference 0\.0 over \d samples, attention vlpack"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "captions.jsonl", mixed_rows(folder, 16, largest=160))


def run(command, **environ):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    done = subprocess.run(command, capture_output=True, text=True, env={**clean, **environ}, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def options(folder, output, **more):
    """Flags as a mapping, for a YAML file."""
    flags = argv(folder, FAMILY, output, **more)
    return {flags[i][2:]: flags[i + 1] for i in range(0, len(flags), 2)}


@pytest.mark.slow
@pytest.mark.telling
def test_swift_sft_with_the_plugin_from_flags(tiny_folder, dataset, tmp_path):
    """TRAIN-3 TRAIN-7 TRAIN-8 ISO-5"""
    flags = argv(tiny_folder(FAMILY), FAMILY, tmp_path, dataset=dataset, num_train_epochs=1, report_to="tensorboard")
    out = run(
        [BIN / "swift", "sft", "--external_plugins", plugin_path(), "--packing", "true", *flags],
        VLPACK_PACKING_STRATEGY="exact",
        VLPACK_PACKING_DROP_LAST="false",
    )
    assert re.search(PROOF, out)
    assert re.search(r"packing: epoch 0: \d+ packs, 16 samples", out)
    report = epoch_report(tmp_path)
    steps = [line for line in log_lines(tmp_path) if "loss" in line]
    assert len(steps) == report["num_packs"]
    shown = {f"pack/{name}" for name in ("fill", "samples", "images", "padding_saved", "vision_share")}
    assert shown <= set(steps[0])
    assert {f"train/{name}" for name in shown} <= tensorboard_tags(tmp_path)


def tensorboard_tags(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = set()
    for path in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path))
        events.Reload()
        tags |= set(events.Tags()["scalars"])
    return tags


@pytest.mark.slow
@pytest.mark.telling
def test_swift_sft_from_yaml_with_its_env_block(tiny_folder, dataset, tmp_path):
    """TRAIN-3"""
    content = {
        **options(tiny_folder(FAMILY), str(tmp_path / "out"), dataset=dataset, num_train_epochs=1),
        "external_plugins": [str(plugin_path())],
        "packing": True,
        "ENV": {
            "VLPACK_PACKING_STRATEGY": "best_fit",
            "VLPACK_PACKING_MAX_SAMPLES": 2,
            "VLPACK_PACKING_DROP_LAST": False,
        },
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(content, default=str))))
    out = run([BIN / "swift", "sft", tmp_path / "train.yaml"])
    assert re.search(PROOF, out)
    report = epoch_report(tmp_path / "out")
    assert report["num_samples"] == 16
    assert report["num_packs"] == 8, "two samples a pack"


@pytest.mark.slow
@pytest.mark.telling
def test_spawned_workers_train_packed(tiny_folder, dataset, tmp_path):
    """DATA-9"""
    flags = argv(
        tiny_folder(FAMILY), FAMILY, tmp_path, dataset=dataset, num_train_epochs=2, dataloader_num_workers=1,
        dataloader_persistent_workers="true", dataloader_multiprocessing_context="spawn",
    )  # fmt: skip
    out = run(
        [BIN / "swift", "sft", "--external_plugins", plugin_path(), "--packing", "true", *flags],
        VLPACK_PACKING_STRATEGY="exact", VLPACK_PACKING_DROP_LAST="false", VLPACK_PACKING_VERIFY="false",
    )  # fmt: skip
    assert "epoch 1:" in out
    assert [epoch_report(tmp_path, epoch)["num_samples"] for epoch in (0, 1)] == [16, 16]


@pytest.mark.slow
@pytest.mark.telling
def test_mistake_in_an_option_is_clear_at_the_end_of_the_output(tiny_folder, dataset, tmp_path):
    """TRAIN-5 CLI-12: in plain `swift sft` too."""
    flags = argv(tiny_folder(FAMILY), FAMILY, tmp_path, dataset=dataset)
    command = [BIN / "swift", "sft", "--external_plugins", plugin_path(), "--packing", "true", *flags]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**clean, "VLPACK_PACKING_STRATEGY": "magic"}, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("swift_vlpack: packing_strategy must be one of")
    assert "Traceback" not in done.stdout + done.stderr
