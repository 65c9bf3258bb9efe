"""Read from an output directory how its run was started: flags and variables that give the same packs again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.cli.in_run import is_in_run
from swift_vlpack.config import option_names
from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.folder import ARGS, STATE, checkpoints, find_run
from swift_vlpack.runlog.segments import segments_of

OF_ROWS = (
    *("model", "model_type", "model_revision", "task_type", "torch_dtype", "new_special_tokens", "max_model_len"),
    *("rope_scaling", "local_repo_path", "model_kwargs", "external_plugins", "custom_register_path", "use_hf"),
    *("dataset", "val_dataset", "split_dataset_ratio", "data_seed", "dataset_num_proc", "dataset_shuffle", "streaming"),
    *("cached_dataset", "cached_val_dataset"),
    *("stopping_strategy", "shuffle_buffer_size", "columns", "strict", "remove_unused_columns", "model_name"),
    *("model_author", "custom_dataset_info", "disable_auto_column_mapping"),
    *("template", "system", "max_length", "truncation_strategy", "max_pixels", "agent_template", "norm_bbox"),
    *("use_chat_template", "padding_side", "loss_scale", "is_binary_loss_scale", "template_backend", "response_prefix"),
    *("enable_thinking", "preserve_thinking", "add_non_thinking_prefix", "disable_ignore_empty_think"),
    *("seed", "train_dataloader_shuffle", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
    *("per_device_train_batch_size", "dataloader_num_workers", "tuner_type"),
    *("packing", "packing_length", "packing_strategy"),
)
"""ms-swift's options that decide rows, packs and steps. `vlpack inspect --run` takes these from the run, no others."""


class RunOptions(NamedTuple):
    """The flags, variables and number of ranks that give the packs of a run again."""

    flags: list[str]
    variables: dict[str, str]
    num_ranks: int


def run_named(given: Path) -> Path:
    """Return the given folder, or the newest run in it: ms-swift makes a version folder (`v0-...`) for each run."""
    if (given / ARGS).is_file() or not given.is_dir():
        return given
    try:
        run = find_run(given)
    except ConfigError:
        return given  # its checkpoints may have arguments; if not, `run_options` says what is missing
    if run.others and not is_in_run():  # print once: a command about a run is executed twice (`in_run.py`)
        print(f"the newest of {len(run.others) + 1} runs there: {run.path}", file=sys.stderr)
    return run.path


def run_options(folder: Path) -> RunOptions:
    """Return how the run of an output directory, or of one checkpoint by itself, was started.

    Raises `ConfigError` if the folder has no arguments of a run.
    """
    args = _args_of(folder)
    segments = segments_of(folder)
    start = segments[-1].start if segments else {}
    options = start["options"] if "options" in start else _options_of_checkpoints(folder)
    given = {name: args[name] for name in OF_ROWS if args.get(name) not in (None, [], {})}
    if "fusion_config" in options:  # its sources replaced `dataset`, which args.json names all the same
        given.pop("dataset", None)
    own = {name: value for name, value in options.items() if name in option_names() and value is not None}
    flags = [part for name, value in {**given, **own}.items() for part in _flag(name, value)]
    num_ranks = start.get("num_ranks") or args.get("global_world_size") or 1
    return RunOptions(flags, dict(start.get("variables", {})), int(num_ranks))


def _args_of(folder: Path) -> dict[str, Any]:
    """Read ms-swift's arguments of the run, from the folder itself or from its newest complete checkpoint."""
    if not folder.is_dir():
        raise ConfigError(f"--run {folder}: no such directory; name the output_dir of a run")
    newest_first = reversed(checkpoints(folder))
    for path in (folder / ARGS, *(one.path / ARGS for one in newest_first if one.is_complete)):
        if path.is_file():
            try:
                args: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(
                    f"{path}: damaged: {error}; say with --config what the run was started with"
                ) from None
            return args
    inside = sorted(path.parent for path in folder.glob(f"*/{ARGS}"))
    hint = (
        f"; did you mean {inside[-1]}?" if inside else "; name the output_dir of a run, which ms-swift writes it into"
    )
    raise ConfigError(f"--run {folder} has no {ARGS}{hint}")


def _options_of_checkpoints(folder: Path) -> Mapping[str, Any]:
    """Return the options that decide who shares a pack, from the newest complete checkpoint."""
    for checkpoint in reversed(checkpoints(folder)):
        if checkpoint.is_complete:
            state = json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
            fingerprint: Mapping[str, Any] = state["fingerprint"]
            return fingerprint
    return {}


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    return [f"--{name}", str(text).lower() if isinstance(text, bool) else str(text)]
