"""Check, before anything is loaded, that all ranks have the same options and the same checkpoint.

This is the earliest point at which ranks can exchange data. A rank that differs would load another model, hang the run,
or silently train on its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.utils import get_logger, is_master

from swift_vlpack.comm import Comm
from swift_vlpack.envelope import check_fingerprint
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.files import hold
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.objective import objective_of, refused_values
from swift_vlpack.host.ranks import RanksOfRun
from swift_vlpack.host.same_on_ranks import check_equal, options_of_run, refuse_differences, versions
from swift_vlpack.host.state import FILE, read_envelope, read_trainer_state, refused, wants_restart
from swift_vlpack.words import counted

logger = get_logger()

OF_A_NODE = ("log_history", "best_model_checkpoint", "is_local_process_zero", "is_world_process_zero")
"""Fields of `trainer_state.json` that may differ between nodes, because they hold times and paths."""
_PART_OF_DEEPSPEED = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
"""The name that DeepSpeed gives to the part of the optimizer that a rank saves."""


def start_together(args: Any) -> None:
    """Raise on every rank if ranks differ, or another run has the output folder, before a model is loaded."""
    config = packing_config(args)
    check_equal("versions and options", {**versions(), **options_of_run(args, config)})
    # Two runs in one folder would mix their checkpoints file by file, each whole by its own account.
    RanksOfRun().results_of_all(lambda: hold(Path(args.output_dir), "trains into") if is_master() else None)
    checkpoint = Path(args.resume_from_checkpoint) if args.resume_from_checkpoint else None
    needs_state = not (args.ignore_data_skip or wants_restart(os.environ))
    saved = check_checkpoint(checkpoint, RanksOfRun(), needs_state=needs_state)
    if checkpoint is not None and not args.resume_only_model:
        check_deepspeed(checkpoint, args.deepspeed, RanksOfRun())
    if checkpoint is not None and saved is not None:
        # Compare objectives now: a checkpoint with other parameters could not even be loaded into the model.
        objective = {**config.objective(), **objective_of(args)}
        then = {name: value for name, value in saved["fingerprint"].items() if name in objective}
        try:
            with refused(checkpoint / FILE):
                check_fingerprint(saved["kind"], *refused_values(then, objective))
        except StateMismatch as error:
            if needs_state:
                raise
            if is_master():
                logger.warning(f"the data starts anew and the optimizer continues, with another objective: {error}")


def check_checkpoint(checkpoint: Path | None, comm: Comm, *, needs_state: bool = True) -> dict[str, Any] | None:
    """Compare the checkpoint between ranks. Returns our saved state, if any."""
    both = comm.results_of_all(lambda: _facts_of(checkpoint, needs_state))
    refuse_differences("checkpoint to resume from", [facts for facts, _ in both])
    return both[comm.rank][1]


def _facts_of(checkpoint: Path | None, needs_state: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return (facts that must be equal on all ranks, our saved state or None)."""
    if checkpoint is None:
        return {"--resume_from_checkpoint": "not given"}, None
    trainer_state = read_trainer_state(checkpoint)
    facts = {f"{name} of the trainer": value for name, value in trainer_state.items() if name not in OF_A_NODE}
    facts = {"--resume_from_checkpoint": "given", **facts}
    if not (needs_state or (checkpoint / FILE).is_file()):
        return {**facts, FILE: "not there"}, None
    try:
        saved = read_envelope(checkpoint)
    except StateMismatch:
        if needs_state:
            raise
        return {**facts, FILE: "damaged"}, None
    return {**facts, f"digest of {FILE}": saved["digest"]}, saved


def check_deepspeed(checkpoint: Path, deepspeed: Any, comm: Comm) -> None:
    """Refuse a checkpoint whose optimizer DeepSpeed would refuse, but only after the model is loaded.

    `deepspeed` is what `--deepspeed` says; without it nothing of DeepSpeed is loaded.
    """
    parts = set().union(*comm.results_of_all(lambda: deepspeed_parts(checkpoint)))
    is_universal = isinstance(deepspeed, Mapping) and (deepspeed.get("checkpoint") or {}).get("load_universal")
    if deepspeed and not is_universal and parts and len(parts) != comm.num_ranks:
        written, here = counted(len(parts), "rank"), counted(comm.num_ranks, "rank")
        raise ConfigError(
            f"{checkpoint} has DeepSpeed's optimizer in {counted(len(parts), 'part')}, which it loads on {written} "
            f"only, and this run has {here}; start it on {written}, or give --resume_only_model true, which goes on at "
            "the same data with the saved weights and a new optimizer"
        )


def deepspeed_parts(folder: Path) -> set[int]:
    """Return the ranks whose part of DeepSpeed's optimizer is in a checkpoint; empty for that of another engine."""
    try:
        parts = folder / (folder / "latest").read_text(encoding="utf-8").strip()  # where DeepSpeed itself looks
        return {int(found[1]) for path in parts.iterdir() if (found := _PART_OF_DEEPSPEED.search(path.name))}
    except (OSError, ValueError):
        return set()
