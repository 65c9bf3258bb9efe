"""Read the losses that ms-swift logged, each with the steps that it is the mean of, and find jumps.

>>> lines = [{"loss": loss, "global_step/max_steps": f"{step}/30"} for step, loss in ((1, 2.0), (5, 1.5), (10, 4.0))]
>>> losses = list(losses_in(lines))
>>> losses[1]
Loss(first=2, last=5, value=1.5, fill=None)
>>> [(spike.loss.last, spike.jump) for spike in spikes(losses, 1)]
[(10, 2.5)]
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack import json_lines
from swift_vlpack.runlog.segments import Segment

LOG = "logging.jsonl"
"""ms-swift's log in the output directory."""


class Loss(NamedTuple):
    """A logged loss: the mean over the steps `first` to `last`."""

    first: int
    last: int
    """The step after which the loss was logged."""
    value: float
    """Infinite or NaN if training diverged."""
    fill: float | None = None
    """Mean fill of the packs of these steps; None if the log line has no fill."""

    @property
    def number(self) -> float | None:
        """Return the loss; None if it is infinite or NaN, which a chart and JSON cannot show."""
        return self.value if math.isfinite(self.value) else None


class Spike(NamedTuple):
    """A loss that is higher than the one logged before it."""

    before: Loss
    loss: Loss

    @property
    def jump(self) -> float:
        """Return the rise from `before` to `loss`; infinite if the loss became NaN."""
        jump = self.loss.value - self.before.value
        return math.inf if math.isnan(jump) else jump


def losses_of(folder: Path, segments: Sequence[Segment]) -> list[Loss]:
    """Return the losses of a run by step, without those of steps that were lost and trained again.

    Without segments (no run log), the whole log in the folder is taken for one run.
    """
    if not segments:
        return list(losses_in(_lines(folder / LOG)))
    found: list[Loss] = []
    for segment in segments:
        # ms-swift appends all runs to one log and marks no beginning, so our start event has the log's size at the
        # start.
        lines = _lines(segment.folder / LOG, segment.start.get("log_bytes", 0), segment.log_end)
        losses = losses_in(lines, after=segment.start["step"])
        found += [loss for loss in losses if segment.is_kept({"step": loss.last})]
    return found


def losses_in(lines: Iterable[Mapping[str, Any]], after: int = 0) -> Iterator[Loss]:
    """Yield the losses of log lines in order of steps. `after` is the step before the first line.

    A line has the mean since the line before it. If a step comes again, the run was resumed, and the later line counts.
    """
    found: list[Loss] = []
    for line in lines:
        step, value, fill = _step(line), line.get("loss"), line.get("pack/fill")
        if step is None or not isinstance(value, (int, float)):
            continue
        while found and found[-1].last >= step:
            found.pop()
        first = (found[-1].last if found else after) + 1
        found.append(Loss(first, step, float(value), fill if isinstance(fill, (int, float)) else None))
    return iter(found)


def loss_at(losses: Sequence[Loss], step: int) -> Loss | None:
    """Return the logged mean that a step is part of; None for a step that is not logged yet."""
    return next((loss for loss in losses if loss.first <= step <= loss.last), None)


def spikes(losses: Sequence[Loss], most: int) -> list[Spike]:
    """Return the `most` largest rises, largest first; a loss that became NaN or infinite is the largest of all."""
    rising = [
        spike for spike in map(Spike._make, pairwise(losses)) if spike.jump > 0 and math.isfinite(spike.before.value)
    ]
    return sorted(rising, key=lambda spike: (-spike.jump, spike.loss.last))[:most]


def _lines(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Mapping[str, Any]]:
    with suppress(OSError):
        for line in json_lines.parsed(io.BytesIO(path.read_bytes()[start:stop])):
            if isinstance(line, dict):
                yield line


def _step(line: Mapping[str, Any]) -> int | None:
    number = str(line.get("global_step/max_steps", "")).partition("/")[0]
    return int(number) if number.isdecimal() else None
