"""Train a tiny model on the same samples padded by ms-swift and packed by this plugin, and show both. No network.

`make demo` runs it. It writes a model, 300 samples and both runs into `demo_output/`.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from swift_vlpack.launch import plugin_path
from tests.images import photo
from tests.rows import image_row, sentence, text_row, write_jsonl
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
NUM_SAMPLES = 300
BATCH_SIZE = 4
CAPACITY = 1024
OUTPUT = Path("demo_output")


def samples(folder: Path) -> list[dict[str, Any]]:
    """Captions, chats and a few scans: lengths from 30 to 400 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows = []
    for number in range(NUM_SAMPLES):
        kind = rng.choices(("caption", "chat", "scan"), weights=(60, 30, 10))[0]
        if kind == "chat":
            rows.append(text_row(sentence(rng, 3, 12), sentence(rng, 3, 30)))
        elif kind == "caption":
            path = photo(folder, f"photo{number}", rng.randint(90, 280), rng.randint(90, 280), seed=number)
            rows.append(image_row([path], "describe the picture", sentence(rng, 5, 30)))
        else:
            path = photo(folder, f"scan{number}", 392, rng.randint(392, 560), seed=number)
            rows.append(image_row([path], "read the page", sentence(rng, 30, 80)))
    return rows


def train(name: str, model: Path, dataset: str, *flags: str) -> tuple[float, str]:
    """One epoch by the real command line; the seconds of training, and what it printed."""
    options = {
        "model": model,
        "model_type": FAMILY,
        "template": FAMILY,
        "dataset": dataset,
        "split_dataset_ratio": 0,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "report_to": "none",
        "use_hf": "true",
        "check_model": "false",
        "save_strategy": "no",
        "max_length": CAPACITY,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "false",
        "output_dir": OUTPUT / name,
        "add_version": "false",
        "logging_steps": 10,
        "dataloader_num_workers": 0,
    }
    own = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
    command = [sys.executable, "-m", "swift.cli.main", "sft", *own, *flags]
    # One thread for both: two threads of a small model on a busy machine mostly wait for each other.
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLPACK_PACKING_STRATEGY": "exact",
        "VLPACK_PACKING_DROP_LAST": "false",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    text = done.stdout + done.stderr
    (OUTPUT / f"{name}.log").write_text(text)
    if done.returncode != 0:
        sys.exit(f"the {name} run failed; see {OUTPUT / name}.log\n{text[-2000:]}")
    return runtime(OUTPUT / name), text


def runtime(folder: Path) -> float:
    """Seconds that ms-swift says training took."""
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return float(next(line["train_runtime"] for line in lines if "train_runtime" in line))


def num_steps(folder: Path) -> int:
    """Optimizer steps of the run."""
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return int(max(line["global_step"] for line in lines if "global_step" in line))


def main() -> None:
    """Make, train, train, compare."""
    start = time.perf_counter()
    print(f"making a tiny {FAMILY} and {NUM_SAMPLES} samples in {OUTPUT}/ ...", flush=True)
    model = save_model(OUTPUT / "model", FAMILY)
    dataset = write_jsonl(OUTPUT / "samples.jsonl", samples((OUTPUT / "images").absolute()))
    print(f"training one epoch padded by ms-swift, per_device_train_batch_size {BATCH_SIZE} ...", flush=True)
    padded_seconds, _ = train("padded", model, dataset, "--per_device_train_batch_size", str(BATCH_SIZE))
    print("training one epoch packed by swift_vlpack ...", flush=True)
    packed_seconds, log = train("packed", model, dataset, "--external_plugins", str(plugin_path()), "--packing", "true")
    report = json.loads((OUTPUT / "packed" / "vlpack" / "epoch_0.json").read_text())
    print("\n" + re.search(r"isolation verified: .*", log)[0])
    print(re.search(r"plan of epoch 0: .*", log)[0])
    print(re.search(r"packing: epoch 0: .*", log)[0])
    print(f"{report['account']}\n")
    tokens = report["num_tokens"]
    print(f"{'':24}{'steps':>8}{'seconds':>10}{'tokens/s':>10}")
    for name, seconds in (("padded", padded_seconds), ("packed", packed_seconds)):
        print(f"{name:24}{num_steps(OUTPUT / name):>8}{seconds:>10.1f}{tokens / seconds:>10.0f}")
    print(f"\npacked trains {padded_seconds / packed_seconds:.2f} x the tokens a second")
    print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
