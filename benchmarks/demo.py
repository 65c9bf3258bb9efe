"""Train a small model on the same samples padded by ms-swift and packed by this plugin, and show both. No network.

`make demo` runs it. It writes a model, 300 samples and all runs into `demo_output/`. The layers of the model outweigh
its vocabulary, as those of a large model do: with a tiny model and a real vocabulary logits are nearly all that is
computed, and what is compared is how many of them each way makes.
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
from typing import Any, NamedTuple

from swift_vlpack.host.launch import plugin_path
from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.images import photo
from tests.tiny import build_config, build_processor, build_tokenizer

FAMILY = "qwen2_5_vl"
NUM_SAMPLES = 300
BATCH_SIZE = 4
CAPACITY = 1024
PADDED, SAME = f"padded, {BATCH_SIZE} in a batch", "packed, the same steps"
OUTPUT = Path("demo_output")
SMALL_VOCABULARY = Path(__file__).parent.parent / "tests" / "plugins" / "small_vocabulary.py"
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
}
VISION = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 256, "fullatt_block_indexes": [3]}
"""What is larger than in the models of the tests, whose layers compute next to nothing."""


class Run(NamedTuple):
    """What a run of ms-swift came to."""

    num_steps: int
    seconds: float
    """Of training, as ms-swift counts them."""
    seconds_in_all: float
    """Of the command: imports, model, lengths and the proof are in it."""
    printed: str
    losses: list[float]
    """Of every step."""


def build_model(folder: Path) -> tuple[Path, float]:
    """Write a model of 5 million parameters; how many of its numbers a token meets in layers for one in logits."""
    import torch
    import transformers

    known = build_config(FAMILY, is_small=True).to_dict()
    text = {name: value for name, value in known["text_config"].items() if name != "layer_types"}  # one a layer
    config = transformers.Qwen2_5_VLConfig(
        **{**known, "text_config": {**text, **TEXT}, "vision_config": {**known["vision_config"], **VISION}}
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    build_processor(build_tokenizer(FAMILY, is_small=True), FAMILY).save_pretrained(folder)
    layers = sum(parameter.numel() for parameter in model.model.language_model.layers.parameters())
    return folder, layers / model.lm_head.weight.numel()


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


def train(
    name: str, model: Path, dataset: str, batch_size: int = 1, accumulation: int = 1, **packing_options: str
) -> Run:
    """Train one epoch by the real command line, packed if there are packing options."""
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
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": "false",
        "output_dir": OUTPUT / name,
        "add_version": "false",
        "logging_steps": 1,
        "dataloader_num_workers": 0,
    }
    plugins = [SMALL_VOCABULARY, *([plugin_path()] if packing_options else [])]
    flags = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
    flags += ["--external_plugins", *map(str, plugins), *(["--packing", "true"] if packing_options else [])]
    # One thread for all: two threads of a small model on a busy machine mostly wait for each other.
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **{f"VLPACK_{name.upper()}": value for name, value in packing_options.items()},
    }
    start = time.perf_counter()
    command = [sys.executable, "-m", "swift.cli.main", "sft", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    in_all = time.perf_counter() - start
    text = done.stdout + done.stderr
    (OUTPUT / f"{name}.log").write_text(text)
    if done.returncode != 0:
        sys.exit(f"the {name} run failed; see {OUTPUT / name}.log\n{text[-2000:]}")
    lines = [json.loads(line) for line in (OUTPUT / name / "logging.jsonl").read_text().splitlines()]
    steps = max(int(line["global_step"]) for line in lines if "global_step" in line)
    seconds = next(float(line["train_runtime"]) for line in lines if "train_runtime" in line)
    return Run(steps, seconds, in_all, text, [line["loss"] for line in lines if "loss" in line])


def main() -> None:
    """Make, train four times, compare."""
    start = time.perf_counter()
    print(f"making a small {FAMILY} and {NUM_SAMPLES} samples in {OUTPUT}/ ...", flush=True)
    model, ratio = build_model(OUTPUT / "model")
    print(f"a token meets {ratio:.1f} weights of layers for one of the vocabulary", flush=True)
    dataset = write_jsonl(OUTPUT / "samples.jsonl", samples((OUTPUT / "images").absolute()))
    runs = {}
    for name, options in {
        PADDED: {"batch_size": BATCH_SIZE},
        "one sample in a batch": {"accumulation": BATCH_SIZE},
        SAME: {"batch_size": BATCH_SIZE, "packing_strategy": "exact", "packing_batch": "samples"},
        # Nothing is dropped, so that all runs train the same samples.
        "packed": {"packing_strategy": "exact", "packing_drop_last": "false"},
    }.items():
        print(f"training one epoch, {name} ...", flush=True)
        runs[name] = train(name.replace(",", "").replace(" ", "_"), model, dataset, **options)
    packed = runs["packed"]
    report = json.loads((OUTPUT / "packed" / "vlpack" / "epoch_0.json").read_text())
    print("\n" + re.search(r"isolation verified: .*", packed.printed)[0])
    print(re.search(r"plan of epoch 0: .*", packed.printed)[0])
    print(re.search(r"packing: epoch 0: .*", packed.printed)[0])
    print(f"{report['account']}\n")
    tokens = report["num_tokens"]
    print(f"{'':26}{'steps':>8}{'seconds':>10}{'tokens/s':>10}{'with start':>12}")
    for name, run in runs.items():
        rate = tokens / run.seconds
        print(f"{name:26}{run.num_steps:>8}{run.seconds:>10.1f}{rate:>10.0f}{run.seconds_in_all:>12.1f}")
    pairs = list(zip(runs[PADDED].losses, runs[SAME].losses, strict=True))
    gap = max(abs(padded - same) / padded for padded, same in pairs)
    print(f"\n{SAME}: its {len(pairs)} losses are those of the padded run within {gap:.1e} of them")
    print(f"it trains {runs[PADDED].seconds / runs[SAME].seconds:.2f} x the tokens a second of: {PADDED}")
    for name, run in runs.items():
        if name not in ("packed", SAME):
            print(f"packed trains {run.seconds / packed.seconds:.2f} x the tokens a second of: {name}")
    print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
