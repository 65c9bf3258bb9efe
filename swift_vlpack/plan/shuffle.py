"""Seeded permutations that are the same on every machine and in every numpy version.

numpy promises a stable stream of raw bits only, not a stable `permutation`, so the raw bits are the sort keys.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def sort_keys(num_keys: int, *name: object) -> NDArray[np.uint64]:
    """Random 64-bit keys from the stream that belongs to `name`, e.g. `sort_keys(10, seed, "captions", epoch)`."""
    # sha256 and not `hash`, which differs from process to process; its text form is the same for all integer types.
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    bits: NDArray[np.uint64] = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(num_keys)
    return bits


def permutation(num_items: int, *name: object) -> NDArray[np.int64]:
    """Return the numbers below `num_items` in an order that depends on `name` alone."""
    # Stable, because equal keys must not be ordered by what a numpy version or a processor likes.
    return np.argsort(sort_keys(num_items, *name), kind="stable")
