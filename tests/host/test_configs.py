"""Every file of configs/ trains as it is, but for a tiny model, a short run and data that is made here."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import yaml

from swift_vlpack.host.launch import plugin_path, train_launch
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.host.runs import epoch_report, train
from tests.images import photo
from tests.marks import telling
from tests.videos import video

FAMILY = "qwen2_5_vl"
CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted(path.name for path in CONFIGS.glob("*.yaml") if "model" in yaml.safe_load(path.read_text()))
QUICK = ("lora_frozen_vision.yaml",)
OF_RANKS = ("two_nodes.yaml", "zero2.yaml", "zero3.yaml", "fsdp2.yaml")
"""They need several ranks: in tests/e2e/test_nodes.py, and in tests/engines."""
SHORT = {
    "model_type": FAMILY,
    "template": FAMILY,
    "max_length": 640,
    "packing_length": 640,
    "max_steps": 2,
    "gradient_accumulation_steps": 1,
    "torch_dtype": "float32",
    "bf16": "false",
    "fp16": "false",
    "save_strategy": "no",
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": "false",
    "dataset_num_proc": 1,
    "report_to": "none",
    "use_hf": "true",
    "check_model": "false",
    "add_version": "false",
}


@pytest.fixture(scope="module")
def small_model(small_folder):
    return small_folder(FAMILY)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with configs/ and the data that they name."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copytree(CONFIGS, folder / "configs")
    plugin = folder / "swift_vlpack" / "plugin" / "vlpack.py"  # as the one for plain `swift sft` names it
    plugin.parent.mkdir(parents=True)
    shutil.copyfile(plugin_path(), plugin)
    data = folder / "data"
    data.mkdir()
    images = [photo(data, f"photo{n}", 80 + 20 * n, 120, seed=n) for n in range(5)]
    rows = {
        "captions": mixed_rows(data / "captions", 24, largest=160),
        "ocr": [image_row([images[n % 5]], "read this", "word " * (20 + 9 * n)) for n in range(8)],
        "questions": [image_row([images[n % 5]], f"question {n}?", "an answer") for n in range(20)],
        "chat": [text_row(f"question {n}", "word " * (5 * n + 3)) for n in range(16)],
        "grounding": [boxes(images[n % 5], n % 3 + 1) for n in range(24)],
        "video": [clip(data, n) for n in range(6)],
        "multi_image": [image_row(images[: n % 4 + 2], "compare these", "both show noise") for n in range(8)],
        "documents": [document(images[n % 5], n) for n in range(12)]
        + [document(images[0], 47)],  # the last is too long
    }
    for name, some in rows.items():
        write_jsonl(data / f"{name}.jsonl", some)
    return folder


def boxes(image, num_boxes):
    row = image_row([image], "find " + "<ref-object>" * num_boxes, "<bbox>" * num_boxes)
    return {
        **row,
        "objects": {"ref": ["the noise"] * num_boxes, "bbox": [[1, 2, 30 + n, 40] for n in range(num_boxes)]},
    }


def clip(folder, number):
    path = video(folder / f"clip{number}.mp4", 6 + 2 * number, 64, 48)
    return {**text_row("<video>what happens?", "noise moves " * (number + 1)), "videos": [path]}


def document(image, number):
    text = "words and more of them " * (3 * number + 1)
    row = {"messages": [{"role": "assistant", "content": text + ("<image>" if number % 2 else "")}]}
    return {**row, "images": [image]} if number % 2 else row


def arguments(name, **options):
    """The file and flags that shorten its run, as they are typed."""
    return [f"configs/{name}", *(part for key, value in options.items() for part in (f"--{key}", str(value)))]


def environment():
    """That of this process, without options of packing."""
    return {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}


def run(name, workplace, model, output, monkeypatch, **more):
    """Train in this process by what `vlpack` makes of the file and these flags."""
    monkeypatch.chdir(workplace)
    command = "pt" if name == "pretrain_documents.yaml" else "sft"
    options = {**SHORT, "model": model, "output_dir": output, **more}
    launch = train_launch(arguments(name, **options), environment(), command=command)
    for key, value in launch.environ.items():
        monkeypatch.setenv(key, value)
    return train(launch.command[2:], command)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else telling(name) for name in RUNS if name not in OF_RANKS],
)
def test_every_ready_config_trains_packed(name, workplace, small_model, tmp_path, monkeypatch, caplog):
    """DOC-4 TRAIN-3 CONF-2 DATA-3 ISO-5: proved, two steps, and an account that closes."""
    if name == "video.yaml":
        pytest.importorskip("decord", reason="has no wheel for this platform")
    with caplog.at_level(logging.INFO):
        result = train_of(name, workplace, small_model, tmp_path, monkeypatch)
    steps = [line for line in result["log_history"] if "loss" in line]
    assert len(steps) == 2
    assert all(0 < line["loss"] < 20 for line in steps)
    assert "isolation verified: max difference 0.0" in caplog.text
    report = epoch_report(tmp_path)
    assert report["num_samples"] > report["num_packs"], "samples share packs"
    assert set(report["num_dropped"]) <= {"underfilled", "too_short"}
    asked = yaml.safe_load((CONFIGS / name).read_text())
    trained = json.loads((tmp_path / "args.json").read_text())
    for key in ("tuner_type", "freeze_vit", "freeze_aligner", "truncation_strategy", "learning_rate", "lora_rank"):
        assert trained[key] == asked.get(key, trained[key])


def train_of(name, workplace, model, output, monkeypatch):
    more = {"eval_strategy": "no", "split_dataset_ratio": 0} if name == "lora_frozen_vision.yaml" else {}
    return run(name, workplace, model, output, monkeypatch, **more)
