"""The clocks of `vlpack bench`: of the rows that a trainer trains, and of its loader."""

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
"""For each number of workers."""
NUM_WARM = 2
"""Rows that are trained before any is measured: kernels are chosen, memory is taken."""
MOST_PADDED = 64
"""Padded batches that are one measurement, if they have fewer tokens than a pack."""


class Enough(Exception):
    """So much was asked for."""


class RowTimer:
    """In the place of a trainer's `training_step`: forward and backward of a row, and what comes between two."""

    def __init__(self, trainer: Any, bench: argparse.Namespace) -> None:
        self._step = trainer.training_step
        self._trainer = trainer
        self._num_wanted, self._seconds = bench.steps, bench.seconds
        self._least_tokens = bench.tokens_of_pack
        """Of a measurement: padded batches are small, and are put together until they are as much as a pack."""
        self._parts: list[tuple[float, float, int, int, int]] = []
        self._blocks: list[dict[str, float]] = []
        self._num_seen = 0
        self._began = self._ended = time.perf_counter()

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train the row, and note how long it took."""
        started = self._now()
        tokens, samples, patches = sizes_of(inputs)
        loss = self._step(model, inputs, *args, **kwargs)
        ended = self._now()
        self._num_seen += 1
        if self._num_seen <= NUM_WARM:
            self._began = ended
        else:
            self._parts.append((ended - started, started - self._ended, tokens, samples, patches))
            self._close_block()
        self._ended = ended
        if len(self._blocks) >= self._num_wanted or (self._blocks and ended - self._began > self._seconds):
            raise Enough
        return loss

    def _close_block(self) -> None:
        seconds, between, tokens, samples, patches = map(sum, zip(*self._parts, strict=True))
        if tokens < self._least_tokens and len(self._parts) < MOST_PADDED:
            return
        block = {"seconds": seconds, "between": between, "tokens": tokens, "samples": samples, "patches": patches}
        self._blocks.append({**block, "batches": len(self._parts)})
        self._parts = []
        say(f"row {len(self._blocks)} of {self._num_wanted}")

    def _now(self) -> float:
        if self._trainer.args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def measured(self) -> list[dict[str, float]]:
        """Every measurement: seconds of forward and backward, and between, tokens, samples."""
        return [{name: round(value, 5) for name, value in block.items()} for block in self._blocks]


def sizes_of(inputs: Any) -> tuple[int, int, int]:
    """Real tokens, samples and patches of a batch, packed or padded."""
    grids = [inputs[name] for name in ("image_grid_thw", "video_grid_thw") if inputs.get(name) is not None]
    patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    if (record := getattr(inputs, "record", None)) is not None:
        return sum(record.lengths), len(record.lengths), patches
    tokens, mask = inputs["input_ids"], inputs.get("attention_mask")
    is_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
    return int(mask.sum()) if is_mask else tokens.numel(), tokens.shape[0], patches


def loader_speed(trainer: Any, num_workers: int) -> dict[str, Any]:
    """Samples a second of the training loader with so many workers, behind its first batch."""
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
                tokens += sum(batch.record.lengths)
            if last - start > SECONDS_OF_LOADER:
                break
    seconds = last - (first or last)
    is_measured = seconds > 0 and num_batches > num_workers + 1  # what was read ahead would count for nothing
    return {
        "workers": num_workers,
        "first_batch_seconds": None if first is None else round(first - start, 3),
        "samples_per_second": round(samples / seconds, 2) if is_measured else None,
        "tokens_per_second": round(tokens / seconds, 1) if is_measured else None,
        "batches": num_batches,
    }


@contextmanager
def _closed(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Without workers that live on and take the time of what is measured next."""
    try:
        yield batches
    finally:
        getattr(batches, "close", lambda: None)()


def memory() -> dict[str, Any]:
    """The most that was taken at a time, in bytes, and how much there is."""
    if torch.cuda.is_available():
        at = torch.cuda.current_device()
        return {"peak": torch.cuda.max_memory_allocated(at), "total": torch.cuda.get_device_properties(at).total_memory}
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "total": None}


def say(what: str) -> None:
    """Progress, where it is no part of the report."""
    print(f"vlpack bench: {what}", file=sys.stderr, flush=True)
