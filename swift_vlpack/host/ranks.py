"""What the ranks of a run tell each other: small facts, never data."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import swift
import torch
import torch.distributed as dist
import transformers
from swift.utils import get_dist_setting

import swift_vlpack
from swift_vlpack.comm import Comm
from swift_vlpack.config import RESUME_DATA, RESUME_FILES, PackingConfig
from swift_vlpack.envelope import differing_fields, shown_value
from swift_vlpack.errors import VLPackError
from swift_vlpack.feed.waiting import waiting
from swift_vlpack.host.checkpoint_files import digest_of_file

Result = TypeVar("Result")

OF_A_MACHINE = (
    *("local_rank", "device", "max_memory", "use_cpu", "dataloader_", "load_from_cache_file", "download_mode"),
    *("log_level", "disable_tqdm", "run_name", "report_to", "project", "trackio_", "swanlab_", "ray_"),
    *("hub_", "push_to_hub", "use_hf", "local_repo_path", "check_model", "ignore_args_error"),
)
"""Prefixes of options that may differ between ranks: devices, processes, logs, hubs."""
OF_A_MACHINE_AT_THE_END = ("_token", "_dir", "_num_proc")
"""Suffixes of options that may differ between ranks: secrets, output paths, processes."""
COMPARED_BY_CONTENT = (
    *("model", "dataset", "val_dataset", "custom_dataset_info", "fusion_config", "resume_from_checkpoint"),
)
"""Paths that may differ between machines: parameters, rows and checkpoints are compared instead."""
NUM_PARAMETERS_NAMED = 3
_counted_as: ContextVar[int | None] = ContextVar("counted_as", default=None)


class RankFailed(VLPackError):
    """Another rank has failed, so this one stops too."""


class RanksDiffer(VLPackError):
    """The ranks would train on different data."""


@contextmanager
def counted_as(num_ranks: int) -> Iterator[None]:
    """Make one process count as a run of so many ranks, which is how a plan is made for it."""
    token = _counted_as.set(num_ranks)
    try:
        yield
    finally:
        _counted_as.reset(token)


def num_ranks_of_run() -> int:
    """Ranks that the packs are shared by: those that were launched, or those that a plan is made for."""
    # Those that were launched, as `torch.distributed` may not be there yet when a plan is made.
    return _counted_as.get() or max(1, get_dist_setting()[2])


def num_ranks() -> int:
    """Processes that take part, 1 without torch.distributed."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process."""
    return int(dist.get_rank()) if num_ranks() > 1 else 0


def gathered(mine: Any, what: str = "what every rank found") -> list[Any]:
    """What every rank gives, in order of rank; all of them have to call it."""
    everyone: list[Any] = [mine]
    if num_ranks() > 1:
        everyone = [None] * num_ranks()
        with waiting(what):
            dist.all_gather_object(everyone, mine)
    return everyone


def results_of_all(work: Callable[[], Result], what: str = "what every rank found") -> list[Result]:
    """Do the work on every rank and give everyone all results; where it fails on one, all stop instead of waiting."""
    mine: Any = None
    error: Exception | None = None
    try:
        mine = work()
    except Exception as caught:
        error = caught
    # The text and not the error: some do not survive pickle, and then nobody would hear of any.
    everyone = gathered((mine, None if error is None else f"{type(error).__name__}: {error}"), what)
    # Its own first, with its traceback; the others say which rank it was.
    if error is not None:
        raise error
    for other, (_, said) in enumerate(everyone):
        if said is not None:
            raise RankFailed(f"rank {other} failed: {said}")
    return [result for result, _ in everyone]


class RanksOfRun:
    """The ranks that torch.distributed knows."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return rank()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return num_ranks()

    def results_of_all(self, work: Callable[[], Result]) -> list[Result]:
        """Do the work on every rank. Returns the results of all ranks, in order of rank."""
        return results_of_all(work)


def check_equal(what: str, mine: Mapping[str, Any]) -> None:
    """Stop on every rank, naming what differs, unless all ranks have the same."""
    refuse_differences(what, gathered(dict(mine), what))


def refuse_differences(what: str, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RanksDiffer`, naming what differs, unless all ranks gave the same values."""
    first, *others = everyone
    for other, theirs in enumerate(others, start=1):
        if names := differing_fields(first, theirs):
            shown = "; ".join(f"{name}: {shown_value(first, name)} and {shown_value(theirs, name)}" for name in names)
            raise RanksDiffer(
                f"ranks 0 and {other} do not agree on the {what}: {shown}. "
                "Give all ranks the same files, versions and options"
            )


def check_same_parameters(model: Any, comm: Comm) -> None:
    """Stop on every rank, naming some of what differs, unless the models have the same parameters to train."""
    mine = {
        name: f"{list(parameter.shape)} {parameter.dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in model.named_parameters()
    }
    # Digests first: the names of all parameters, from all ranks, are only needed where something differs.
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


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide about packs and steps."""
    return {package.__name__: package.__version__ for package in (swift_vlpack, swift, transformers)}


def options_of_run(args: Any, config: PackingConfig) -> dict[str, Any]:
    """Return all options of packing and training, without those that may differ between machines.

    A rank with other steps, batches or another loss would leave the others waiting for ever.
    """
    options = {**vars_of(args.training_args), **vars_of(args), **vars_of(config)}
    compared = {name: content_of(value) for name, value in options.items() if _is_common(name)}
    return {**compared, **{variable: os.environ.get(variable) for variable in (RESUME_DATA, RESUME_FILES)}}


def vars_of(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass by field, without attributes that were set beside the fields."""
    return {spec.name: getattr(options, spec.name, None) for spec in dataclasses.fields(options)}


def _is_common(name: str) -> bool:
    is_of_machine = name.startswith(OF_A_MACHINE) or name.endswith(OF_A_MACHINE_AT_THE_END)
    return not is_of_machine and name not in COMPARED_BY_CONTENT


def content_of(value: Any) -> Any:
    """Return a value as plain data to compare; a file becomes its digest, because paths may differ between machines."""
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
        return "a folder" if path.is_dir() else f"a file of digest {digest_of_file(path)}" if path.is_file() else text
    except OSError:  # too long for a path
        return text


def tolerate_packs_without_images(model: Any, training_args: Any) -> None:
    """Let a rank whose pack has no image train beside one whose pack has, where the vision tower is trained.

    DDP waits for a gradient of every parameter unless it is told to look which were used. The trainer does not tell it
    so under gradient checkpointing, which with `use_reentrant` could not bear it; ms-swift sets that off under DDP.
    """
    checkpointing = training_args.gradient_checkpointing_kwargs or {}
    if (
        num_ranks() > 1
        and training_args.ddp_find_unused_parameters is None
        and not checkpointing.get("use_reentrant")
        and _trains_vision(model)
    ):
        training_args.ddp_find_unused_parameters = True


def _trains_vision(model: Any) -> bool:
    arch = model.model_meta.model_arch
    parts = [*getattr(arch, "vision_tower", ()), *getattr(arch, "aligner", ())]
    return any(
        parameter.requires_grad and any(part in name for part in parts) for name, parameter in model.named_parameters()
    )
