"""What the folders of a run have beside its notes: log lines, epoch reports, the list of left-out rows, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.runlog import left_out_list
from swift_vlpack.runlog.run_folder import checkpoint_folders
from swift_vlpack.runlog.run_log import FOLDER

STATE = "vlpack_state.json"
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on the disk."""

    step: int
    path: Path
    state: Line | None
    """Of the data; None where it is incomplete, or was written without packing."""


def read_json(path: Path) -> Line:
    """An object of a file; an empty one where it is missing or damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def log_lines(folder: Path) -> Iterator[tuple[int, Line]]:
    """Lines of ms-swift's log, with their step."""
    for line in json_lines.read(folder / "logging.jsonl"):
        if isinstance(line, dict) and (step := _step_of(line)) is not None:
            yield step, line


def _step_of(line: Line) -> int | None:
    said = str(line.get("global_step/max_steps", "")).partition("/")[0]
    return int(said) if said.isdecimal() else None


def epoch_reports(folders: Iterable[Path], last_step: int) -> dict[int, Line]:
    """The account of every epoch that was finished, by its number; in a later folder it counts."""
    found = {}
    for folder in folders:
        for path in (folder / FOLDER).glob("epoch_*.json"):
            report = read_json(path)
            # One behind the last step is of an earlier run into the same folder.
            if isinstance(report.get("epoch"), int) and report.get("global_step", 0) <= last_step:
                found[report["epoch"]] = report
    return dict(sorted(found.items()))


def checkpoints(folder: Path) -> list[Checkpoint]:
    """By their steps."""
    return [Checkpoint(step, path, _state(path)) for step, path in checkpoint_folders(folder)]


def _state(checkpoint: Path) -> Line | None:
    state = read_json(checkpoint / STATE).get("state")
    return state if isinstance(state, dict) else None


def left_out_lists(folders: Iterable[Path]) -> list[Path]:
    """Those that there are."""
    return [path for folder in folders if (path := folder / FOLDER / left_out_list.FILE).is_file()]


def left_out_rows(paths: Iterable[Path]) -> list[Line]:
    """Every row that is left out of an epoch, once."""
    found: dict[tuple[str, int | None, str], Line] = {}
    for line in (line for path in paths for line in left_out_list.listed(path)):
        found.setdefault((line["id"], line["epoch"], line["reason"]), line)
    return list(found.values())
