"""Time the steps of a trainer and its loader, and read peak memory, for `vlpack bench`."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SECONDS_OF_LOADER = 5.0
"""Time to measure the loader with each number of workers."""
NUM_WARM = 2
"""Sequences that are trained before the first measurement: kernels are chosen and memory is allocated in them."""
MOST_PADDED = 64
"""Most padded batches in one measurement, if they have fewer tokens than a pack."""
_MEASURED = ("seconds", "between", "tokens", "samples", "patches", "tokens_alone")
"""Names of the sums over the batches of a measurement: two times, then the four counts of `sizes_of`."""


class Laps:
    """Seconds of each part of a start, from `began` on.

    >>> laps = Laps(began=time.time() - 1.5)
    >>> laps("imports")
    >>> laps.seconds
    {'imports': 1.5}
    """

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = began

    def __call__(self, part: str) -> None:
        """End a part, and add the seconds since the last lap to it."""
        now = time.time()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 2)
        self._last = now

    def skip(self) -> None:
        """Count the time since the last lap for no part: the bench spent it, and a run would not."""
        self._last = time.time()


class Enough(Exception):
    """Raised by `StepTimer` to end training, once all measurements are taken."""


class StepTimer:
    """Take the place of a trainer's `training_step`; time forward and backward, and the pauses between steps."""

    def __init__(self, trainer: Any, bench: argparse.Namespace) -> None:
        self._step = trainer.training_step
        self._trainer = trainer
        self._num_wanted, self._seconds = bench.steps, bench.seconds
        self._least_tokens = bench.tokens_of_pack
        """Tokens in one measurement: padded batches are small, so several are added up to the size of a pack."""
        self._parts: list[tuple[float, ...]] = []
        self._blocks: list[dict[str, float]] = []
        self._num_seen = 0
        self._began = self._ended = time.perf_counter()

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train one batch, and note how long it took. Raises `Enough` after the last measurement."""
        if isinstance(inputs, tuple):  # all sequences of a step: the trainer calls this again for each of them
            return self._step(model, inputs, *args, **kwargs)
        started = self._now()
        sizes = sizes_of(inputs)
        loss = self._step(model, inputs, *args, **kwargs)
        ended = self._now()
        self._num_seen += 1
        if self._num_seen <= NUM_WARM:
            self._began = ended
        else:
            self._parts.append((ended - started, started - self._ended, *sizes))
            self._close_block()
        self._ended = ended
        if len(self._blocks) >= self._num_wanted or (self._blocks and ended - self._began > self._seconds):
            raise Enough
        return loss

    def _close_block(self) -> None:
        block = dict(zip(_MEASURED, map(sum, zip(*self._parts, strict=True)), strict=True))
        # Go on until the batches have the tokens of a pack, so that a packed and a padded measurement compare.
        if block["tokens"] < self._least_tokens and len(self._parts) < MOST_PADDED:
            return
        self._blocks.append({**block, "batches": len(self._parts)})
        self._parts = []
        say(f"measurement {len(self._blocks)} of {self._num_wanted}")

    def _now(self) -> float:
        if self._trainer.args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def measured(self) -> list[dict[str, float]]:
        """Return every measurement: seconds in and between steps, the sums of `sizes_of`, and the number of batches."""
        return [{name: round(value, 5) for name, value in block.items()} for block in self._blocks]


def sizes_of(inputs: Any) -> tuple[int, int, int, int]:
    """Count tokens without padding, samples, patches, and tokens of the rows alone, in a batch, packed or not.

    If rows share a prefix, the last number is larger than the first: it counts the prefix for each row.
    """
    grids = [inputs[name] for name in ("image_grid_thw", "video_grid_thw") if inputs.get(name) is not None]
    patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    if (record := getattr(inputs, "record", None)) is not None:
        return record.num_tokens, len(record.lengths), patches, sum(record.lengths)
    tokens, mask = inputs["input_ids"], inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return int(mask.sum()), tokens.shape[0], patches, int(mask.sum())
    positions = inputs.get("text_position_ids", inputs.get("position_ids"))
    num_samples = tokens.shape[0] if positions is None else int((positions == 0).sum())  # of a batch without padding
    return tokens.numel(), num_samples, patches, tokens.numel()


def loader_speed(trainer: Any, num_workers: int) -> dict[str, Any]:
    """Measure the samples a second of the training loader with `num_workers`, from its first batch on."""
    say(f"loader with {num_workers} workers")
    trainer.args.dataloader_num_workers = num_workers
    trainer.feed.begin(0)
    start = time.perf_counter()
    first, samples, tokens, last, num_batches = None, 0, 0, start, 0
    with _closed(iter(trainer.get_train_dataloader())) as batches:
        for batch in batches:
            last = time.perf_counter()
            num_batches += 1
            if first is None:
                first = last
            else:
                samples += len(batch.record.lengths)
                tokens += batch.record.num_tokens
            if last - start > SECONDS_OF_LOADER:
                break
    seconds = last - (first or last)
    # While the first batch was awaited, every worker read one ahead: only later batches show the speed of the loader.
    is_measured = seconds > 0 and num_batches > num_workers + 1
    return {
        "workers": num_workers,
        "first_batch_seconds": None if first is None else round(first - start, 3),
        "samples_per_second": round(samples / seconds, 2) if is_measured else None,
        "tokens_per_second": round(tokens / seconds, 1) if is_measured else None,
        "batches": num_batches,
    }


@contextmanager
def _closed(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Yield the batches and close them at the end: workers that go on would slow down the next measurement."""
    try:
        yield batches
    finally:
        getattr(batches, "close", lambda: None)()


def memory() -> dict[str, Any]:
    """Return the peak memory of this process and the memory of its GPU, in bytes; `total` is None on the CPU."""
    if torch.cuda.is_available():
        at = torch.cuda.current_device()
        return {"peak": torch.cuda.max_memory_allocated(at), "total": torch.cuda.get_device_properties(at).total_memory}
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "total": None}


def say(what: str) -> None:
    """Show progress on stderr, because stdout has the report alone."""
    print(f"vlpack bench: {what}", file=sys.stderr, flush=True)
