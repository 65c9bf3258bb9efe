"""Make the losses of sequences add up to the loss of a step, and weigh samples in it.

The loss of a sequence is either a sum over tokens, divided by the tokens of the step, or a mean over its own tokens.
`Losses` tells from measured numbers which of the two it is. `MeanOfStep` turns a mean into a share of the step's mean.

`packing_loss` weighs samples by their tokens, equally, or by the square root of their tokens. `weigh_samples` writes
that as weights of tokens whose mean over the step is 1. So the loss can still be divided by the number of tokens,
together with anything that is added to it, such as the loss that balances experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_vlpack.attention.packed_sequence import by_token, to_device
from swift_vlpack.feed.collate import Batch
from swift_vlpack.rows.contents import NO_LABEL, num_supervised
from swift_vlpack.rows.samples import Encoded

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}
"""Largest relative difference of two losses that count as equal, by the coarsest precision of their computation."""
Loss = Callable[..., torch.Tensor]
Total = Callable[[torch.Tensor], torch.Tensor]
SCALE = "loss_scale"
"""Name of the weights of tokens in a batch, which ms-swift's trainer reads."""


class MeanOfStep:
    """Turn a mean over the tokens of a sequence into the sequence's share of the mean over all tokens of the step.

    In an evaluation, which accumulates nothing, there is no number of tokens, and the mean itself is returned.
    """

    def __init__(self, mean_of_sequence: Loss) -> None:
        self.mean_of_sequence = mean_of_sequence
        self.num_items: Any = None
        """Tokens of the step, for callers that do not pass `num_items_in_batch`."""

    def __call__(self, outputs: Any, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Compute the share of one sequence."""
        loss = self.mean_of_sequence(outputs, labels, **kwargs)
        num_items = kwargs.get("num_items_in_batch", self.num_items)
        if num_items is None:
            return loss
        return loss * (num_targets(labels) / num_items)


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    """Count the tokens that are predicted; the first token of a sequence never is."""
    return (labels[..., 1:] != NO_LABEL).sum()


class Losses(NamedTuple):
    """Losses of two samples in one step: each in a sequence of its own, and both in one sequence."""

    first: float
    second: float
    together: float
    together_in_twice_the_step: float
    share_of_first: float
    """Share of the first sample in the targets of both."""

    def is_sum(self, tolerance: float) -> bool:
        """Tell whether sequences add up: the loss is a sum over tokens, divided by the tokens of the step."""
        return _close(self.first + self.second, self.together, tolerance) and _close(
            2 * self.together_in_twice_the_step, self.together, tolerance
        )

    def is_mean(self, tolerance: float) -> bool:
        """Tell whether the loss is a mean over the tokens of its sequence, whatever the step."""
        mean = self.share_of_first * self.first + (1 - self.share_of_first) * self.second
        return _close(mean, self.together, tolerance) and _close(
            self.together_in_twice_the_step, self.together, tolerance
        )


def with_fewer_targets(sample: Encoded) -> Encoded:
    """Keep only the first third of a sample's targets.

    With equally many targets in both samples, a mean over tokens would look like a mean over samples.
    """
    kept = max(1, num_supervised(sample) // 3)
    labels = []
    for label in sample["labels"]:
        kept -= label != NO_LABEL
        labels.append(label if kept >= 0 else NO_LABEL)
    return {**sample, "labels": labels}


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)


def weight_of_samples(num_targets: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the weight of each sample by its number of targets; a sample without targets weighs nothing.

    >>> weight_of_samples(torch.tensor([9, 0, 4]), "sqrt").tolist()
    [3.0, 0.0, 2.0]
    >>> weight_of_samples(torch.tensor([9, 0, 4]), "sample").tolist()
    [1.0, 0.0, 1.0]
    """
    targets = num_targets.to(torch.float32)
    return targets.sqrt() if kind == "sqrt" else (targets > 0).to(torch.float32)


def weigh_samples(batches: Sequence[Batch], kind: str, total: Total) -> None:
    """Set the token weights of all sequences of a step for this `kind` of `packing_loss`. `total` sums over ranks."""
    targets = [_num_targets(batch) for batch in batches]
    weights = [weight_of_samples(one, kind) for one in targets]
    num_targets = torch.stack([one.sum() for one in targets]).sum().to(torch.float32)
    num_of_step, weight_of_step = total(torch.stack([num_targets, torch.stack([one.sum() for one in weights]).sum()]))
    for batch, num, weight in zip(batches, targets, weights, strict=True):
        if not num.numel():  # without samples there is no loss to scale
            continue
        of_token = weight / num.clamp(min=1) * num_of_step / weight_of_step.clamp(min=1e-9)
        scale = by_token(of_token, _lengths(batch)).view(batch["labels"].shape)
        batch[SCALE] = scale if batch.get(SCALE) is None else scale * batch[SCALE]


def _lengths(batch: Batch) -> tuple[int, ...]:
    return batch.record.lengths_in_sequence if batch.record is not None else ()


def _num_targets(batch: Batch) -> torch.Tensor:  # (num_samples,)
    """Count the targets of each sample. The first token of a sequence is none, because nothing precedes it."""
    is_target = (batch["labels"] != NO_LABEL).flatten()
    is_target[0] = False
    last = to_device(np.cumsum(_lengths(batch), dtype=np.int64) - 1, is_target.device)
    up_to = is_target.cumsum(0).index_select(0, last)
    return up_to.diff(prepend=up_to.new_zeros(1))
