"""The losses that ms-swift logged, each with the steps whose mean it is, and where they jump.

>>> lines = [{"loss": loss, "global_step/max_steps": f"{step}/30"} for step, loss in ((1, 2.0), (5, 1.5), (10, 4.0))]
>>> logged = losses_of(lines)
>>> logged[1]
Loss(first=2, last=5, value=1.5)
>>> spikes(logged, 1)
[Spike(before=Loss(first=2, last=5, value=1.5), loss=Loss(first=6, last=10, value=4.0))]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

_STEP = "global_step/max_steps"


class Loss(NamedTuple):
    """A line of the log."""

    first: int
    """The first step whose mean the loss is."""
    last: int
    value: float


class Spike(NamedTuple):
    """A loss that is higher than the one logged before it."""

    before: Loss
    loss: Loss

    @property
    def jump(self) -> float:
        """By how much; without an end where it is no number any more."""
        jump = self.loss.value - self.before.value
        return math.inf if math.isnan(jump) else jump


def losses_of(lines: Iterable[Mapping[str, Any]], resumed_at: Iterable[int] = ()) -> list[Loss]:
    """The losses by step; of a step that was logged twice, before and after a resume, the later one.

    A line is the mean since the line before it, or since the resume in between.
    """
    resumes = sorted(resumed_at)
    found: dict[int, Loss] = {}
    before = 0
    for line in lines:
        step, value = _step(line), line.get("loss")
        if step is None or not isinstance(value, (int, float)):
            continue
        start = max((at for at in (before, *resumes) if at < step and (at >= before or before >= step)), default=0)
        found[step] = Loss(start + 1, step, float(value))
        before = step
    return [found[step] for step in sorted(found)]


def _step(line: Mapping[str, Any]) -> int | None:
    number = str(line.get(_STEP, "")).partition("/")[0]
    return int(number) if number.isdecimal() else None


def loss_at(losses: Sequence[Loss], step: int) -> Loss | None:
    """The logged mean that a step is in; none of a step that was not logged yet."""
    return next((loss for loss in losses if loss.first <= step <= loss.last), None)


def spikes(losses: Sequence[Loss], most: int) -> list[Spike]:
    """The largest jumps upwards, largest first; a loss that became no number is the largest of all."""
    rising = [
        spike for spike in map(Spike._make, pairwise(losses)) if spike.jump > 0 and math.isfinite(spike.before.value)
    ]
    return sorted(rising, key=lambda spike: (-spike.jump, spike.loss.last))[:most]
