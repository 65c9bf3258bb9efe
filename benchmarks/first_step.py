"""From the start of the process to the end of the first optimizer step: `make bench-start`.

A tiny model with the real vocabulary, 640x480 photos or texts, the real command line, and the defaults of a user:
nothing of ours is switched off, the proof before step 1 included (`tests/test_benchmarks.py` compares). Kinds of run
take turns, so that what else the machine does meets all of them. `--runs 5` gives the published figures.

| run | what it is |
|---|---|
| un-packed | plain `swift sft` |
| ms-swift's packing | its check for the flash-attn package lifted (samples then see each other) |
| ours, cold | this plugin, no length remembered |
| ours, warm | the same start again |
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.turns import HEADER, Limit, in_turns, row
from swift_vlpack.config import ENV_PREFIX
from swift_vlpack.host.launch import plugin_path
from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.images import photo
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
NUM_IMAGES = 200
UNPACKED, THEIRS, COLD, WARM = KINDS = ("un-packed", "ms-swift's packing", "ours, cold", "ours, warm")
UNCHECKED = """from swift.arguments import SftArguments
SftArguments._check_padding_free = lambda self: setattr(self, "padding_free", True)
"""
CACHES = ("MODELSCOPE_CACHE", "HF_DATASETS_CACHE")
"""Variables that are not the user's: folders of the benchmark's own, so that it finds and leaves nothing."""
MAX_MIB = 2_000
"""MiB that the main process may have held by the end of the first step."""


class Data(NamedTuple):
    """Rows to start with, which kinds start with them, and what our starts are compared with."""

    num_rows: int
    of: str
    kinds: Sequence[str]
    runs: int
    limits: Sequence[tuple[str, str, float]]
    """Which start of ours is to be no slower than which other one and so many seconds."""

    def __str__(self) -> str:
        return f"{self.num_rows:,} {self.of}"


LIKE_THEIRS = [(COLD, THEIRS, 0.0), (WARM, THEIRS, 0.0), (WARM, UNPACKED, 3.0)]
DATA = (
    Data(200, "photos", KINDS, 3, [(COLD, UNPACKED, 3.0), *LIKE_THEIRS]),
    Data(2_000, "photos", KINDS, 2, LIKE_THEIRS),
    Data(10_000, "photos", KINDS, 1, LIKE_THEIRS),
    Data(100_000, "photos", (UNPACKED, WARM), 1, [(WARM, UNPACKED, 4.0)]),
    Data(300_000, "texts", (UNPACKED, WARM), 1, [(WARM, UNPACKED, 4.0)]),
)


class Start(NamedTuple):
    """What a start took."""

    seconds: float
    peak_mib: float
    """The most that the main process held."""


def rows_of(data: Data, folder: Path) -> str:
    """A file of captions or texts; 200 photos stand for many."""
    rng = random.Random(0)
    files = [folder / f"{n}.jpg" for n in range(NUM_IMAGES)]
    if data.of == "photos" and not files[0].exists():
        for n in range(NUM_IMAGES):
            photo(folder, str(n), 640, 480, seed=n)
    said = ((n, sentence(rng, 5, 20), f"{n} {sentence(rng, 10, 60)}") for n in range(data.num_rows))
    rows = (
        image_row([str(files[n % NUM_IMAGES])], *words) if data.of == "photos" else text_row(*words)
        for n, *words in said
    )
    return write_jsonl(folder / f"{data.num_rows}_{data.of}.jsonl", rows)


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


def peak_mib(pid: int) -> float:
    """Return the most that a process has held."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def first_step(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Start:
    """Run `swift sft` until its first step is logged."""
    output = Path(flags["output_dir"])
    output.mkdir(parents=True)
    command = [sys.executable, "-m", "swift.cli.sft"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    start = time.perf_counter()
    log, peak = output / "logging.jsonl", 0.0
    with open(output / "printed.txt", "w") as printed:
        process = subprocess.Popen(command, env=dict(environ), stdout=printed, stderr=printed)
        try:
            while not (log.exists() and any("loss" in json.loads(line) for line in log.read_text().splitlines())):
                if process.poll() is not None and process.returncode:
                    raise SystemExit((output / "printed.txt").read_text()[-3000:])
                peak = max(peak, peak_mib(process.pid))
                time.sleep(0.05)
            return Start(time.perf_counter() - start, max(peak, peak_mib(process.pid)))
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(output, ignore_errors=True)


def measured(folder: Path, data: Data, runs: int, processes: int) -> dict[str, list[Start]]:
    """Let every kind start once a turn.

    What is not counted: a first start, which reads files for those after it, and, where none starts cold, one that
    fills the cache of lengths for the warm ones.
    """
    model, dataset = save_model(folder / "model", FAMILY), rows_of(data, folder)
    unchecked = folder / "unchecked.py"
    unchecked.write_text(UNCHECKED)
    lengths = folder / f"lengths_of_{data.num_rows}_{data.of}"

    def start(kind: str) -> Start:
        if kind == COLD:
            shutil.rmtree(lengths, ignore_errors=True)
        flags = flags_of(kind, model, dataset, folder / "output", unchecked, processes)
        return first_step(flags, environment(folder, lengths, os.environ))

    for kind in (UNPACKED,) if COLD in data.kinds else (UNPACKED, COLD):
        start(kind)
    return in_turns({kind: partial(start, kind) for kind in data.kinds}, runs)


def lines(data: Data, starts: Mapping[str, Sequence[Start]]) -> Iterator[str]:
    """Return the rows of the table: what ours are compared with, ours beside their limits, and memory."""
    seconds = {kind: [start.seconds for start in of_kind] for kind, of_kind in starts.items()}
    for kind in data.kinds:
        if kind in (UNPACKED, THEIRS):
            yield row(f"{data}: {kind}, s", seconds[kind])
    for ours, other, more in data.limits:
        limit = Limit(f"{other}{f' + {more:.0f} s' if more else ''}", [value + more for value in seconds[other]])
        yield row(f"{data}: {ours}, s", seconds[ours], limit)
    for kind, of_kind in starts.items():
        peaks = [start.peak_mib for start in of_kind]
        limit = Limit(f"{MAX_MIB:,} MiB", [MAX_MIB] * len(peaks)) if kind in (COLD, WARM) else None
        yield row(f"{data}: {kind}, MiB of the main process", peaks, limit)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", help="only these of the numbers of rows")
    parser.add_argument("--runs", type=int, help="turns of every number of rows; default: 3 to 1, the fewer the more")
    parser.add_argument("--processes", type=int, default=2, help="dataset_num_proc of all")
    options = parser.parse_args()
    # As an installer does; an editable install is compiled at every start where Python may not write bytecode.
    compileall.compile_dir(str(Path(plugin_path()).parents[1]), quiet=1)
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for data in DATA:
            if options.rows is None or data.num_rows in options.rows:
                starts = measured(Path(folder), data, options.runs or data.runs, options.processes)
                print("\n".join(lines(data, starts)), flush=True)


if __name__ == "__main__":
    main()
