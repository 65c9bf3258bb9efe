"""What a run leaves in its output directory, by name, for those who come later and load neither torch nor ms-swift."""

from __future__ import annotations

from pathlib import Path

ARGS = "args.json"
"""ms-swift's options, all of them."""
LOG = "logging.jsonl"
"""ms-swift's log."""
BEGUN = "begun.jsonl"
"""Where every epoch was begun or resumed; in the folder that `runlog/run_log.py` names."""
STATE = "vlpack_state.json"
"""Of the data, in every checkpoint that is complete."""
ROWS = "vlpack_rows.npz"
"""Sizes and digests of the rows, in every checkpoint."""
_CHECKPOINT = "checkpoint-"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run, by optimizer step; of a checkpoint by itself, that one."""
    found = [path for path in (folder, *folder.glob(f"{_CHECKPOINT}*")) if (path / STATE).is_file()]
    steps = {path: path.name.removeprefix(_CHECKPOINT) for path in found if not path.is_symlink()}
    return sorted((int(step), path) for path, step in steps.items() if step.isdecimal())
