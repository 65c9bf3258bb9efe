"""Watch a long run: memory, descriptors and time a step have to stay as they are. `python -m benchmarks.long_run`.

Runs of a tiny model with two workers, packs planned and streamed, as a user starts them. Memory is read from outside.
Resident memory counts pages that processes share in each of them; private memory is a process's alone. A forked worker
shares the pages of its parent until one of both writes to them, so that private memory grows where nothing is leaked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.first_step import environment
from benchmarks.turns import HEADER, Limit, row
from swift_vlpack.host.launch import plugin_path
from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.host.runs import SMALL_VOCABULARY
from tests.images import photo
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
MODES: dict[str, dict[str, Any]] = {"planned": {}, "streamed": {"streaming": "true"}}
NUM_ROWS = 6_000
SECONDS_BETWEEN = 0.5
STEPS_BETWEEN = 20
MB_FLAT = 8
"""Megabytes that memory may grow from the second third of a run to the last: what an allocator holds varies by this."""


class Process(NamedTuple):
    """What a process, or several, hold and have used."""

    resident_mb: float = 0.0
    private_mb: float = 0.0
    num_descriptors: int = 0
    processor_seconds: float = 0.0


class Moment(NamedTuple):
    """A run as it was seen after so many steps."""

    step: int
    seconds: float
    main: Process
    workers: Process


def process(pid: int) -> Process:
    """Read what a process holds now."""
    folder = Path("/proc", str(pid))
    lines = [line.split() for line in (folder / "smaps_rollup").read_text().splitlines()[1:]]
    mb = {name.rstrip(":"): int(kb) / 1024 for name, kb, *_ in lines}
    times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Process(
        mb["Rss"],
        mb["Private_Clean"] + mb["Private_Dirty"],
        len(list((folder / "fd").iterdir())),
        sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
    )


def workers_of(pid: int) -> list[int]:
    """Find the dataloader workers of a process; torch names them."""
    children = Path("/proc", str(pid), "task", str(pid), "children").read_text().split()
    return [int(child) for child in children if Path("/proc", child, "comm").read_text() == "pt_data_worker\n"]


def step_of(log: Path) -> int:
    """Return the last step that is logged."""
    lines = log.read_text().splitlines() if log.exists() else []
    steps = [json.loads(line).get("global_step/max_steps") for line in lines[-3:]]
    return int([step for step in steps if step][-1].split("/")[0]) if any(steps) else 0


def rows_of(folder: Path, num_rows: int) -> str:
    """A file of short texts, every eighth with a small photo."""
    rng = random.Random(0)
    photos = [photo(folder, str(n), 56, 56, seed=n) for n in range(20)]
    said = [(sentence(rng, 2, 8), sentence(rng, 5, 40)) for _ in range(num_rows)]
    rows = (image_row([photos[n % 20]], *words) if n % 8 == 0 else text_row(*words) for n, words in enumerate(said))
    return write_jsonl(folder / "rows.jsonl", rows)


def command(mode: str, folder: Path, num_steps: int, **flags: Any) -> list[str]:
    """Return the command line of a run; where a flag is not given, ms-swift's default or ours holds."""
    model = save_model(folder / "model", FAMILY, is_small=True)
    dataset = str(folder / "rows.jsonl") if (folder / "rows.jsonl").exists() else rows_of(folder, NUM_ROWS)
    all_flags: dict[str, Any] = {
        "model": model, "model_type": FAMILY, "template": FAMILY, "dataset": dataset, "split_dataset_ratio": 0,
        "tuner_type": "full", "torch_dtype": "float32", "report_to": "none", "use_hf": "true", "check_model": "false",
        "save_strategy": "no", "add_version": "false", "max_length": 256, "max_steps": num_steps,
        "logging_steps": STEPS_BETWEEN, "gradient_accumulation_steps": 1, "dataloader_num_workers": 2,
        "packing": "true", "output_dir": folder / mode, **MODES[mode], **flags,
    }  # fmt: skip
    flat = [part for name, value in all_flags.items() for part in (f"--{name}", value)]
    plugins = ["--external_plugins", SMALL_VOCABULARY, plugin_path()]
    return [sys.executable, "-m", "swift.cli.sft", *map(str, flat + plugins)]


def watched(mode: str, folder: Path, num_steps: int) -> Iterator[Moment]:
    """Run it to its end, and look at it after every few steps."""
    log = folder / mode / "logging.jsonl"
    printed = folder / f"{mode}.txt"
    environ = {**environment(folder, folder / "lengths", os.environ), "OMP_NUM_THREADS": "1"}
    with open(printed, "w") as file:
        run = subprocess.Popen(command(mode, folder, num_steps), stdout=file, stderr=file, env=environ)
    seen = 0
    try:
        while run.poll() is None:
            time.sleep(SECONDS_BETWEEN)
            if (step := step_of(log)) > seen:
                try:
                    main, workers = process(run.pid), [process(pid) for pid in workers_of(run.pid)]
                except (OSError, ValueError):  # it ends
                    continue
                seen = step
                yield Moment(step, time.perf_counter(), main, Process(*map(sum, zip(*workers, strict=True))))
        if run.returncode:
            raise SystemExit(printed.read_text()[-3000:])
    finally:
        run.kill()
        run.wait()


def thirds(moments: Sequence[Moment], num_steps: int) -> list[list[Moment]]:
    """Share what was seen among the thirds of the run."""
    parts: list[list[Moment]] = [[], [], []]
    for moment in moments:
        if moment.workers.resident_mb:  # an epoch's workers may just end or begin
            parts[min(2, 3 * moment.step // num_steps)].append(moment)
    return parts


def median(moments: Sequence[Moment], who: str, what: str) -> float:
    """Return the median of a number of the main process or of the workers."""
    return statistics.median(getattr(getattr(moment, who), what) for moment in moments)


def milliseconds_a_step(moments: Sequence[Moment], who: str) -> float:
    """Return the processor time a step, of the main process or of the workers."""
    first, last = moments[0], moments[-1]
    seconds = getattr(last, who).processor_seconds - getattr(first, who).processor_seconds
    return 1000 * seconds / (last.step - first.step)


def lines(mode: str, parts: Sequence[Sequence[Moment]]) -> list[str]:
    """Return the rows of a run: the last third beside the second."""
    _, second, last = parts
    rows = []
    for who in ("main", "workers"):
        for what, name, slack in (
            ("resident_mb", "resident MB", MB_FLAT),
            ("private_mb", "private MB", MB_FLAT),
            ("num_descriptors", "descriptors", 1),
        ):
            value, limit = median(last, who, what), median(second, who, what) + slack
            rows.append(row(f"{mode}, {who}: {name}", [value], Limit(f"second third + {slack}", [limit])))
        value, limit = milliseconds_a_step(last, who), 1.1 * milliseconds_a_step(second, who)
        rows.append(row(f"{mode}, {who}: processor ms a step", [value], Limit("1.1 of the second third", [limit])))
    return rows


def course(moments: Sequence[Moment]) -> Iterator[str]:
    """Return what was seen at doubling steps, in which a jump shows."""
    at = 0
    for moment in moments:
        if moment.step >= at or moment is moments[-1]:
            at = 2 * moment.step
            held = [f"{who.resident_mb:.0f} ({who.private_mb:.0f})" for who in (moment.main, moment.workers)]
            yield f"| {moment.step:,} | {' | '.join(held)} | {moment.main.num_descriptors} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            moments = list(watched(mode, Path(folder), options.steps))
            print(f"\n{mode}: resident (private) MB\n\n| step | main | workers | descriptors |\n|---|---|---|---|")
            print("\n".join(course(moments)), flush=True)
            rows += lines(mode, thirds(moments, options.steps))
    print("\n".join(["", HEADER, *rows]))


if __name__ == "__main__":
    main()
