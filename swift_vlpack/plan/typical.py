"""A row like those of a run, of which only lengths are asked.

>>> typical_row([10, 20, 30, 400], 100)
(10, 10, 20, 30, 30)
>>> typical_row([], 64)
(16, 16, 16, 16)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def typical_row(lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> tuple[int, ...]:
    """Samples that share a row: spread over all lengths as the samples are; four of a quarter where nobody knows any.

    Longer ones than a row are left out, a sample of such is a row of its own.
    """
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    ordered = ordered[(ordered > 0) & (ordered <= capacity)]
    if not len(ordered):
        return (max(1, capacity // 4),) * 4
    num_samples = max(1, int(capacity // ordered.mean()))
    # The middle of each of so many equal parts: the ends are the rarest lengths there are.
    places = (np.arange(num_samples) + 0.5) / num_samples * len(ordered)
    chosen = ordered[places.astype(np.int64)]
    fitting = np.cumsum(chosen) <= capacity
    return tuple(chosen[fitting].tolist())
