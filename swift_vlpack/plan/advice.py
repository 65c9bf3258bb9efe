"""What packing does to the size of an optimizer step, and how long a pack should be: numbers that a user sets by hand.

>>> step = step_size(num_packs=10, num_samples=80, num_supervised=2400, accumulation=16, num_ranks=2)
>>> step.num_packs, step.num_samples, step.num_samples_unpacked, step.accumulation_as_unpacked
(32, 256.0, 32, 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PAD_TO_LENGTH, PackingConfig
from swift_vlpack.words import counted

LEAST_SUGGESTED = 1024
"""Tokens; shorter packs cost more in calls than they save in padding."""
MEAN_SAMPLES = 8
"""A pack should hold so many mean samples: with fewer the packer has little to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """One optimizer step over all ranks, packed, and as the same options would have made it without packing."""

    num_packs: int
    num_samples: float
    """Mean over the epoch, as are the tokens."""
    num_supervised_tokens: float
    num_samples_unpacked: int
    num_supervised_tokens_unpacked: float
    accumulation_as_unpacked: int
    """`gradient_accumulation_steps`, at a batch size of 1, with which a step has about as many samples as un-packed."""
    num_samples_then: float
    """Samples of a step with that accumulation; more than un-packed where one pack a rank holds more already."""

    def as_json(self) -> dict[str, Any]:
        """Plain numbers under their names."""
        return {name: round(value, 1) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"{counted(self.num_packs, 'pack')} with about {self.num_samples:.0f} samples and "
            f"{self.num_supervised_tokens:.0f} supervised tokens; un-packed it would be "
            f"{counted(self.num_samples_unpacked, 'sample')} and {self.num_supervised_tokens_unpacked:.0f}"
        )

    @property
    def remedy(self) -> str:
        """How to come back to the un-packed number of samples."""
        return (
            f"per_device_train_batch_size 1 with gradient_accumulation_steps {self.accumulation_as_unpacked} makes it "
            f"about {self.num_samples_then:.0f} samples a step"
        )


def step_size(*, num_packs: int, num_samples: int, num_supervised: int, accumulation: int, num_ranks: int) -> StepSize:
    """From the totals of an epoch; `accumulation` is batch size times accumulation, which packing folds into one."""
    packs_per_step = accumulation * num_ranks
    samples_per_pack = num_samples / max(1, num_packs)
    supervised_per_sample = num_supervised / max(1, num_samples)
    as_unpacked = max(1, round(accumulation / max(1.0, samples_per_pack)))
    return StepSize(
        num_packs=packs_per_step,
        num_samples=packs_per_step * samples_per_pack,
        num_supervised_tokens=packs_per_step * samples_per_pack * supervised_per_sample,
        num_samples_unpacked=packs_per_step,
        num_supervised_tokens_unpacked=packs_per_step * supervised_per_sample,
        accumulation_as_unpacked=as_unpacked,
        num_samples_then=as_unpacked * num_ranks * samples_per_pack,
    )


def suggested_length(lengths: NDArray[Any]) -> int:
    """A capacity that holds the longest sample, and several of the mean: the next power of two.

    >>> suggested_length(np.array([100, 200, 900])), suggested_length(np.array([300, 5000]))
    (4096, 32768)
    """
    wanted = max(LEAST_SUGGESTED, int(lengths.max()), int(MEAN_SAMPLES * lengths.mean()))
    return 1 << (wanted - 1).bit_length()


def length_warning(capacity: int, lengths: NDArray[Any], *, what: str = "rows") -> str | None:
    """What to say of a capacity that nobody chose, the model's maximum; None where the data asks for that much."""
    if not len(lengths) or (suggested := suggested_length(lengths)) >= capacity:
        return None
    # Lengths that occur: between two of them numpy would interpolate tokens that no row has.
    median, p99 = np.percentile(lengths, (50, 99), method="higher").tolist()
    return (
        f"a pack holds {capacity} tokens, the model's maximum, as neither max_length nor packing_length says less. "
        f"The {what} have {int(lengths.min())} to {int(lengths.max())} tokens (median {median}, 99% have at most "
        f"{p99}): --max_length {suggested} holds them all, with shorter rows and less memory"
    )


def nothing_packed(report: Mapping[str, Any]) -> str | None:
    """Say that no sample of a plan shares a pack, because none fits one; None where some do.

    >>> nothing_packed({"num_packs": 3, "single_long": 3, "packing_length": 16})
    'NO SAMPLE FITS a pack of 16 tokens: each is alone in a row of its own, and nothing is packed; raise \
packing_length, or the caps'
    >>> nothing_packed({"num_packs": 3, "single_long": 2, "packing_length": 16})
    """
    if not report["num_packs"] or report["single_long"] < report["num_packs"]:
        return None
    return (
        f"NO SAMPLE FITS a pack of {report['packing_length']} tokens: each is alone in a row of its own, and nothing "
        "is packed; raise packing_length, or the caps"
    )


def long_row_warning(num_tokens_per_pack: NDArray[Any], config: PackingConfig) -> str | None:
    """What to say of rows that cannot have the one shape that `packing_pad_to=length` asks for."""
    num_longer = int((num_tokens_per_pack > config.packing_length).sum())
    if config.packing_pad_to != PAD_TO_LENGTH or not num_longer:
        return None
    return (
        f"packing_pad_to=length: {counted(num_longer, 'sample is', 'samples are')} longer than packing_length "
        f"({config.packing_length}) and alone in a row of twice as many tokens, or the next multiple: another shape. "
        "Raise packing_length, or leave such samples out by packing_allow_single_long=false"
    )
