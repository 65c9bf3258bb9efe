"""The folder of a run, whatever of it is named: the folder itself, the one above its versions, or a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.run_log import FOLDER

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_VERSION = re.compile(r"v(\d+)-.+")
_LOG = "logging.jsonl"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run is."""

    path: Path
    others: tuple[str, ...] = ()
    """Names of other versions beside it, which were not asked for."""


def find_run(given: Path) -> RunFolder:
    """The run that is meant; of several versions (`v0-20260131-120000`) the newest."""
    if not given.is_dir():
        raise ConfigError(f"{given}: no such directory; name the output_dir of a training run")
    # First: a checkpoint has the arguments of its run beside it, and looks like one.
    if CHECKPOINT.fullmatch(given.resolve().name) and is_run(given.resolve().parent):
        return RunFolder(given.resolve().parent)
    if is_run(given):
        return RunFolder(given)
    versions = sorted((path for path in given.iterdir() if _version(path) is not None and is_run(path)), key=_age)
    if not versions:
        raise ConfigError(
            f"{given} is no run: it has neither {FOLDER}/ nor {_LOG} nor a checkpoint, and no version folder (v0-...) "
            "that has; name the output_dir of a training run"
        )
    return RunFolder(versions[-1], tuple(path.name for path in versions[:-1]))


def is_run(path: Path) -> bool:
    """Whether training has written there."""
    return (path / FOLDER).is_dir() or (path / _LOG).is_file() or bool(checkpoint_folders(path))


def checkpoint_folders(path: Path) -> list[tuple[int, Path]]:
    """Checkpoints by their steps."""
    found = [(CHECKPOINT.fullmatch(below.name), below) for below in path.iterdir()] if path.is_dir() else []
    # A link is another name of a folder that is there too.
    steps = [(int(match[1]), below) for match, below in found if match and below.is_dir() and not below.is_symlink()]
    return sorted(steps)


def _version(path: Path) -> int | None:
    match = _VERSION.fullmatch(path.name)
    return int(match[1]) if match else None


def _age(path: Path) -> tuple[int, str]:
    return _version(path) or 0, path.name
