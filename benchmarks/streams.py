"""Samples a second that a stream delivers to training, this package and ms-swift, with one and two readers.

python -m benchmarks.streams [--rows 400] [--runs 3]

Rows of one 640x480 JPEG and a caption, in two files; the template's own encoding, no training. Counted is the time from
asking for the first pack to having the last, on the slower rank; the best of a few runs. No network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

FAMILY = "qwen2_5_vl"
NUM_FILES = 2
NUM_PHOTOS = 40
CAPACITY = 4096
WINDOW = 128  # ms-swift's packing_interval
# Title, ranks, dataloader workers of each.
SETTINGS = (("1 rank, 1 worker", 1, 1), ("2 ranks, 1 worker each", 2, 1), ("1 rank, 2 workers", 1, 2))


def write_rows(folder: Path, num_rows: int) -> list[str]:
    """The files of the stream."""
    from tests.data_rows import image_row, sentence, write_jsonl
    from tests.images import photo

    rng = random.Random(0)
    photos = [photo(folder, f"photo{n}", 640, 480, seed=n) for n in range(NUM_PHOTOS)]
    rows = [image_row([rng.choice(photos)], sentence(rng, 3, 12), sentence(rng, 10, 60)) for _ in range(num_rows)]
    return [write_jsonl(folder / f"{n}.jsonl", rows[n::NUM_FILES]) for n in range(NUM_FILES)]


def loader_of(who: str, template: Any, files: list[str], rank: int, num_ranks: int, num_workers: int) -> Any:
    """A training dataloader, made as the two trainers make it."""
    from swift.dataset import load_dataset

    rows, _ = load_dataset(files, streaming=True, num_proc=None, use_hf=True)
    if who == "ms-swift":
        from swift.dataloader import DataLoaderDispatcher
        from swift.dataset import IterablePackingDataset
        from torch.utils.data import DataLoader

        packs = IterablePackingDataset(template, rows, 1, packing_interval=WINDOW, packing_length=CAPACITY)
        # One worker whatever is asked for: SwiftMixin.__init__ sets it for data without a length.
        loader = DataLoader(
            packs, batch_size=1, collate_fn=template.data_collator, num_workers=1, prefetch_factor=2 * num_ranks
        )
        return DataLoaderDispatcher(loader)
    from swift_vlpack import PackingConfig
    from swift_vlpack.feed.collate import Collator
    from swift_vlpack.feed.streamed import StreamedPackingDataset
    from swift_vlpack.feed.streamed_feed import StreamedFeed
    from swift_vlpack.host.loader import PackLoader
    from swift_vlpack.host.voting import Ranks
    from swift_vlpack.rows.streams import StreamedRows

    config = PackingConfig(packing_length=CAPACITY, packing_buffer=WINDOW, packing_drop_last=False)
    packs = StreamedPackingDataset(StreamedRows(rows, template), template, config, rank=rank, num_ranks=num_ranks)
    collate = Collator(template, for_model=False)
    options = {"num_workers": num_workers, "prefetch_factor": 2, "collate_fn": collate}
    return StreamedFeed(packs, num_workers).loader(rank, PackLoader, ranks=Ranks, **options)


def read(  # noqa: PLR0913 - the arguments of a process
    rank: int, num_ranks: int, who: str, num_workers: int, model: str, files: list[str], results: str
) -> None:
    """One rank: read the stream to its end and note the seconds and the samples."""
    import torch
    import torch.distributed as dist
    from swift.model import get_model_processor
    from swift.template import get_template

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of the workers, as in a real run; this process was spawned
    store = dist.FileStore(os.path.join(results, "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    loaded, processor = get_model_processor(model, model_type=FAMILY, torch_dtype=torch.float32, use_hf=True)
    template = get_template(processor, template_type=FAMILY, max_length=CAPACITY)
    template.set_mode("train")
    template.model = loaded
    loader = loader_of(who, template, files, rank, num_ranks, num_workers)
    num_samples = 0
    dist.barrier()
    start = time.perf_counter()
    for batch in loader:
        num_samples += int((batch["text_position_ids"] == 0).sum()) if (batch["labels"] != -100).any() else 0
        if who == "ms-swift":
            dist.barrier()  # what the gradients would do; the other loader votes
    Path(results, f"rank{rank}").write_text(f"{time.perf_counter() - start} {num_samples}")
    dist.barrier()
    for child in multiprocessing.active_children():  # ms-swift's encoding processes would live on
        child.terminate()
    os._exit(0)


def measured(who: str, num_ranks: int, num_workers: int, model: str, files: list[str]) -> tuple[float, int]:
    """Samples a second and samples, over all ranks."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as results:
        mp.spawn(read, (num_ranks, who, num_workers, model, files, results), nprocs=num_ranks)
        done = [Path(results, f"rank{rank}").read_text().split() for rank in range(num_ranks)]
    num_samples = sum(int(samples) for _, samples in done)
    return num_samples / max(float(seconds) for seconds, _ in done), num_samples


def counted_up_to(num_seconds: float, _: int = 0) -> int:
    """How far a plain loop comes."""
    number, end = 0, time.perf_counter() + num_seconds
    while time.perf_counter() < end:
        number += 1
    return number


def machine_speedup(num_seconds: float = 3.0) -> float:
    """What a second process is worth on this machine, whoever else uses it: no reader can gain more."""
    work = partial(counted_up_to, num_seconds)
    with multiprocessing.Pool(2) as pool:
        alone = sum(pool.map(work, range(1), chunksize=1))
        return sum(pool.map(work, range(2), chunksize=1)) / alone


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3, help="the best of so many runs is shown")
    options = parser.parse_args()
    from tests.tiny import save_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(save_model(Path(folder) / "model", FAMILY))
        files = write_rows(Path(folder), options.rows)
        print(f"| samples a second ({options.rows} rows) | " + " | ".join(title for title, *_ in SETTINGS) + " |")
        print("|---" * (len(SETTINGS) + 1) + "|")
        for who in ("ms-swift", "swift_vlpack"):
            cells, first = [], 0.0
            for _, num_ranks, num_workers in SETTINGS:
                runs = [measured(who, num_ranks, num_workers, model, files) for _ in range(options.runs)]
                speed, num_samples = max(runs)
                first = first or speed
                lost = f", {options.rows - num_samples} lost" if num_samples != options.rows else ""
                cells.append(f"{speed:.1f} ({speed / first:.2f}x{lost})")
            print(f"| {who} | " + " | ".join(cells) + " |", flush=True)
        print(f"\nA plain loop in two processes here: {machine_speedup():.2f} times the work of one.")


if __name__ == "__main__":
    main()
