"""The commands of ms-swift's `examples/train/cached_dataset`, whose `swift export` is ours; plain ms-swift trains.

`mcore.sh` and `dpo.sh`, which are of Megatron, are in `test_megatron.py`. Names of models and data are those of tiny
ones, and there are fewer processes. CPUs take float32 in place of bfloat16, and neither flash-attn nor the kernels of
Liger. `reranker.sh` has rows of candidates, which `swift export` exports.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.e2e.ranks import free_port
from tests.engines.launcher import PLUGIN, engine_variables
from tests.host.runs import SMALL_VOCABULARY, argv, log_lines
from tests.host.test_export import PLAIN, ours, rated

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("options")]
FAMILY = "qwen2_5_vl"
CLASSES = {"task_type": "seq_cls", "num_labels": 265, "problem_type": "single_label_classification"}
NO_FREEZING = {"freeze_llm": "false", "freeze_vit": "true", "freeze_aligner": "true"}
DOCUMENTS = {"truncation_strategy": "split", "max_length": 8192}
OF_ALL = {
    "torch_dtype": "float32", "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "packing": "true",
    "save_steps": 200, "logging_steps": 1, "warmup_ratio": 0.05, "dataloader_num_workers": 1, "dataset_num_proc": 2,
    "save_total_limit": 2, "save_only_model": "true", "attn_impl": "sdpa", "max_steps": -1, "num_train_epochs": 1,
    "eval_strategy": "steps", "save_strategy": "steps", "packing_length": 512,
}  # fmt: skip
"""Flags that all of them have; the last one is ours, by which few rows make packs for every rank."""


@dataclass(frozen=True)
class Example:
    """A script: flags of its export, its command, and flags of that, without those of `OF_ALL`."""

    rows: str
    export: dict[str, Any]
    train: dict[str, Any]
    command: str = "sft"


EXAMPLES = {
    "sft.sh": Example(
        "texts", {"dataset_num_proc": 2},
        {"tuner_type": "full", "num_train_epochs": 3, "learning_rate": 1e-5, "gradient_accumulation_steps": 4,
         "eval_steps": 200, "max_length": 8192, "deepspeed": "zero3"},
    ),
    "vlm.sh": Example(
        "photos", {"dataset_num_proc": 2},
        {"tuner_type": "full", "learning_rate": 1e-5, "gradient_accumulation_steps": 1, **NO_FREEZING,
         "eval_steps": 200, "max_length": 4096, "deepspeed": "zero2"},
    ),
    "pretrained.sh": Example(
        "documents", {"dataset_num_proc": 2, **DOCUMENTS, "use_chat_template": "false", "loss_scale": "all"},
        {"tuner_type": "full", **DOCUMENTS, "num_train_epochs": 3, "learning_rate": 1e-5,
         "gradient_accumulation_steps": 4, "eval_steps": 200, "deepspeed": "zero3"},
        command="pt",
    ),
    "seq_cls.sh": Example(
        "classes", {**CLASSES, "dataset_num_proc": 2},
        {"tuner_type": "lora", "load_from_cache_file": "true", "learning_rate": 1e-4, "lora_rank": 8, "lora_alpha": 32,
         "target_modules": "all-linear", "gradient_accumulation_steps": 2, **NO_FREEZING, "eval_steps": 200,
         "max_length": 4096, **CLASSES, "use_chat_template": "true"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of each kind, by name."""
    folder = tmp_path_factory.mktemp("rows")
    photos = mixed_rows(folder / "images", 40, largest=160)
    images = [row["images"] for row in photos if row.get("images")]
    made = {
        "texts": [text_row(f"question {n}", "word " * (n % 40 + 1)) for n in range(40)],
        "photos": photos,
        "documents": [text_row("", "word " * number) for number in (*range(20, 800, 40), 9000)],
        "classes": [rated(n, images[n % len(images)][:1] if n % 2 else ()) for n in range(40)],
    }
    return {name: write_jsonl(folder / f"{name}.jsonl", some) for name, some in made.items()}


@pytest.mark.parametrize("script", EXAMPLES)
def test_example_of_ms_swift_trains_from_our_export(script, rows, small_folder, text_folder, tmp_path):
    """EXPORT-4 EXPORT-8: the flags of the script, `--deepspeed` included, in a process without this package."""
    example = EXAMPLES[script]
    if example.rows in ("photos", "classes"):
        model = {"model": small_folder(FAMILY), "model_type": FAMILY, "template": FAMILY}
    else:
        model = {"model": text_folder, "model_type": "qwen2", "template": "qwen2_5"}
    given = {**model, "use_hf": "true", "dataset": rows[example.rows], "split_dataset_ratio": 0.2, **example.export}
    flags = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    folder, plain, out = tmp_path / "exported", tmp_path / "plain.py", tmp_path / "out"
    ours([*flags, "--torch_dtype", "float32"], folder, "--to_cached_dataset", "true")
    plain.write_text(PLAIN)
    flags = argv(
        model["model"], model["model_type"], out,
        **{**OF_ALL, **example.train, "template": model["template"], "cached_dataset": folder / "train",
           "cached_val_dataset": folder / "val", "external_plugins": [plain, SMALL_VOCABULARY, PLUGIN],
           "use_cpu": "true", **({"ddp_backend": "gloo"} if "deepspeed" in example.train else {})},
    )  # fmt: skip
    variables = engine_variables(example.train.get("deepspeed", "ddp")) | {"OMP_NUM_THREADS": "1"}
    if "deepspeed" in example.train:
        variables |= {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", "swift.cli.main", example.command, *flags], cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert set((tmp_path / "imported.txt").read_text().split()) == {"False"}
    losses = [line["loss"] for line in log_lines(out) if "loss" in line]
    assert len(losses) > 0
    assert all(loss > 0 for loss in losses)
