"""Seeded workloads: a failing case is replayed from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from swift_vlpack import Item, PackingConfig

STRATEGIES = ("binpack", "greedy", "first_fit", "best_fit", "exact")


class Case(NamedTuple):
    seed: int
    config: PackingConfig
    items: list[Item]


def lengths(rng: random.Random, num_items: int, capacity: int) -> list[int]:
    """A shape of its own for every seed: captions, heavy tails, near halves, all equal."""
    shape = rng.choice(("uniform", "short", "tail", "halves", "equal"))
    constant = rng.randint(1, capacity)
    draw = {
        "uniform": lambda: rng.randint(1, capacity),
        "short": lambda: rng.randint(1, max(1, capacity // 8)),
        "tail": lambda: min(capacity, 1 + int(rng.paretovariate(1.1) * capacity / 40)),
        "halves": lambda: rng.randint(capacity * 2 // 5 + 1, capacity * 3 // 5 + 1),
        "equal": lambda: constant,
    }[shape]
    return [min(capacity, draw()) for _ in range(num_items)]


def cases(num_cases: int, *, strategies: tuple[str, ...] = STRATEGIES, first_seed: int = 0) -> Iterator[Case]:
    """Random items, some over-long, under random options of the packer."""
    for seed in range(first_seed, first_seed + num_cases):
        rng = random.Random(seed)
        capacity = rng.choice((10, 64, 500, 4096))
        strategy = rng.choice(strategies)
        has_caps = strategy != "binpack" and rng.random() < 0.4
        config = PackingConfig(
            packing_length=capacity,
            packing_strategy=strategy,
            packing_buffer=rng.choice((1, 2, 7, 32, 200)),
            packing_min_fill_ratio=rng.choice((0.6, 0.65, 0.9, 1.0)),
            packing_drop_last=rng.random() < 0.5,
            packing_allow_single_long=rng.random() < 0.5,
            packing_max_samples=rng.choice((None, 1, 3)) if has_caps else None,
            packing_max_images=rng.choice((None, 2)) if has_caps else None,
            packing_max_patches=rng.choice((None, 50)) if has_caps else None,
        )
        sizes = lengths(rng, rng.choice((0, 1, 5, 60, 300)), capacity)
        items = [
            Item(f"row{n}", size + (capacity if rng.random() < 0.03 else 0), rng.randint(0, 3), rng.randint(0, 60))
            for n, size in enumerate(sizes)
        ]
        yield Case(seed, config, items)
