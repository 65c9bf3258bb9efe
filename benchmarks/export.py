"""`vlpack export` beside ms-swift's own export of the same rows: `python -m benchmarks.export`.

Both are started as a user starts them, in processes of their own, with empty caches and the same `dataset_num_proc`; a
start of Python and all imports are in the time. They take turns, and what they write is compared: columns, rows and
lengths are equal, or there is no figure. A tiny model with the real vocabulary; few files of photographs stand for
many, as decoding one again takes as long.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from datasets import load_from_disk

from benchmarks.turns import HEADER, Limit, in_turns, row
from swift_vlpack.config import ENV_PREFIX
from tests.data_rows import image_row, sentence, write_jsonl
from tests.images import photo
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
NUM_IMAGES = 200
THEIRS, OURS, CHECKED = "swift export", "vlpack export", "vlpack export --check_pixels"
LEAST = 5.0
"""How many times as fast ours is to be."""
COMMANDS = {
    THEIRS: ["swift.cli.export", "--to_cached_dataset", "true", "--output_dir"],
    OURS: ["swift_vlpack", "export", "--output"],
    CHECKED: ["swift_vlpack", "export", "--check_pixels", "--output"],
}


def rows_of(num_rows: int, size: tuple[int, int], folder: Path) -> str:
    """Write photographs of a size, and a file of captions."""
    rng = random.Random(0)
    files = [photo(folder, f"{size[0]}_{n}", *size, seed=n) for n in range(NUM_IMAGES)]
    rows = (
        image_row([files[n % NUM_IMAGES]], sentence(rng, 5, 20), f"{n} {sentence(rng, 10, 60)}")
        for n in range(num_rows)
    )
    return write_jsonl(folder / "rows.jsonl", rows)


class Took(NamedTuple):
    """What an export took, with all its processes."""

    seconds: float
    processor_seconds: float


def exported(kind: str, flags: Sequence[str], folder: Path) -> Took:
    """Export once, with empty caches."""
    output, caches = folder / kind.replace(" ", "_"), folder / "caches"
    for one in (output, caches):
        shutil.rmtree(one, ignore_errors=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ |= {"MODELSCOPE_CACHE": str(caches / "models"), "HF_DATASETS_CACHE": str(caches / "datasets")}
    module, *more = COMMANDS[kind]
    start, before = time.perf_counter(), os.times()
    with open(folder / "printed.txt", "w") as printed:
        subprocess.run(
            [sys.executable, "-m", module, *more, str(output), *flags], env=environ, stdout=printed, stderr=printed,
            check=True,
        )  # fmt: skip
    after = os.times()
    return Took(time.perf_counter() - start, sum(after[2:4]) - sum(before[2:4]))


def assert_equal(one: Path, other: Path) -> None:
    """Compare columns, rows and lengths of two exports."""
    datasets = [load_from_disk(str(path / "train")) for path in (one, other)]
    assert datasets[0].features == datasets[1].features, "the columns differ"
    assert datasets[0].data.table.equals(datasets[1].data.table), "the rows differ"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=[THEIRS, OURS], choices=list(COMMANDS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        flags = [
            *("--model", str(save_model(folder / "model", FAMILY)), "--model_type", FAMILY, "--template", FAMILY),
            *("--torch_dtype", "float32", "--use_hf", "true", "--max_length", "4096"),
            *("--dataset_num_proc", str(options.processes)),
            *("--dataset", rows_of(options.rows, tuple(options.size), folder)),
        ]
        took = in_turns({kind: partial(exported, kind, flags, folder) for kind in options.kinds}, options.runs)
        for kind in options.kinds:
            assert_equal(folder / kind.replace(" ", "_"), folder / options.kinds[0].replace(" ", "_"))
        photos = f"{options.rows:,} photographs of {options.size[0]}x{options.size[1]}, {options.processes} processes"
        print(HEADER)
        for number, unit in enumerate(("s", "processor s")):
            values = {kind: [one[number] for one in took[kind]] for kind in took}
            limit = Limit(f"{THEIRS} / {LEAST:g}", [value / LEAST for value in values[THEIRS]])
            for kind in options.kinds:
                print(row(f"{photos}: {kind}, {unit}", values[kind], limit if kind == OURS else None))
        print((folder / "printed.txt").read_text()[-600:])


if __name__ == "__main__":
    main()
