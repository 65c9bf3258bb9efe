"""How long a trainer waits for its next epoch, made on demand and made ahead, and what that costs it meanwhile.

OMP_NUM_THREADS=1 python -m benchmarks.epochs [NUM_ROWS]
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from swift_vlpack import FusionCaptionDataset, LengthIndex, PackingConfig, RowSource
from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.feed.planned_feed import PlannedFeed


class Template:
    """Nothing is encoded here."""

    packing = padding_free = False

    def encode(self, inputs: Any, return_length: bool = False) -> Any:
        raise NotImplementedError


class Rows:
    """As many as wanted, without having them."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"messages": [{}]}


def feed_of(num_rows: int) -> PlannedFeed:
    """Three epochs for eight ranks, of rows of 40 to 1,800 tokens, half of them with an image."""
    lengths = np.random.default_rng(0).integers(40, 1800, num_rows)
    columns = np.stack([lengths, lengths > 900, 400 * (lengths > 900), lengths // 3]).astype(np.int64)
    source = RowSource(name="rows", rows=Rows(num_rows), sizes=LengthIndex(columns, {}))
    config = PackingConfig(packing_length=8192, packing_strategy="exact")
    data = FusionCaptionDataset([source], Template())
    return PlannedFeed(PlannedPackingDataset(data, Template(), config, num_ranks=8, num_epochs=3))


def steps_while(is_on: Callable[[], bool], step: Callable[[], Any]) -> float:
    """Steps a second."""
    num_steps, start = 0, time.perf_counter()
    while is_on():
        step()
        num_steps += 1
    return num_steps / (time.perf_counter() - start)


def main(num_rows: int) -> None:
    import torch

    start = time.perf_counter()
    feed = feed_of(num_rows)
    print(f"{num_rows} rows, {len(feed)} packs: start {time.perf_counter() - start:.2f} s for three epochs")
    start = time.perf_counter()
    feed.begin(1)  # not made ahead: epoch 0 was never begun
    on_demand = time.perf_counter() - start
    layer, rows = torch.nn.Linear(512, 512), torch.randn(256, 512)

    def step() -> None:
        layer(rows).sum().backward()

    ends = time.perf_counter() + 3
    alone = steps_while(lambda: time.perf_counter() < ends, step)
    start = time.perf_counter()
    feed = feed_of(num_rows)
    feed.consumed([])
    _, ahead = feed._epochs._ahead  # type: ignore[misc]
    beside = steps_while(lambda: not ahead.done(), step)
    start = time.perf_counter()
    feed.begin(1)
    print(f"wait for an epoch: on demand {on_demand:.2f} s, made ahead {time.perf_counter() - start:.2f} s")
    print(f"a loop of small steps on the CPU runs at {beside / alone:.2f} of its speed meanwhile")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
