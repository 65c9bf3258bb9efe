"""What the loss of one row of a step is: a sum over tokens that adds up, a mean over tokens, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from swift_vlpack.data.lengths.sizes import num_supervised
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}
"""Relative difference of two losses that are equal, by the coarsest precision in them."""
Loss = Callable[..., torch.Tensor]


class MeanOfStep:
    """A mean over the tokens of one row, as that row's share of the mean over all tokens of the step.

    In an evaluation, which is not accumulated, it is what it was.
    """

    def __init__(self, mean_of_row: Loss, trainer: Any) -> None:
        self.mean_of_row = mean_of_row
        self.trainer = trainer
        self.num_items: Any = None
        """Tokens of the step, where the caller does not hand them on."""

    def __call__(self, outputs: Any, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The loss of one row."""
        loss = self.mean_of_row(outputs, labels, **kwargs)
        num_items = kwargs.get("num_items_in_batch", self.num_items)
        if num_items is None or self.trainer.is_evaluating:
            return loss
        return loss * (num_targets(labels) / num_items)


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    """Tokens that are predicted."""
    return (labels[..., 1:] != NO_LABEL).sum()


class Losses(NamedTuple):
    """Of two samples, each in a row of its own and in one row, as parts of one step."""

    first: float
    second: float
    together: float
    together_in_twice_the_step: float
    share_of_first: float
    """Of the tokens of both."""

    def is_sum(self, tolerance: float) -> bool:
        """Whether rows add up: a sum over tokens, divided by the tokens of the step."""
        return _close(self.first + self.second, self.together, tolerance) and _close(
            2 * self.together_in_twice_the_step, self.together, tolerance
        )

    def is_mean(self, tolerance: float) -> bool:
        """Whether it is a mean over the tokens of its row, whatever the step."""
        mean = self.share_of_first * self.first + (1 - self.share_of_first) * self.second
        return _close(mean, self.together, tolerance) and _close(
            self.together_in_twice_the_step, self.together, tolerance
        )


def with_fewer_targets(sample: Encoded) -> Encoded:
    """A third of them: a mean over tokens and one over samples are told apart by samples that differ."""
    kept = max(1, num_supervised(sample) // 3)
    labels = []
    for label in sample["labels"]:
        kept -= label != NO_LABEL
        labels.append(label if kept >= 0 else NO_LABEL)
    return {**sample, "labels": labels}


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)
