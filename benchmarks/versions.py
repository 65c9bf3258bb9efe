"""Two versions of this package side by side: `python -m benchmarks.versions FOLDER_OF_THE_OTHER`.

Start-up, planning and memory, each in a process of its own, in turns, so that what else the machine does meets both.
What counts are processor seconds of the process and those it waited for, and the most memory that one of them held.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.first_step import FAMILY, rows_of
from tests.tiny import save_model

HERE = Path(__file__).parent.parent
PLAN = """
import numpy as np
from swift_vlpack import PackingConfig, plan
rng = np.random.default_rng(0)
lengths = rng.lognormal(5.5, 0.9, size={num_samples}).astype(np.int64).clip(20, 8000)
made = plan(lengths, PackingConfig(packing_length=8192, packing_strategy={strategy!r})).align(8)
assert made.num_packs_per_rank
"""
# Linux counts what the parent holds when it forks into the peak of the child, so a small process is the parent.
LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Cost(NamedTuple):
    """What a process took."""

    seconds: float
    """Of the processor."""
    megabytes: float
    """At the peak, of the largest process."""


def cost_of(command: list[str], tree: Path, environ: dict[str, str]) -> Cost:
    """Run it on the package of that folder."""
    variables = {**os.environ, **environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    done = subprocess.run(launcher, env=variables, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    seconds, kilobytes = done.stdout.split()[-2:]
    return Cost(float(seconds), float(kilobytes) / 1024)


def commands(model: Path, dataset: str, output: Path) -> dict[str, list[str]]:
    """What is compared; lengths are cold the first time and warm in the row after it."""
    run = [
        *("--model", model, "--model_type", FAMILY, "--template", FAMILY, "--dataset", dataset),
        *("--split_dataset_ratio", 0, "--torch_dtype", "float32", "--report_to", "none", "--use_hf", "true"),
        *("--check_model", "false", "--max_length", 2048, "--gradient_accumulation_steps", 1),
        *("--dataset_num_proc", 1, "--num_train_epochs", 3),
    ]
    train = ["--tuner_type", "full", "--save_strategy", "no", "--add_version", "false", "--max_steps", 1]
    train += ["--output_dir", output, "--dataloader_num_workers", 1]
    vlpack = [sys.executable, "-m", "swift_vlpack"]
    plan = [*vlpack, "plan", *map(str, run), "--failures", str(output.parent / "failures.jsonl")]
    return {
        "import of the command": [sys.executable, "-c", "import swift_vlpack.cli"],
        "1,000,000 samples by exact": [sys.executable, "-c", PLAN.format(num_samples=1_000_000, strategy="exact")],
        "1,000,000 samples by best_fit": [
            *(sys.executable, "-c"),
            PLAN.format(num_samples=1_000_000, strategy="best_fit"),
        ],
        "`vlpack plan`, lengths cold": plan,
        "`vlpack plan`, lengths warm": plan,
        "`vlpack sft`, one step, warm": [*vlpack, "sft", *map(str, run), *map(str, train)],
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of the other version")
    parser.add_argument("--rows", type=int, default=10_000, help="of one photo each")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trees = {"this": HERE, "other": options.other.absolute()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, dataset = save_model(folder / "model", FAMILY, is_small=True), rows_of(options.rows, folder)
        found: dict[tuple[str, str], list[Cost]] = {}
        for _ in range(options.rounds):
            for name in trees:
                shutil.rmtree(folder / f"cache-{name}", ignore_errors=True)
            for what, command in commands(model, dataset, folder / "output").items():
                for name, tree in trees.items():
                    cost = cost_of(command, tree, {"MODELSCOPE_CACHE": str(folder / f"cache-{name}")})
                    found.setdefault((what, name), []).append(cost)
        print("| | seconds: this | the other | ratio | MB: this | the other | ratio |")
        print("|---|---|---|---|---|---|---|")
        for what in commands(model, dataset, folder):
            print(f"| {what} | " + " | ".join(_columns(found[what, "this"], found[what, "other"])) + " |", flush=True)


def _columns(this: list[Cost], other: list[Cost]) -> list[str]:
    shown = []
    for unit, form in (("seconds", ".2f"), ("megabytes", ".0f")):
        a, b = (median(getattr(cost, unit) for cost in costs) for costs in (this, other))
        shown += [format(a, form), format(b, form), f"{a / b:.2f}"]
    return shown


if __name__ == "__main__":
    main()
