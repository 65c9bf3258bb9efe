"""What a dataloader delivers, beside what encoding alone makes: `make bench-loader`, about three minutes.

Rows of one 640x480 photo, and texts of some 60 and some 1,000 tokens, are brought to the main process, which does
nothing with them. Six kinds take turns: encoding alone in one and in two processes, ms-swift's dataloader with its
defaults (one worker), un-packed and packed, and ours with one and with two workers. Seconds count from the start of the
workers to the last batch. Processor time is that of the workers alone; it is steadier where others use the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.turns import HEADER, Limit, in_turns, row

FAMILY = "qwen2_5_vl"
CAPACITY = 4096
NUM_PHOTOS = 40
LEAST_SHARE = 0.8
"""Samples a second to reach, as a share of what encoding alone makes in as many processes."""
MOST_TIME = 1.05
"""Processor time of a worker to reach for a text, as a multiple of that of encoding alone."""
ALONE, ALONE_TWICE, UNPACKED, THEIRS, OURS, OURS_TWICE = KINDS = (
    "encoding alone, 1 process", "encoding alone, 2 processes", "ms-swift un-packed, 1 worker",
    "ms-swift's packing, 1 worker", "ours, 1 worker", "ours, 2 workers",
)  # fmt: skip


class Delivered(NamedTuple):
    """Samples that were encoded or delivered, and what it took."""

    num_samples: int
    seconds: float
    processor_seconds: float
    """Of all workers, their start included."""

    @property
    def per_second(self) -> float:
        """Samples a second.

        >>> Delivered(10, 2.0, 1.0).per_second, Delivered(10, 2.0, 1.0).processor_ms
        (5.0, 100.0)
        """
        return self.num_samples / self.seconds

    @property
    def processor_ms(self) -> float:
        """Milliseconds of processor time a sample."""
        return 1000 * self.processor_seconds / self.num_samples


# -- rows -------------------------------------------------------------------------------------------------------------


def photo_rows(folder: Path, num_rows: int) -> str:
    """Write rows of one photo; a few photos stand for many."""
    from tests.data_rows import image_row, sentence, write_jsonl
    from tests.images import photo

    rng = random.Random(0)
    photos = [photo(folder, f"photo{n}", 640, 480, seed=n) for n in range(NUM_PHOTOS)]
    rows = [image_row([photos[n % NUM_PHOTOS]], sentence(rng, 3, 12), sentence(rng, 10, 60)) for n in range(num_rows)]
    return write_jsonl(folder / "photos.jsonl", rows)


def text_rows(folder: Path, num_rows: int, num_words: int) -> str:
    """Write rows of some `num_words` words."""
    from tests.data_rows import sentence, text_row, write_jsonl

    rng = random.Random(0)
    fewest, most = int(0.8 * num_words), int(1.2 * num_words)
    rows = (text_row("what comes next?", sentence(rng, fewest, most)) for _ in range(num_rows))
    return write_jsonl(folder / f"texts_{num_words}.jsonl", rows)


def template_of(folder: Path) -> Any:
    """Load a tiny model with the real vocabulary as a run does, and return its template."""
    import torch
    from swift.model import get_model_processor
    from swift.template import get_template

    from swift_vlpack.attention import attention
    from tests.tiny import save_model

    attention.register()
    path, options = str(save_model(folder / "model", FAMILY)), {"torch_dtype": torch.float32, "use_hf": True}
    model, processor = get_model_processor(path, model_type=FAMILY, attn_impl=attention.NAME, **options)
    template = get_template(processor, template_type=FAMILY, max_length=CAPACITY)
    template.set_mode("train")
    template.model = model
    return template


# -- encoding alone ---------------------------------------------------------------------------------------------------


def alone(rows: Any, template: Any, num_processes: int) -> Delivered:
    """Encode all rows in forked processes, and deliver none."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    shares = [range(number, len(rows), num_processes) for number in range(num_processes)]
    processes = [context.Process(target=_encode, args=(rows, template, share, results)) for share in shares]
    start = time.perf_counter()
    for process in processes:
        process.start()
    processor_seconds = sum(results.get() for _ in processes)
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return Delivered(len(rows), seconds, processor_seconds)


def _encode(rows: Any, template: Any, share: range, results: Any) -> None:
    import torch

    torch.set_num_threads(1)  # as torch does in a worker
    for index in share:
        template.encode(rows[index], return_length=True)
    results.put(time.process_time())


# -- loaders ----------------------------------------------------------------------------------------------------------


def delivered(loader: Any, num_samples_of: Callable[[Any], int]) -> Delivered:
    """Take all batches from a loader that was not iterated before."""
    import psutil

    before = set(psutil.Process().children())
    num_samples, processor_seconds = 0, 0.0
    start = time.perf_counter()
    batches: Iterator[Any] = iter(loader)
    for batch in batches:
        num_samples += num_samples_of(batch)
        del batch
        # After each batch, because workers that are not persistent are gone after the last one.
        workers = [child for child in psutil.Process().children() if child not in before]
        processor_seconds = max(processor_seconds, sum(_processor_seconds(worker) for worker in workers))
    seconds = time.perf_counter() - start
    _end(loader)
    return Delivered(num_samples, seconds, processor_seconds)


def _processor_seconds(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _end(loader: Any) -> None:
    """End persistent workers, so that none waits beside the kind that is next."""
    if (iterator := getattr(loader, "_iterator", None)) is not None:
        iterator._shutdown_workers()


def options_of(num_workers: int) -> dict[str, Any]:
    """Return the options of a dataloader that a user gets who gives none but the number of workers."""
    return {"num_workers": num_workers, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 2}


def of_swift(rows: Any, template: Any, lengths: list[int], *, packed: bool) -> Delivered:
    """Deliver all rows by ms-swift's dataloader."""
    import torch
    from swift.dataloader import BatchSamplerShard, DataLoaderShard
    from swift.dataset import LazyLLMDataset, PackingDataset

    template.packing = template.padding_free = packed
    dataset = LazyLLMDataset(rows, template.encode)
    if packed:
        dataset = PackingDataset(template, LazyLLMDataset(rows.add_column("lengths", lengths), template.encode))
    sampler = BatchSamplerShard(len(dataset), batch_size=1, shuffle=True, drop_last=False, data_seed=42)
    device, collate = torch.device("cpu"), template.data_collator
    loader = DataLoaderShard(dataset, device, batch_sampler=sampler, collate_fn=collate, **options_of(1))
    return delivered(loader, lambda batch: int((batch["position_ids"][0, 0] == 0).sum()) if packed else 1)


def of_ours(fused: Any, template: Any, num_workers: int) -> Delivered:
    """Deliver all rows by our dataloader, as the trainer makes it."""
    import torch

    from swift_vlpack import PackingConfig
    from swift_vlpack.feed.planned import PlannedPackingDataset
    from swift_vlpack.feed.planned_feed import PlannedFeed
    from swift_vlpack.host.loader import PackLoader, collator_of
    from swift_vlpack.host.voting import Ranks

    config = PackingConfig(packing_length=CAPACITY)
    feed = PlannedFeed(PlannedPackingDataset(fused, template, config))
    feed.begin(0)
    collate = collator_of(argparse.Namespace(tuner_type="full"), template, feed.seed)
    options = {"device": torch.device("cpu"), "collate_fn": collate, **options_of(num_workers)}
    return delivered(feed.loader(0, PackLoader, ranks=Ranks, **options), lambda batch: len(batch.record.sample_ids))


def kinds_of(file: str, template: Any) -> dict[str, Callable[[], Delivered]]:
    """Load and measure the rows of a file, and return the kinds to measure over them."""
    from swift.dataset import load_dataset

    from swift_vlpack.rows.fusion import FusionCaptionDataset
    from swift_vlpack.rows.source import RowSource

    rows, _ = load_dataset([file], num_proc=1, use_hf=True)
    fused = FusionCaptionDataset([RowSource(name="data", rows=rows)], template)
    fused.measure()
    sizes = fused.sources[0].sizes
    assert sizes is not None
    lengths = [int(length) for length in sizes.columns[0]]
    return {
        ALONE: partial(alone, rows, template, 1),
        ALONE_TWICE: partial(alone, rows, template, 2),
        UNPACKED: partial(of_swift, rows, template, lengths, packed=False),
        THEIRS: partial(of_swift, rows, template, lengths, packed=True),
        OURS: partial(of_ours, fused, template, 1),
        OURS_TWICE: partial(of_ours, fused, template, 2),
    }


# -- the table --------------------------------------------------------------------------------------------------------


def lines_of(name: str, measured: dict[str, list[Delivered]], *, has_media: bool) -> list[str]:
    """Return the rows of the table for one kind of data."""
    speeds = {kind: [one.per_second for one in turns] for kind, turns in measured.items()}
    times = {kind: [one.processor_ms for one in turns] for kind, turns in measured.items()}
    limit_of: dict[str, Limit] = {}
    if has_media:
        for kind, of in ((OURS, ALONE), (OURS_TWICE, ALONE_TWICE)):
            least = [LEAST_SHARE * speed for speed in speeds[of]]
            limit_of[kind] = Limit(f"{LEAST_SHARE} of {of}", least, at_least=True)
    lines = [row(f"{name}, samples a second, {kind}", speeds[kind], limit_of.get(kind)) for kind in measured]
    share = 1 / LEAST_SHARE if has_media else MOST_TIME
    for kind in measured:
        is_ours = kind in (OURS, OURS_TWICE)
        limit = Limit(f"{share} times encoding alone", [share * time for time in times[ALONE]]) if is_ours else None
        lines.append(row(f"{name}, processor ms a sample, {kind}", times[kind], limit, digits=2))
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=400, help="rows of one photo")
    parser.add_argument("--short", type=int, default=2000, help="texts of some 60 tokens")
    parser.add_argument("--long", type=int, default=400, help="texts of some 1,000 tokens")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        template = template_of(folder)
        files = {
            "photos": photo_rows(folder, options.photos),
            "texts of 60 tokens": text_rows(folder, options.short, 40),
            "texts of 1,000 tokens": text_rows(folder, options.long, 980),
        }
        print(HEADER)
        for name, file in files.items():
            measured = in_turns(kinds_of(file, template), options.turns)
            print("\n".join(lines_of(name, measured, has_media=name == "photos")), flush=True)


if __name__ == "__main__":
    main()
