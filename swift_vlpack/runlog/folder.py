"""Find a run on disk, and read the files of its folder other than the run log: checkpoints, epoch reports, arguments.

    output_dir/
        args.json               ms-swift's options
        logging.jsonl           ms-swift's log (losses.py)
        vlpack/run.jsonl        events of the run (events.py)
        vlpack/epoch_0.json     the account of every finished epoch
        vlpack/left_out.jsonl   rows that are trained in no pack (left_out.py)
        vlpack/packs_rank0.jsonl  packs as they were trained, where they are recorded (pack_record.py)
        checkpoint-100/vlpack_state.json  the state of the data; a checkpoint that has it is complete

Nothing here needs torch or ms-swift, so that `vlpack report` answers at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.events import FOLDER
from swift_vlpack.runlog.losses import LOG

ARGS = "args.json"
STATE = "vlpack_state.json"
ROWS = "vlpack_rows.npz"
"""Sizes and digests of the rows, in every checkpoint."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_VERSION = re.compile(r"v(\d+)-.+")


# -- the folder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run."""

    path: Path
    others: tuple[str, ...] = ()
    """Names of the older versions beside it, which are not reported."""


def find_run(given: Path) -> RunFolder:
    """Find the run of a path: the run's folder, a checkpoint in it, or the folder that holds its versions.

    ms-swift makes a version folder for each run (`v0-20260131-120000`), and the newest is taken. Raises `ConfigError`
    if there is no run.
    """
    if not given.is_dir():
        raise ConfigError(f"{given}: no such directory; name the output_dir of a training run")
    # Check for a checkpoint first: ms-swift copies the run's arguments into it, so it looks like a run itself.
    if _CHECKPOINT.fullmatch(given.resolve().name) and _is_run(given.resolve().parent):
        return RunFolder(given.resolve().parent)
    if _is_run(given):
        return RunFolder(given)
    versions = sorted((path for path in given.iterdir() if _is_version(path) and _is_run(path)), key=_age)
    if not versions:
        raise ConfigError(
            f"{given} is no run: it has neither {FOLDER}/ nor {LOG} nor a checkpoint, and no version folder (v0-...) "
            "that has; name the output_dir of a training run"
        )
    return RunFolder(versions[-1], tuple(path.name for path in versions[:-1]))


def _is_run(path: Path) -> bool:
    return (path / FOLDER).is_dir() or (path / LOG).is_file() or bool(checkpoints(path))


def _is_version(path: Path) -> bool:
    return _VERSION.fullmatch(path.name) is not None


def _age(version: Path) -> tuple[int, str]:
    match = _VERSION.fullmatch(version.name)
    return int(match[1]) if match else 0, version.name


# -- what is in it ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk."""

    step: int
    path: Path

    @property
    def is_complete(self) -> bool:
        """Tell whether a run can resume from it: the state is written last, so the other files are there too."""
        return (self.path / STATE).is_file()

    @property
    def state(self) -> dict[str, Any] | None:
        """Read the feed's state; None if it is missing or damaged."""
        state = read_json(self.path / STATE).get("state")
        return state if isinstance(state, dict) else None


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in a folder by step, complete or not. The folder may be a checkpoint itself."""
    paths = [folder, *folder.iterdir()] if folder.is_dir() else []
    found = [(_CHECKPOINT.fullmatch(path.name), path) for path in paths]
    # Skip links, such as `last-checkpoint`: the folder that they point to is in the list.
    real = [(int(match[1]), path) for match, path in found if match and path.is_dir() and not path.is_symlink()]
    return [Checkpoint(step, path) for step, path in sorted(real)]


def epoch_reports(folders: Iterable[Path], last_step: int) -> dict[int, dict[str, Any]]:
    """Read the account of every finished epoch, by its number; a report in a later folder replaces an earlier one."""
    found = {}
    for folder in folders:
        for path in (folder / FOLDER).glob("epoch_*.json"):
            report = read_json(path)
            # A report of a later step is a leftover of an earlier run in the same folder.
            if isinstance(report.get("epoch"), int) and report.get("global_step", 0) <= last_step:
                found[report["epoch"]] = report
    return dict(sorted(found.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file; return an empty one if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}
