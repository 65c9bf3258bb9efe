"""Check, before anything is loaded, that all ranks have the same options and the same whole checkpoint.

This is the earliest point at which ranks can exchange data. A rank that differs would load another model, hang the run,
or silently train on its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.utils import get_logger, is_master

from swift_vlpack.comm import Comm
from swift_vlpack.config import REPLACED, RESUME_FILES, PackingConfig
from swift_vlpack.envelope import differing_fields, shown_value
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.files import hold
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.checkpoint_files import damages
from swift_vlpack.host.ranks import RanksOfRun
from swift_vlpack.host.same_on_ranks import check_equal, options_of_run, refuse_differences, vars_of, versions
from swift_vlpack.host.state import FILE, read_envelope, read_trainer_state, wants_restart
from swift_vlpack.words import counted

logger = get_logger()

OF_A_NODE = ("log_history", "best_model_checkpoint", "is_local_process_zero", "is_world_process_zero")
"""Fields of `trainer_state.json` that may differ between nodes, because they hold times and paths."""
_PART_OF_DEEPSPEED = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
"""The name that DeepSpeed gives to the part of the optimizer that a rank saves."""
_GIVEN_BY = {"DeepSpeed": "--deepspeed", "FSDP": "--fsdp", "DDP": "neither --deepspeed nor --fsdp"}
NUM_DAMAGES_NAMED = 5
DECIDING = (
    *("loss_", "is_binary_loss_scale", "label_smoothing_factor", "enable_dft_loss", "router_aux_loss_coef", "neftune_"),
    *("template", "truncation_strategy", "system", "agent_template", "response_prefix", "norm_bbox"),
    *("max_pixels", "use_chat_template", "enable_thinking", "preserve_thinking", "add_non_thinking_prefix"),
    *("disable_ignore_empty_think", "tuner_type", "freeze_", "trainable_", "lora_", "use_rslora", "use_dora"),
    *("target_", "modules_to_save", "optim", "lr_", "learning_rate", "vit_lr", "aligner_lr", "lorap_lr_ratio"),
    *("weight_decay", "adam_", "warmup_", "max_grad_norm"),
)
"""Beginnings of ms-swift's options that decide what is trained, and how."""


def start_together(args: Any) -> None:
    """Raise on every rank, before a model is loaded, if this run cannot start.

    Ranks differ, another run has the output folder, or files of the checkpoint are not whole.
    """
    config = packing_config(args)
    check_equal("versions and options", {**versions(), **options_of_run(args, config)})
    # Two runs in one folder would mix their checkpoints file by file, each whole by its own account.
    RanksOfRun().results_of_all(lambda: hold(Path(args.output_dir), "trains into") if is_master() else None)
    checkpoint = Path(args.resume_from_checkpoint) if args.resume_from_checkpoint else None
    needs_state = not (args.ignore_data_skip or wants_restart(os.environ))
    saved = check_checkpoint(checkpoint, RanksOfRun(), needs_state=needs_state)
    if checkpoint is not None and not args.resume_only_model:
        check_deepspeed(checkpoint, args.deepspeed, RanksOfRun())
    if checkpoint is not None and is_master():
        _warn_of_changes(checkpoint, args, config, saved)


def check_checkpoint(checkpoint: Path | None, comm: Comm, *, needs_state: bool = True) -> dict[str, Any] | None:
    """Compare the checkpoint between ranks, then its files with their records. Returns our saved state, if any."""
    both = comm.results_of_all(lambda: _facts_of(checkpoint, needs_state))
    refuse_differences("checkpoint to resume from", [facts for facts, _ in both])
    saved = both[comm.rank][1]
    if checkpoint is not None and saved is not None:
        _check_files(checkpoint, saved["state"].get("files", {}), comm)
    return saved


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


def _check_files(checkpoint: Path, records: Mapping[str, Any], comm: Comm) -> None:
    if _are_replaced(os.environ):
        if is_master():
            logger.warning(f"{RESUME_FILES}={REPLACED}: files of {checkpoint} are not compared with what was written")
        return
    if found := damages(checkpoint, records, comm):
        more = len(found) - NUM_DAMAGES_NAMED
        said = "; ".join(found[:NUM_DAMAGES_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise StateMismatch(
            f"{said}. Resume from an earlier checkpoint, or copy this one again; if you replaced a file on purpose, "
            f"set {RESUME_FILES}={REPLACED}"
        )


def _are_replaced(environ: Mapping[str, str]) -> bool:
    given = environ.get(RESUME_FILES, "")
    wish = given.strip().lower()
    if wish not in ("", REPLACED):
        raise ConfigError(f"{RESUME_FILES} can only be {REPLACED}, got {given!r}; without it all files are compared")
    return wish == REPLACED


def _warn_of_changes(checkpoint: Path, args: Any, config: PackingConfig, saved: Mapping[str, Any] | None) -> None:
    """Warn of options that decide what is trained and are others than those of the checkpoint, with both values."""
    try:
        then = json.loads((checkpoint / "args.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # ms-swift says so where it needs the file
        then = {}
    now = {name: value for name, value in vars_of(args).items() if name.startswith(DECIDING) and name in then}
    if saved is not None:  # other packing options of these are refused, unless the data starts anew
        then, now = {**then, **saved["fingerprint"]}, {**now, **config.objective()}
    if names := differing_fields({name: then.get(name) for name in now}, now):
        said = ", ".join(f"{name} ({shown_value(then, name)}, now {shown_value(now, name)})" for name in names)
        logger.warning(
            f"{checkpoint} was written with another {said}; the new values count, but for those that the saved adapter "
            "and optimizer have of their own"
        )


def check_engine(checkpoint: Path, engine: str, comm: Comm) -> None:
    """Refuse a checkpoint whose optimizer this engine would not load: transformers may go on with a new one."""
    for found in set(comm.results_of_all(lambda: engine_of(checkpoint))) - {engine}:
        only_model = "--resume_only_model true: the data goes on, with the saved weights and a new optimizer"
        if found is None:
            raise ConfigError(
                f"{checkpoint} has no optimizer and schedule (--save_only_model true saves none); resume from a "
                f"checkpoint that has them, or give {only_model}"
            )
        if found == "FSDP":
            only_model = "its weights, which `accelerate merge-weights` joins, to a new run"
        raise ConfigError(
            f"{checkpoint} has the optimizer of {found}, which {engine} cannot load; train with {_GIVEN_BY[found]}, or "
            f"give {only_model}"
        )


def engine_of(checkpoint: Path) -> str | None:
    """Return the engine whose optimizer is in a checkpoint; None if there is none, or no schedule with it."""
    if any(checkpoint.glob("global_step*")):
        return "DeepSpeed"
    if not (checkpoint / "scheduler.pt").is_file():
        return None
    if any(path.is_dir() for path in checkpoint.glob("optimizer*")) or (checkpoint / "optimizer.bin").is_file():
        return "FSDP"
    return "DDP" if (checkpoint / "optimizer.pt").is_file() else None


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
