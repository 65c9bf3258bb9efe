"""Stop a run whose ranks differ: in versions, options, parameters or validation rows.

A rank that differs would hang the run, or silently train another model. Each check gathers plain values of all ranks,
and raises `RanksDiffer`, which names what differs:

    check_equal("data and versions", {"swift": "4.6.0", ...})
    RanksDiffer: ranks 0 and 1 do not agree on the data and versions: swift: 4.6.0 and 4.5.3. Give all ranks ...
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import swift
import torch
import transformers

import swift_vlpack
from swift_vlpack.comm import Comm
from swift_vlpack.config import RESUME_DATA, RESUME_FILES, PackingConfig
from swift_vlpack.envelope import differing_fields, shown_value
from swift_vlpack.errors import VLPackError
from swift_vlpack.feed.saved_rows import digest_of, rows_with_digest
from swift_vlpack.host.ranks import gathered
from swift_vlpack.lengths.context import MAY_DIFFER, by_name, dependencies_of
from swift_vlpack.rows.source import row_bytes, rows_in_turn

OF_A_MACHINE = (
    *("local_rank", "device", "max_memory", "use_cpu", "load_from_cache_file", "download_mode"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("log_level", "disable_tqdm", "run_name", "report_to", "project", "trackio_", "swanlab_", "ray_"),
    *("hub_", "push_to_hub", "use_hf", "local_repo_path", "check_model", "ignore_args_error"),
)
"""Prefixes of options that may differ between ranks: devices, processes, logs, hubs."""
OF_A_MACHINE_AT_THE_END = ("_token", "_dir", "_num_proc")
"""Suffixes of options that may differ between ranks: secrets, output paths, processes."""
COMPARED_BY_CONTENT = (
    *("model", "dataset", "val_dataset", "custom_dataset_info", "fusion_config", "resume_from_checkpoint"),
)
"""Options with paths that may differ between machines. Parameters, rows and checkpoints are compared instead."""
NUM_PARAMETERS_NAMED = 3
NUM_ROWS_OF_STREAM = 16
"""First rows to compare of validation rows without a length."""


class RanksDiffer(VLPackError):
    """The ranks would train on different data."""


def check_equal(what: str, mine: Mapping[str, Any]) -> None:
    """Raise `RanksDiffer` on every rank unless all ranks have equal values. All ranks must call it."""
    refuse_differences(what, gathered(dict(mine), what))


def refuse_differences(what: str, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RanksDiffer`, which names what differs, unless the values of all ranks are equal."""
    first, *others = everyone
    for other, theirs in enumerate(others, start=1):
        if names := differing_fields(first, theirs):
            shown = "; ".join(f"{name}: {shown_value(first, name)} and {shown_value(theirs, name)}" for name in names)
            raise RanksDiffer(
                f"ranks 0 and {other} do not agree on the {what}: {shown}. "
                "Give all ranks the same files, versions and options"
            )


def check_same_parameters(model: Any, comm: Comm) -> None:
    """Raise `RanksDiffer` on every rank unless the models have the same parameters, and train the same ones."""
    mine = {
        name: f"{list(parameter.shape)} {parameter.dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in model.named_parameters()
    }
    # Compare digests first: the names of all parameters are needed only if something differs.
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=8).hexdigest()
    if len({*comm.results_of_all(lambda: digest)}) == 1:
        return
    everyone = comm.results_of_all(lambda: mine)
    names = sorted({name for theirs in everyone for name in differing_fields(everyone[0], theirs)})
    refuse_differences(
        f"parameters of the model, {len(names)} of which differ",
        [{name: theirs.get(name, "not there") for name in names[:NUM_PARAMETERS_NAMED]} for theirs in everyone],
    )
    raise RanksDiffer("the ranks have the same parameters in another order. Give all ranks the same versions")


def check_same_settings(template: Any, plugins: Sequence[str]) -> dict[str, Any]:
    """Raise `RanksDiffer` on every rank unless all encode rows by the same settings. Returns these by dotted name."""
    settings = by_name({n: value for n, value in dependencies_of(template, plugins).items() if n not in MAY_DIFFER})
    check_equal("settings that rows are encoded by", settings)
    return settings


def versions() -> dict[str, str]:
    """Return the versions of the packages that packs and steps depend on."""
    return {package.__name__: package.__version__ for package in (swift_vlpack, swift, transformers)}


def options_of_run(args: Any, config: PackingConfig) -> dict[str, Any]:
    """Return the options of packing and training that must be equal on all ranks.

    A rank with other steps or batches would hang the run.
    """
    options = {**vars_of(args.training_args), **vars_of(args), **vars_of(config)}
    compared = {name: content_of(value) for name, value in options.items() if _is_common(name)}
    return {**compared, **{variable: os.environ.get(variable) for variable in (RESUME_DATA, RESUME_FILES)}}


def vars_of(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass by field. Other attributes of the object are left out."""
    return {spec.name: getattr(options, spec.name, None) for spec in dataclasses.fields(options)}


def _is_common(name: str) -> bool:
    is_of_machine = name.startswith(OF_A_MACHINE) or name.endswith(OF_A_MACHINE_AT_THE_END)
    return not is_of_machine and name not in COMPARED_BY_CONTENT


def content_of(value: Any) -> Any:
    """Return a value as plain data to compare. A path of a file becomes a digest, because paths may differ."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return _content_of_text(value)
    if isinstance(value, Mapping):
        return {str(key): content_of(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [content_of(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if dataclasses.is_dataclass(value):
        return content_of(vars_of(value))
    if isinstance(value, (bool, int, float, type(None))):
        return value
    # Other objects (a device, a class) count by type name, because their text may contain a memory address.
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _content_of_text(text: str) -> str:
    if os.sep not in text:
        return text
    path = Path(text)
    try:
        # The content of folders is compared elsewhere: parameters, rows, states of checkpoints.
        if path.is_dir():
            return "a folder"
        return f"a file of digest {_digest_of_file(path)}" if path.is_file() else text
    except OSError:  # too long for a path
        return text


def _digest_of_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while part := file.read(1024**2):
            digest.update(part)
    return digest.hexdigest()


def check_same_validation(rows: Any, comm: Comm) -> None:
    """Raise `RanksDiffer` on every rank unless all have the same validation rows, which no plan covers."""
    if comm.num_ranks > 1:
        refuse_differences("validation rows", comm.results_of_all(lambda: _validation(rows)))


def _validation(rows: Any) -> dict[str, Any]:
    if rows is None:
        return {"rows": 0}
    if hasattr(rows, "__len__"):
        seen = rows_in_turn(rows, rows_with_digest(len(rows)).tolist())
        return {"rows": len(rows), "content": digest_of(*map(row_bytes, seen))}
    return {"rows": "a stream", "content": digest_of(*map(row_bytes, islice(iter(rows), NUM_ROWS_OF_STREAM)))}
