"""What happened in a run, one JSON object a line: `vlpack/run.jsonl` in the output directory.

| event | when | what it says beside `when` and `step` |
|---|---|---|
| `start`, `resume` | training begins | what the run is; `resume` names the checkpoint |
| `epoch` | an epoch begins | its number; of a plan how many packs, and how well ranks are matched |
| `steps` | a line is logged, a checkpoint is written | what was trained since the last one (`step_counts.py`) |
| `checkpoint` | a checkpoint is complete | its folder |
| `end` | training ends by itself | |

A run that is killed ends without `end`, perhaps in the middle of a line, which readers pass over.
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
"""Of what is written, in the output directory."""
FILE = "run.jsonl"
START, RESUME, EPOCH, STEPS, CHECKPOINT, END = "start", "resume", "epoch", "steps", "checkpoint", "end"


class RunLog:
    """Appends to the file; the first rank has it. Training is dearer than a line of it, so a full disk only warns."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / FOLDER / FILE
        self._is_writable = True

    def note(self, event: str, step: int, **facts: Any) -> None:
        """Write what happened."""
        if not self._is_writable:
            return
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        try:
            json_lines.append(self.path, [{"event": event, "when": when, "step": step, **facts}], ensure_ascii=False)
        except OSError as error:
            self._is_writable = False
            logger.warning("`vlpack report` will know less of this run, %s cannot be written: %s", self.path, error)


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, in their order."""
    for line in json_lines.read(path):
        if isinstance(line, dict) and {"event", "when", "step"} <= set(line):
            yield line
