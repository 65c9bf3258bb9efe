"""The length pass against ms-swift's, on the same rows in the same processes: `python -m benchmarks.lengths`.

ms-swift's `AddLengthPreprocessor` encodes every row in full. Ours reads headers and checks itself on 64 rows and the
extremes; the check costs the same for any number of rows, so it has a column of its own. The cache is cold, then warm.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from swift_vlpack.data.fusion import RowSource
from swift_vlpack.data.length_pass import LengthPass
from swift_vlpack.host import lengths
from tests.images import photo
from tests.rows import image_row, sentence, text_row
from tests.tiny import save_model

NUM_IMAGES = 40
KINDS = {"text": (None, 20_000), "640x480": ((640, 480), 2_000), "2480x3508": ((2480, 3508), 200)}
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


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, and what comes out."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(template: Any, rows: Dataset, num_processes: int, cache: str) -> dict[str, Any]:
    """One line of the table."""
    from swift.dataset import AddLengthPreprocessor

    args = SimpleNamespace(strict=False, dataset_num_proc=num_processes)
    source = RowSource(name="rows", rows=rows)
    theirs, mapped = seconds(
        lambda: AddLengthPreprocessor(template=template)(
            rows, num_proc=num_processes, load_from_cache_file=False, batch_size=100
        )
    )
    times, compare = {"check": 0.0}, LengthPass.compare

    def timed(self: LengthPass, positions: Any) -> Any:
        taken, found = seconds(lambda: compare(self, positions))
        times["check"] += taken
        return found

    LengthPass.compare = timed
    cold, ours = seconds(lambda: lengths.measured(source, template, args, cache))
    LengthPass.compare = compare
    warm, _ = seconds(lambda: lengths.measured(source, template, args, cache))
    assert ours.sizes.lengths.tolist() == [sum(row) for row in mapped["lengths"]], "the lengths differ"
    return {"theirs": theirs, "cold": cold, "check": times["check"], "warm": warm}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows to measure")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| rows | family | processes | ms-swift, s | ours, s | of it the check, s | warm, s | x without check | x |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in FAMILIES:
            template = template_of(family, folder)
            for kind, (size, num_rows) in KINDS.items():
                rows = rows_of(size, int(num_rows * options.scale), folder)
                for num_processes in options.processes:
                    cache = str(folder / f"cache-{family}-{kind}-{num_processes}")
                    took = measure(template, rows, num_processes, cache)
                    print(_line(f"{len(rows):,} {kind} | {family} | {num_processes}", took), flush=True)


def _line(what: str, took: dict[str, float]) -> str:
    passed, whole = took["theirs"] / (took["cold"] - took["check"]), took["theirs"] / took["cold"]
    times = " | ".join(f"{took[name]:.2f}" for name in ("theirs", "cold", "check", "warm"))
    return f"| {what} | {times} | {passed:.1f} | {whole:.1f} |"


if __name__ == "__main__":
    main()
