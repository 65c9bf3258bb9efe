"""Compute how much of a resumed run is left, in the steps and epochs that Hugging Face's Trainer counts.

The trainer computes its bounds from the length of a whole epoch, as if the run had always had as many ranks as now. But
a resumed epoch can have more or fewer steps than other epochs, and any number of ranks may have written the checkpoint.

>>> rest = ResumeSchedule(epoch=1, global_step=14, batches_trained=8, batches_left=12, accumulation=2)
>>> rest.steps_trained, rest.steps_of_epoch
(4, 10)
>>> rest.bounds(Bounds(num_epochs=3, max_steps=30), steps_per_epoch=10, num_train_epochs=3, are_steps_given=False)
Bounds(num_epochs=3, max_steps=30)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Bounds(NamedTuple):
    """The end of training: after these epochs or steps, whichever comes first."""

    num_epochs: int
    max_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeSchedule:
    """The position of a resumed run: its epoch, its optimizer steps, and batches of one rank in the epoch."""

    epoch: int
    global_step: int
    batches_trained: int
    """Batches of the epoch that the trainer should count as trained: whole steps with the present accumulation."""
    batches_left: int | None
    """Batches of the epoch that are left; None for a stream, which does not know."""
    accumulation: int

    @property
    def steps_trained(self) -> int:
        """Return the optimizer steps of the epoch that the trainer should count as taken."""
        return self.batches_trained // self.accumulation

    @property
    def steps_of_epoch(self) -> int:
        """Return all optimizer steps of the epoch, those already taken included."""
        return num_steps(self.batches_trained + (self.batches_left or 0), self.accumulation)

    def bounds(
        self, computed: Bounds, *, steps_per_epoch: int, num_train_epochs: float, are_steps_given: bool
    ) -> Bounds:
        """Return the bounds of the resumed run. `computed` are the trainer's bounds for a run from the beginning."""
        if self.batches_left is None:  # a stream: as many epochs as it takes, but none if all steps are trained
            return computed._replace(num_epochs=self.epoch) if self.global_step >= computed.max_steps else computed
        max_steps = computed.max_steps
        if not are_steps_given:  # the trainer computed `max_steps` as if the run had always had as many ranks as now
            max_steps += self.global_step - self.epoch * steps_per_epoch - self.steps_trained
            # A last epoch that is trained in part (of 2.5 epochs) ends by steps, however many steps it has.
            if num_train_epochs - self.epoch >= 1:
                max_steps += self.steps_of_epoch - steps_per_epoch
        if max_steps <= self.global_step:
            return Bounds(self.epoch, max_steps)
        steps_after = max_steps - self.global_step - (self.steps_of_epoch - self.steps_trained)
        return Bounds(self.epoch + 1 + max(0, math.ceil(steps_after / steps_per_epoch)), max_steps)


def batches_trained(num_consumed: int, *, num_ranks: int, accumulation: int) -> int:
    """Return the batches of one rank that `num_consumed` packs of all ranks make, in whole steps of the present ranks.

    >>> batches_trained(13, num_ranks=2, accumulation=3)
    6
    """
    return num_consumed // (num_ranks * accumulation) * accumulation


def num_steps(num_batches: int, accumulation: int) -> int:
    """Return the optimizer steps of an epoch, which ends with a step, however few batches have accumulated."""
    return -(-num_batches // accumulation)
