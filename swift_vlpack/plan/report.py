"""Report a plan in numbers, and warn of options that a user would regret.

>>> step = step_size(num_packs=10, num_samples=80, num_supervised=2400, accumulation=16, num_ranks=2)
>>> step["num_packs"], step["num_samples"], step["num_samples_unpacked"], step["accumulation_as_unpacked"]
(32, 256.0, 32, 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PAD_TO_LENGTH, PackingConfig
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.same_steps import KeptSteps
from swift_vlpack.words import counted

LEAST_SUGGESTED = 1024
"""Fewest tokens to suggest: with shorter packs, more calls cost more than less padding saves."""
_PIXELS_UNSEEN = (
    "pixels are not looked at; un-packed training decodes all images first, so one that is broken makes its steps other"
)
MEAN_SAMPLES = 8
"""Number of mean samples that a pack should hold: with fewer, the packer has little to choose from."""


def plan_report(made: Plan, aligned: Plan, *, num_rows: int, seconds: float) -> dict[str, Any]:
    """Return the report of a plan, as JSON.

    `made` is the plan before some packs are cut in two for the ranks, in which packs are counted; `aligned` is the plan
    afterwards.
    """
    # If the remainder came back because a step lacked a pack, it is trained, so count it among the packs.
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
        # A pack that is cut within a unit repeats the prefix.
        "num_tokens": int(aligned.num_tokens_per_pack.sum()),
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


def sharing_report(packs: Plan) -> dict[str, int]:
    """Count what samples of these packs share, with and without: `num_..._alone` is without."""
    shared = packs.shared_of_members
    is_branch = shared > 0
    num_units = int((is_branch[1:] & ~is_branch[:-1]).sum())
    num_in_units = int(is_branch.sum()) + num_units  # the first sample of a unit shares with none before it
    num_tokens = int(packs.num_tokens_per_pack.sum())
    return {
        "num_units": num_units,
        "num_in_units": num_in_units,
        "num_alone": len(packs.members) - num_in_units,
        "num_tokens": num_tokens,
        "num_tokens_alone": num_tokens + int(shared.sum()),
        "num_images": int(packs.images_of_members.sum()),
        "num_images_alone": int(packs.images[packs.members].sum()),
        "num_patches": int(packs.patches_of_members.sum()),
        "num_patches_alone": int(packs.patches[packs.members].sum()),
    }


def share_lines(share: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what sharing saves, and which rows share nothing, as labels and lines."""
    units = f"{counted(share['num_in_units'], 'row')} in {counted(share['num_units'], 'unit')}"
    saved = [
        _saved(share[f"num_{what}"], share[f"num_{what}_alone"], what)
        for what in ("tokens", "patches")
        if share.get(f"num_{what}_alone")
    ]
    lines = [("shared", f"{units}, {counted(share['num_alone'], 'row')} alone: {', '.join(saved)}")]
    if rows := share["rows_per_prefix"]:
        of = f"of {counted(rows['num_prefixes'], 'prefix', 'prefixes')} that rows share"
        at_most = f"at most {share['packing_share_max']} rows a unit (packing_share_max)"
        lines.append(("", f"rows an image: median {rows['median']}, p95 {rows['p95']}, {of}; {at_most}"))
    if (anywhere := share.get("num_tokens_anywhere")) is not None:
        lines.append(
            (
                "",
                "packing_batch=samples: rows share within a step only; packing_batch=packs would compute about "
                f"{anywhere} tokens ({_times(share['num_tokens_alone'], anywhere)} fewer)",
            )
        )
    if not share["num_units"]:
        of_step = "" if anywhere is None else " of a step"
        nothing = f"PACKING_SHARE=MEDIA SAVES NOTHING: no two rows{of_step} begin with the same tokens and media"
        lines.append(("", nothing))
    for cause, alone in share["alone"].items():
        of = f"{counted(alone['num_rows'], 'row')}, as rows {cause}"
        lines.append(("alone", f"{of} (such as {alone['example']}): {alone['way_out']}"))
    return lines


def _saved(num: int, num_alone: int, what: str) -> str:
    return f"{num} of {num_alone} {what} ({_times(num_alone, num)} fewer)"


def _times(whole: int, part: int) -> str:
    return f"{whole / max(1, part):.2f}x"


def step_size(
    *, num_packs: int, num_samples: int, num_supervised: int, accumulation: int, num_ranks: int
) -> dict[str, float]:
    """Return the size of a step of all ranks from the totals of an epoch: packed, and un-packed with the same options.

    `accumulation` is batch size times accumulation: packing folds them into one, because a sequence is a pack. The
    `accumulation_as_unpacked`, at batch size 1, gives a step about as many samples as un-packed: `num_samples_then`.
    """
    packs_per_step = accumulation * num_ranks
    samples_per_pack = num_samples / max(1, num_packs)
    supervised_per_sample = num_supervised / max(1, num_samples)
    as_unpacked = max(1, round(accumulation / max(1.0, samples_per_pack)))
    size = {
        "num_packs": packs_per_step,
        "num_samples": packs_per_step * samples_per_pack,
        "num_supervised_tokens": packs_per_step * samples_per_pack * supervised_per_sample,
        "num_samples_unpacked": packs_per_step,
        "num_supervised_tokens_unpacked": packs_per_step * supervised_per_sample,
        "accumulation_as_unpacked": as_unpacked,
        "num_samples_then": as_unpacked * num_ranks * samples_per_pack,
    }
    return {name: round(value, 1) for name, value in size.items()}


def about_step(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say in labelled lines what an optimizer step holds, from the facts of a plan (`feed/epoch_report.py`)."""
    if facts.get("kept_steps"):
        ahead = [("", _PIXELS_UNSEEN)] if facts.get("is_decoded_ahead") else []
        return [("one step", str(KeptSteps(**facts["kept_steps"]))), *ahead]
    if "step" not in facts:  # lengths alone do not say what is trained
        return []
    step = facts["step"]
    packed = f"{step['num_samples']:.0f} samples and {step['num_supervised_tokens']:.0f} supervised tokens"
    unpacked = f"{counted(step['num_samples_unpacked'], 'sample')} and {step['num_supervised_tokens_unpacked']:.0f}"
    remedy = (
        f"per_device_train_batch_size 1 with gradient_accumulation_steps {step['accumulation_as_unpacked']} makes it "
        f"about {step['num_samples_then']:.0f} samples a step"
    )
    return [
        ("one step", f"{counted(step['num_packs'], 'pack')} with about {packed}; un-packed it would be {unpacked}"),
        ("", remedy),
    ]


def suggested_length(lengths: NDArray[Any]) -> int:
    """Suggest a capacity: the next power of two that holds the longest sample, and `MEAN_SAMPLES` of mean length.

    >>> suggested_length(np.array([100, 200, 900])), suggested_length(np.array([300, 5000]))
    (4096, 32768)
    """
    wanted = max(LEAST_SUGGESTED, int(lengths.max()), int(MEAN_SAMPLES * lengths.mean()))
    return 1 << (wanted - 1).bit_length()


def length_warning(capacity: int, lengths: NDArray[Any], *, what: str = "rows") -> str | None:
    """Return a warning that the capacity is the model's maximum by default; None if the data needs that much."""
    if not len(lengths) or (suggested := suggested_length(lengths)) >= capacity:
        return None
    # "higher" gives lengths that occur. By default numpy interpolates to a number of tokens that no row has.
    median, p99 = np.percentile(lengths, (50, 99), method="higher").tolist()
    return (
        f"a pack holds {capacity} tokens, the model's maximum, as neither max_length nor packing_length says less. "
        f"The {what} have {int(lengths.min())} to {int(lengths.max())} tokens (median {median}, 99% have at most "
        f"{p99}): --max_length {suggested} holds them all, with shorter rows and less memory"
    )


def nothing_packed(report: Mapping[str, Any]) -> str | None:
    """Return a warning that every sample is alone, because none fits a pack; None if some share one.

    >>> nothing_packed({"num_packs": 3, "single_long": 3, "packing_length": 16})
    'NO SAMPLE FITS a pack of 16 tokens: each is alone in a sequence of its own, and nothing is packed; raise \
packing_length, or the caps'
    >>> nothing_packed({"num_packs": 3, "single_long": 2, "packing_length": 16})
    """
    if not report["num_packs"] or report["single_long"] < report["num_packs"]:
        return None
    return (
        f"NO SAMPLE FITS a pack of {report['packing_length']} tokens: each is alone in a sequence of its own, and "
        "nothing is packed; raise packing_length, or the caps"
    )


def without_target(num_rows: int) -> str:
    """Say that rows train nothing.

    >>> without_target(1)
    '1 row has no token to train'
    """
    return f"{counted(num_rows, 'row has', 'rows have')} no token to train"


def long_sequence_warning(num_tokens_per_pack: NDArray[Any], config: PackingConfig) -> str | None:
    """Return a warning about sequences without the single shape of `packing_pad_to=length`; None if all have it."""
    num_longer = int((num_tokens_per_pack > config.packing_length).sum())
    if config.packing_pad_to != PAD_TO_LENGTH or not num_longer:
        return None
    return (
        f"packing_pad_to=length: {counted(num_longer, 'sample is', 'samples are')} longer than packing_length "
        f"({config.packing_length}) and alone in a sequence of twice as many tokens, or the next multiple: another "
        "shape. Raise packing_length, or leave such samples out by packing_allow_single_long=false"
    )
