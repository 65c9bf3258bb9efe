"""An epoch at a glance, as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from swift_vlpack.plan.epoch import EpochPlan

_TENTHS = 10


def overview_of(plan: EpochPlan) -> dict[str, Any]:
    """What an epoch's packs are like."""
    packs, tokens = plan.packs, plan.packs.num_tokens_per_pack
    has_samples = tokens > 0
    fills = tokens[has_samples] / packs.config.packing_length
    tenths = np.minimum((fills * _TENTHS).astype(int), _TENTHS)
    counts = np.bincount(tenths, minlength=_TENTHS + 1)
    labels = [f"{10 * tenth}-{10 * tenth + 9}%" for tenth in range(_TENTHS)] + ["100%"]
    sources = plan.schedule.source[packs.members]
    return {
        "epoch": plan.epoch,
        "num_ranks": plan.num_ranks,
        "num_packs": len(plan),
        "packing_length": packs.config.packing_length,
        "num_samples": len(packs.members),
        "num_tokens": int(tokens.sum()),
        "mean_fill": round(packs.mean_fill, 4),
        "fills": {label: int(count) for label, count in zip(labels, counts, strict=True) if count},
        "sources": {
            name: {
                "samples": int((sources == number).sum()),
                "tokens": int(plan.lengths[packs.members][sources == number].sum()),
            }
            for number, name in enumerate(plan.schedule.names)
        },
        "longest": int(tokens.argmax()),
        "emptiest": int(np.flatnonzero(has_samples)[fills.argmin()]),
        "num_left_out": len(plan.schedule) - len(packs.members),
    }
