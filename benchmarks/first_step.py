"""From the start of the process to the end of the first optimizer step: `python -m benchmarks.first_step`.

A tiny model, 640x480 photos, the real command line. ms-swift packs too, its check for the flash-attn package lifted
(samples then see each other, which takes as long). Ours runs with a cold cache of lengths, then with a warm one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swift_vlpack.launch import plugin_path
from tests.images import photo
from tests.rows import image_row, sentence, write_jsonl
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
NUM_IMAGES = 200
UNCHECKED = """from swift.arguments import SftArguments
SftArguments._check_padding_free = lambda self: setattr(self, "padding_free", True)
"""


def rows_of(num_rows: int, folder: Path) -> str:
    """A file of captions; 200 photos stand for many."""
    rng = random.Random(0)
    files = [str(folder / f"{n}.jpg") for n in range(NUM_IMAGES)]
    if not Path(files[0]).exists():
        files = [photo(folder, str(n), 640, 480, seed=n) for n in range(NUM_IMAGES)]
    rows = (
        image_row([files[n % NUM_IMAGES]], sentence(rng, 5, 20), f"{n} {sentence(rng, 10, 60)}")
        for n in range(num_rows)
    )
    return write_jsonl(folder / f"rows_{num_rows}.jsonl", rows)


def seconds_to_first_step(
    model: Path, dataset: str, plugin: Path, num_processes: int, environ: dict[str, str]
) -> float:
    """Run `swift sft` for one step and take the time at which it is logged."""
    output = Path(tempfile.mkdtemp(prefix="vlpack-"))
    options: dict[str, Any] = {
        "model": model, "model_type": FAMILY, "template": FAMILY, "dataset": dataset, "split_dataset_ratio": 0,
        "tuner_type": "full", "torch_dtype": "float32", "report_to": "none", "use_hf": "true", "check_model": "false",
        "save_strategy": "no", "add_version": "false", "max_length": 2048, "packing": "true", "attn_impl": "sdpa",
        "external_plugins": plugin, "max_steps": 1, "logging_steps": 1, "gradient_accumulation_steps": 1,
        "dataloader_num_workers": 1, "dataset_num_proc": num_processes, "output_dir": output,
    }  # fmt: skip
    command = [sys.executable, "-m", "swift.cli.sft"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    start = time.perf_counter()
    log = output / "logging.jsonl"
    with open(output / "printed.txt", "w") as printed:
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=printed, stderr=printed)
        try:
            while not (log.exists() and any("loss" in json.loads(line) for line in log.read_text().splitlines())):
                if process.poll() is not None and process.returncode:
                    raise SystemExit((output / "printed.txt").read_text()[-3000:])
                time.sleep(0.05)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(output, ignore_errors=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 1_000, 4_000, 10_000])
    parser.add_argument("--only_ours", type=int, nargs="*", default=[100_000], help="more rows, without ms-swift")
    parser.add_argument("--processes", type=int, default=2, help="dataset_num_proc of both")
    options = parser.parse_args()
    print("| rows | ms-swift, s | ours, cold, s | ours, warm, s | warm: x as fast |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unchecked = folder / "unchecked.py"
        unchecked.write_text(UNCHECKED)
        model = save_model(folder / "model", FAMILY)
        environ = {"MODELSCOPE_CACHE": str(folder / "cache"), "VLPACK_PACKING_VERIFY": "false"}
        for num_rows in [*options.rows, *options.only_ours]:
            dataset = rows_of(num_rows, folder)
            run = [model, dataset, plugin_path(), options.processes, environ]
            theirs = None
            if num_rows in options.rows:
                theirs = seconds_to_first_step(model, dataset, unchecked, options.processes, environ)
            cold, warm = seconds_to_first_step(*run), seconds_to_first_step(*run)
            shown = ("-", "-") if theirs is None else (f"{theirs:.1f}", f"{theirs / warm:.1f}")
            print(f"| {num_rows:,} | {shown[0]} | {cold:.1f} | {warm:.1f} | {shown[1]} |", flush=True)


if __name__ == "__main__":
    main()
