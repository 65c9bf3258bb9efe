"""What a plan comes to, as plain numbers for machines."""

from __future__ import annotations

from typing import Any

from swift_vlpack.plan.packs import Plan


def plan_report(made: Plan, aligned: Plan, *, num_rows: int, seconds: float) -> dict[str, Any]:
    """Everything a plan knows; counts are of the plan before packs are cut for the ranks that share it (`aligned`)."""
    # Brought back for a step that lacked a pack: then it is trained, and counted among the packs.
    if not len(aligned.remainder):
        made = made.with_remainder()
    balance = aligned.balance
    excess = len(made) / made.lower_bound - 1 if made.lower_bound else 0.0
    return {
        "num_packs": len(made),
        "lower_bound": made.lower_bound,
        "excess_per_cent": round(100 * excess, 3),
        "mean_fill": round(made.mean_fill, 4),
        "num_samples": len(made.members),
        "num_tokens": int(made.num_tokens_per_pack.sum()),
        "num_padding": made.num_padding,
        "packing_pad_to": made.config.packing_pad_to,
        "num_rows": num_rows,
        "num_dropped": sum(made.num_dropped.values()),
        "dropped": made.num_dropped,
        "single_long": int(made.is_single_long.sum()),
        "num_ranks": aligned.num_ranks,
        "packs_per_rank": aligned.num_packs_per_rank,
        "packs_split": len(aligned) - len(made) - aligned.num_empty,
        "packs_empty": aligned.num_empty,
        "balance": round(balance.slowest_to_mean, 4),
        "balance_floor": round(balance.floor, 4),
        "num_giants": balance.num_giants,
        "packing_strategy": made.config.packing_strategy,
        "method": made.method,
        "packing_length": made.config.packing_length,
        "seconds": round(seconds, 4),
        "config_digest": made.config.digest(),
        "plan_digest": aligned.digest(),
    }
