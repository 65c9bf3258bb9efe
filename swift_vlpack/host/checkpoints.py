"""The order on disk: a checkpoint is whole and safe there before an older one goes."""

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
    """While the trainer saves, let it delete no checkpoint; it would do so before the new one is complete."""
    limit, training_args.save_total_limit = training_args.save_total_limit, None
    try:
        yield
    finally:
        training_args.save_total_limit = limit


def save_training_args(checkpoint: Path, training_args: Any) -> None:
    """Once more, as the trainer does: what it saved just now had the limit of checkpoints taken out."""
    if (checkpoint / TRAINING_ARGS_NAME).exists():
        torch.save(training_args, checkpoint / TRAINING_ARGS_NAME)


def sync(checkpoint: Path) -> None:
    """Wait until all that is in a checkpoint is on the disk, where a crash of the machine cannot reach it."""
    try:
        sync_tree(checkpoint)
    except OSError as error:
        raise StateNotSaved(
            f"{checkpoint} cannot be brought to the disk: {error}. Mend the output directory and resume from an "
            "earlier checkpoint"
        ) from error


def rotate(current: Path, limit: int | None, best: str | None) -> None:
    """Delete checkpoints until `limit` are left, incomplete ones first, then the oldest; never this or the best one."""
    if limit is None or limit <= 0:
        return
    kept = {current.resolve()} | ({Path(best).resolve()} if best else set())
    found = [path for path in current.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step(path) is not None]
    # A link is somebody's own name for a folder, which may be elsewhere.
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    older = sorted((path for path in found if path.resolve() not in kept), key=_age)
    # The best one counts in the limit; with a limit of 1 it is kept all the same, beside the present one.
    for checkpoint in older[: max(0, len(found) - max(limit, len(kept)))]:
        with suppress(OSError):  # one that is half deleted must not look complete
            (checkpoint / FILE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def _age(checkpoint: Path) -> tuple[bool, float, int]:
    """Numbers are not enough: a run that was resumed from an earlier step has newer checkpoints with lower ones."""
    return (checkpoint / FILE).is_file(), checkpoint.stat().st_mtime, _step(checkpoint) or 0


def _step(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() else None
