"""Find a run on disk, and read the files of its folder other than the logs: epoch reports and arguments.

    output_dir/
        args.json               ms-swift's options
        logging.jsonl           ms-swift's log (losses.py)
        vlpack/run.jsonl        events of the run (events.py, segments.py)
        vlpack/epoch_0.json     the account of every finished epoch
        vlpack/left_out.jsonl   rows that are trained in no pack (left_out.py)
        vlpack/packs_rank0.jsonl  packs as they were trained, of each rank (pack_log.py)
        checkpoint-100/vlpack_state.json  the state of the data; a checkpoint that has it is complete

Nothing here needs torch or ms-swift, so that `vlpack report` answers at once.
"""

from __future__ import annotations

import json
import re
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
            f"{given} is no run: it has neither {FOLDER}/ nor {LOG}, and no version folder (v0-...) that has; name the "
            "output_dir of a training run"
        )
    return RunFolder(versions[-1], tuple(path.name for path in versions[:-1]))


def _is_run(path: Path) -> bool:
    return (path / FOLDER).is_dir() or (path / LOG).is_file()


def _is_version(path: Path) -> bool:
    return _VERSION.fullmatch(path.name) is not None


def _age(version: Path) -> tuple[int, str]:
    match = _VERSION.fullmatch(version.name)
    return int(match[1]) if match else 0, version.name


def epoch_reports(folder: Path, last_step: int) -> dict[int, dict[str, Any]]:
    """Read the account of every finished epoch, by its number."""
    reports = map(read_json, (folder / FOLDER).glob("epoch_*.json"))
    # A report of a later step is a leftover of an earlier run in the same folder.
    found = {one["epoch"]: one for one in reports if "epoch" in one and one.get("global_step", 0) <= last_step}
    return dict(sorted(found.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file; return an empty one if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}
