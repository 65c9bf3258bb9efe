"""Delete older checkpoints only when the new one is complete and flushed to the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from swift_vlpack.files import sync_tree
from swift_vlpack.host.state import FILE, StateNotSaved


@contextmanager
def nothing_deleted(training_args: Any) -> Iterator[None]:
    """Keep the trainer from deleting checkpoints while it saves, because the new one is not complete yet."""
    limit, training_args.save_total_limit = training_args.save_total_limit, None
    try:
        yield
    finally:
        training_args.save_total_limit = limit


def save_training_args(checkpoint: Path, training_args: Any) -> None:
    """Save the arguments again: the trainer saved them while `nothing_deleted` had removed the limit."""
    if (checkpoint / TRAINING_ARGS_NAME).exists():
        torch.save(training_args, checkpoint / TRAINING_ARGS_NAME)


def sync(checkpoint: Path) -> None:
    """Flush a checkpoint to the disk, so that it survives a crash of the machine."""
    try:
        sync_tree(checkpoint)
    except OSError as error:
        raise StateNotSaved(
            f"{checkpoint} cannot be flushed to the disk: {error}. Repair the output directory and resume from an "
            "earlier checkpoint"
        ) from error


def rotate(current: Path, limit: int | None, best: str | None) -> None:
    """Delete checkpoints until `limit` are left: incomplete ones first, then the oldest; never `current` or `best`."""
    if limit is None or limit <= 0:
        return
    kept = {current.resolve()} | ({Path(best).resolve()} if best else set())
    found = [path for path in current.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step(path) is not None]
    # Leave links alone: a user made them, and the folder may be elsewhere.
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    older = sorted((path for path in found if path.resolve() not in kept), key=_age)
    # The best checkpoint counts in the limit, but with a limit of 1 it is kept beside the present one.
    for checkpoint in older[: max(0, len(found) - max(limit, len(kept)))]:
        with suppress(OSError):  # delete the state first, so that a half-deleted checkpoint does not look complete
            (checkpoint / FILE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def _age(checkpoint: Path) -> tuple[bool, float, int]:
    """Return a key that sorts incomplete checkpoints first, then by time: a resume may write lower steps later."""
    return (checkpoint / FILE).is_file(), checkpoint.stat().st_mtime, _step(checkpoint) or 0


def _step(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() else None
