"""The length pass against ms-swift's, on the same rows in the same processes: `python -m benchmarks.lengths`.

ms-swift's `AddLengthPreprocessor` encodes every row in full. Ours reads headers and checks itself on some rows, all of
which is in its time: cold, then with everything remembered.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, sentence, text_row
from tests.images import photo
from tests.tiny import save_model

NUM_IMAGES = 40
KINDS = {"text": (None, 10_000), "640x480": ((640, 480), 600), "2480x3508": ((2480, 3508), 100)}
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def rows_of(size: tuple[int, int] | None, num_rows: int, folder: Path) -> Dataset:
    """Rows of one kind; few image files stand for many, as decoding one again takes as long."""
    rng = random.Random(0)
    if size is None:
        return Dataset.from_list([text_row(sentence(rng, 5, 20), sentence(rng, 10, 200)) for _ in range(num_rows)])
    files = [photo(folder, f"{size[0]}_{n}", *size, seed=n) for n in range(min(NUM_IMAGES, num_rows))]
    return Dataset.from_list(
        [
            image_row([files[n % len(files)]], sentence(rng, 5, 20), f"{n} {sentence(rng, 10, 60)}")
            for n in range(num_rows)
        ]
    )


def template_of(family: str, folder: Path) -> Any:
    """ms-swift's template, without a model."""
    from swift.model import get_model_processor
    from swift.template import get_template

    model = str(save_model(folder / family, family))
    _, processor = get_model_processor(
        model, model_type=family, torch_dtype=torch.float32, use_hf=True, load_model=False
    )
    template = get_template(processor, template_type=family, max_length=32768)
    template.set_mode("train")
    return template


def seconds(work: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """How long it takes, by the clock and in processor seconds of all its processes, and what comes out."""
    start, before = time.perf_counter(), os.times()
    result = work()
    after = os.times()
    processor = sum(after[:4]) - sum(before[:4])
    return (time.perf_counter() - start, processor), result


def measure(template: Any, rows: Dataset, num_processes: int, cache: str) -> dict[str, tuple[float, float]]:
    """One line of the table."""
    from swift.dataset import AddLengthPreprocessor

    args = SimpleNamespace(strict=False, dataset_num_proc=num_processes)
    theirs, mapped = seconds(
        lambda: AddLengthPreprocessor(template=template)(
            rows, num_proc=num_processes, load_from_cache_file=False, batch_size=100
        )
    )
    right = [sum(row) for row in mapped["lengths"]]
    times = {"theirs": theirs}
    for name in ("cold", "warm"):
        times[name], ours = seconds(
            lambda: with_all_lengths([RowSource(name="rows", rows=rows)], RowEncoder(template), args, cache)
        )
        assert ours[0].sizes.lengths.tolist() == right, "the lengths differ"
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows to measure")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| rows | family | processes | ms-swift, s | cold, s | warm, s | x cold |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in options.families:
            template = template_of(family, folder)
            measure(template, rows_of((64, 64), 8, folder), 1, str(folder / f"warm-{family}"))  # what is done once
            for kind, (size, num_rows) in KINDS.items():
                rows = rows_of(size, int(num_rows * options.scale), folder)
                for num_processes in options.processes:
                    cache = str(folder / f"cache-{family}-{kind}-{num_processes}")
                    took = measure(template, rows, num_processes, cache)
                    print(_line(f"{len(rows):,} {kind} | {family} | {num_processes}", took), flush=True)


def _line(what: str, took: dict[str, tuple[float, float]]) -> str:
    """Seconds by the clock / of the processor."""
    times = " | ".join("{:.2f} / {:.2f}".format(*took[name]) for name in ("theirs", "cold", "warm"))
    by_clock, of_processor = (theirs / ours for theirs, ours in zip(took["theirs"], took["cold"], strict=True))
    return f"| {what} | {times} | {by_clock:.1f} / {of_processor:.1f} |"


if __name__ == "__main__":
    main()
