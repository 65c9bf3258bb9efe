"""How few packs any packer could need.

>>> lower_bound([6, 6, 6], 10)  # the tokens would fit into two packs, the items do not
3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def lower_bound(lengths: Sequence[int] | NDArray[Any], capacity: int) -> int:
    """`max(ceil(sum / capacity), Martello-Toth L2)` of the items that fit, plus one pack for every longer one."""
    sizes = np.asarray(lengths, dtype=np.int64)
    fits = sizes <= capacity
    return _martello_toth(np.bincount(sizes[fits], minlength=capacity + 1), capacity) + int((~fits).sum())


def _martello_toth(count: NDArray[Any], capacity: int) -> int:
    """L2 over all thresholds at once; `count[w]` items have length w. Threshold 0 gives ceil(sum / capacity)."""
    num_up_to = np.concatenate(([0], np.cumsum(count)))  # [w]: items shorter than w
    sum_up_to = np.concatenate(([0], np.cumsum(count * np.arange(capacity + 1))))
    half = capacity // 2
    threshold = np.arange(half + 1)
    # Items longer than capacity - threshold are alone; the others above one half have a pack each, and what those leave
    # free can only be used by items of at least the threshold.
    top = capacity - threshold
    num_alone = num_up_to[-1] - num_up_to[top + 1]
    num_large = num_up_to[top + 1] - num_up_to[half + 1]
    free = num_large * capacity - (sum_up_to[top + 1] - sum_up_to[half + 1])
    small = sum_up_to[half + 1] - sum_up_to[threshold]
    extra = np.maximum(0, -((free - small) // capacity))  # ceil((small - free) / capacity)
    return int((num_alone + num_large + extra).max())
