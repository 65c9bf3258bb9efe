"""Shuffle by a seed, with the same result on every machine and in every numpy version.

numpy guarantees that a stream of raw bits stays the same over versions, but not `permutation`. So raw bits are sort
keys.

>>> permutation(5, 42, "captions").tolist()
[1, 0, 3, 4, 2]
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def sort_keys(num_keys: int, *name: object) -> NDArray[np.uint64]:
    """Return random 64-bit keys from the stream that belongs to `name`, as in `sort_keys(10, seed, "captions", 0)`."""
    # Use sha256, because `hash` differs from process to process, and text, which is equal for all integer types.
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    bits: NDArray[np.uint64] = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(num_keys)
    return bits


def permutation(num_items: int, *name: object) -> NDArray[np.int64]:
    """Return the numbers below `num_items` in an order that depends on `name` alone."""
    # Sort stably: an unstable sort orders equal keys differently on different processors.
    return np.argsort(sort_keys(num_items, *name), kind="stable")
