"""Append the events of a run to one file, `vlpack/run.jsonl` in its output directory, and read them back.

>>> from tempfile import mkdtemp
>>> log = EventLog(Path(mkdtemp()))
>>> began = log.append(START, 0, num_ranks=2)
>>> trained = log.append(STEPS, 10, epoch=0, num_packs=80)
>>> [(event["event"], event["step"]) for event in read_events(log.path)]
[('start', 0), ('steps', 10)]

The file records what could not be found out about a run later. Each line is a JSON object with `event`, `when` and the
optimizer `step` after which it happened:

| event | when it is written | what else it says |
|---|---|---|
| `start`, `resume` | training begins | ranks, options, variables, sources, bytes of ms-swift's log; the checkpoint |
| `epoch` | an epoch begins or goes on | of a plan the number of packs and how even ranks are |
| `steps` | a line is logged or a checkpoint is saved | what all ranks trained since the last such event (`counts.py`) |
| `checkpoint` | a checkpoint is complete | its folder |
| `end` | training ends by itself | |

To read a log, begin with `segments.py`: it joins events to segments, and segments to a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines

logger = logging.getLogger(__name__)

FOLDER = "vlpack"
"""Folder in the output directory for everything that this package writes there."""
FILE = "run.jsonl"
START, RESUME, EPOCH, STEPS, CHECKPOINT, END = "start", "resume", "epoch", "steps", "checkpoint", "end"
Event = dict[str, Any]


class EventLog:
    """Append events to the log of a run. Only rank 0 has an `EventLog`."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / FOLDER / FILE
        self._is_writable = True

    def append(self, event: str, step: int, **facts: Any) -> str:
        """Append an event, and return its time. If writing fails, warn once and write no more: training goes on."""
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        if not self._is_writable:
            return when
        try:
            json_lines.append(self.path, [{"event": event, "when": when, "step": step, **facts}], ensure_ascii=False)
        except OSError as error:
            self._is_writable = False
            logger.warning(
                "%s cannot be written, so `vlpack report` and `vlpack inspect --run` will know less of this run: %s",
                self.path, error,
            )  # fmt: skip
        return when


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file in order. A line that a killed process left unfinished is skipped."""
    for line in json_lines.read(path):
        if isinstance(line, dict) and {"event", "when", "step"} <= set(line):
            yield line
