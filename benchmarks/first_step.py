"""From the start of the process to the end of the first optimizer step: `python -m benchmarks.first_step`.

A tiny model with the real vocabulary, 640x480 photos, the real command line, and the defaults of a user: nothing of
ours is switched off, the proof before step 1 included (`tests/test_benchmarks.py` compares). Kinds of run take turns,
so that what else the machine does meets all of them; a cell is the median, the least and the most of `--runs` turns.

| run | what it is |
|---|---|
| un-packed | plain `swift sft` |
| ms-swift | its own packing, its check for the flash-attn package lifted (samples then see each other) |
| ours, cold | this plugin, no length remembered |
| ours, warm | the same start again |
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.config import ENV_PREFIX
from swift_vlpack.host.launch import plugin_path
from tests.data_rows import image_row, sentence, write_jsonl
from tests.images import photo
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
NUM_IMAGES = 200
UNPACKED, THEIRS, COLD, WARM = KINDS = ("un-packed", "ms-swift", "ours, cold", "ours, warm")
UNCHECKED = """from swift.arguments import SftArguments
SftArguments._check_padding_free = lambda self: setattr(self, "padding_free", True)
"""
CACHES = ("MODELSCOPE_CACHE", "HF_DATASETS_CACHE")
"""Variables that are not the user's: folders of the benchmark's own, so that it finds and leaves nothing."""


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


def environment(folder: Path, lengths: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment, without options of ours, with caches in folders of the benchmark."""
    plain = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    return {**plain, **dict(zip(CACHES, (str(lengths), str(folder / "datasets")), strict=True))}


def flags_of(kind: str, model: Path, dataset: str, output: Path, unchecked: Path, num_processes: int) -> dict[str, Any]:
    """Return the flags of a run; where one is not given, ms-swift's default or ours holds."""
    flags: dict[str, Any] = {
        "model": model, "model_type": FAMILY, "template": FAMILY, "dataset": dataset, "split_dataset_ratio": 0,
        "tuner_type": "full", "torch_dtype": "float32", "report_to": "none", "use_hf": "true", "check_model": "false",
        "save_strategy": "no", "add_version": "false", "max_length": 2048, "max_steps": 1, "logging_steps": 1,
        "gradient_accumulation_steps": 1, "dataset_num_proc": num_processes, "output_dir": output,
    }  # fmt: skip
    if kind != UNPACKED:
        flags |= {"external_plugins": unchecked if kind == THEIRS else plugin_path(), "packing": "true"}
    return flags


def seconds_to_first_step(flags: Mapping[str, Any], environ: Mapping[str, str]) -> float:
    """Run `swift sft` and take the time at which its first step is logged."""
    output = Path(flags["output_dir"])
    output.mkdir(parents=True)
    command = [sys.executable, "-m", "swift.cli.sft"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    start = time.perf_counter()
    log = output / "logging.jsonl"
    with open(output / "printed.txt", "w") as printed:
        process = subprocess.Popen(command, env=dict(environ), stdout=printed, stderr=printed)
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


def in_turns(folder: Path, num_rows: int, kinds: Sequence[str], runs: int, processes: int) -> dict[str, list[float]]:
    """Measure every kind once a round; the first run of all is not counted, it reads files for those after it."""
    model, dataset = save_model(folder / "model", FAMILY), rows_of(num_rows, folder)
    unchecked = folder / "unchecked.py"
    unchecked.write_text(UNCHECKED)
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    for at in range(-1, runs):
        lengths = folder / f"lengths_{num_rows}_{at}"  # new in every round, so that cold is cold
        for kind in kinds if at >= 0 else (UNPACKED,):
            flags = flags_of(kind, model, dataset, folder / "output", unchecked, processes)
            seconds = seconds_to_first_step(flags, environment(folder, lengths, os.environ))
            if at >= 0:
                took[kind].append(seconds)
    return took


def cell(seconds: Sequence[float]) -> str:
    """Return the median, and the least and the most.

    >>> cell([7.25, 6.0, 9.5]), cell([])
    ('7.2 (6.0-9.5)', '-')
    """
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"


def ratio(of: Sequence[float], to: Sequence[float]) -> str:
    """Return how many times as long the median of one takes as that of the other."""
    return f"{statistics.median(of) / statistics.median(to):.2f}" if of and to else "-"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[200, 2_000, 10_000])
    parser.add_argument("--without_theirs", type=int, nargs="*", default=[100_000], help="more, without its packing")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="dataset_num_proc of all")
    options = parser.parse_args()
    print(f"| rows | {' | '.join(f'{kind}, s' for kind in KINDS)} | cold / ms-swift | warm / ms-swift |")
    print("|---" * (len(KINDS) + 3) + "|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for num_rows in [*options.rows, *options.without_theirs]:
            kinds = [kind for kind in KINDS if kind != THEIRS or num_rows in options.rows]
            took = in_turns(folder, num_rows, kinds, options.runs, options.processes)
            theirs = took.get(THEIRS, [])
            cells = [f"{num_rows:,}", *(cell(took.get(kind, [])) for kind in KINDS)]
            print("| " + " | ".join([*cells, ratio(took[COLD], theirs), ratio(took[WARM], theirs)]) + " |", flush=True)


if __name__ == "__main__":
    main()
