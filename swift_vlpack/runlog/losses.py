"""Read the losses that ms-swift logged, each with the steps that it is the mean of.

>>> lines = [{"loss": loss, "global_step/max_steps": f"{step}/30"} for step, loss in ((1, 2.0), (5, 1.5), (10, 4.0))]
>>> loss_at(losses_in(lines), 4)
Loss(first=2, last=5, value=1.5)
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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


def losses_of(folder: Path, segments: Sequence[Segment]) -> list[Loss]:
    """Return the losses of a run by step, without those of steps that were lost and trained again."""
    content = b""
    with suppress(OSError):
        content = (folder / LOG).read_bytes()
    found: list[Loss] = []
    for segment in segments:
        # ms-swift appends all runs to one log and marks no beginning, so our start event has the log's size at the
        # start.
        lines = json_lines.parsed(io.BytesIO(content[segment.start.get("log_bytes", 0) : segment.log_end]))
        losses = losses_in((line for line in lines if isinstance(line, dict)), after=segment.start["step"])
        found += [loss for loss in losses if segment.is_kept(loss.last)]
    return found


def losses_in(lines: Iterable[Mapping[str, Any]], after: int = 0) -> list[Loss]:
    """Return the losses of log lines, each the mean since the line before it. `after` is the step before the first."""
    found: list[Loss] = []
    for line in lines:
        number, value = str(line.get("global_step/max_steps", "")).partition("/")[0], line.get("loss")
        if number.isdecimal() and isinstance(value, (int, float)):
            found.append(Loss((found[-1].last if found else after) + 1, int(number), float(value)))
    return found


def loss_at(losses: Sequence[Loss], step: int) -> Loss | None:
    """Return the logged mean that a step is part of; None for a step that is not logged yet."""
    return next((loss for loss in losses if loss.first <= step <= loss.last), None)
