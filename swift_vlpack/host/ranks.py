"""What the ranks of a run tell each other: small facts, never data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, TypeVar

import swift
import torch.distributed as dist
import transformers
from swift.utils import get_dist_setting

import swift_vlpack
from swift_vlpack.core.config import RESUME_DATA, PackingConfig
from swift_vlpack.core.envelope import differing_fields
from swift_vlpack.core.errors import VLPackError
from swift_vlpack.data.waiting import waiting

Result = TypeVar("Result")

OF_A_MACHINE = (
    *("local_rank", "dataloader_", "dataset_num", "packing_num", "log_level", "disable_tqdm", "run_name", "hub_"),
    *("push_to_hub", "model", "device", "fusion_config", "swanlab_", "use_cpu", "resume_from_checkpoint", "report_to"),
    *("trackio_", "ray_", "project", "check_model", "use_hf", "local_repo_path", "load_from_cache_file"),
)
"""Beginnings of names of options that ranks may have each for itself: paths, devices, processes, logs, secrets."""
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


def check_equal(what: str, mine: Mapping[str, Any]) -> None:
    """Stop on every rank, naming what differs, unless all ranks have the same."""
    first, *others = gathered(dict(mine), what)
    for other, theirs in enumerate(others, start=1):
        if names := differing_fields(first, theirs):
            shown = "; ".join(f"{name}: {first.get(name)!r} and {theirs.get(name)!r}" for name in names)
            raise RanksDiffer(
                f"ranks 0 and {other} do not agree on the {what}: {shown}. "
                "Give all ranks the same files, versions and options"
            )


def versions() -> dict[str, str]:
    """What decides about packs and steps beside the data."""
    return {package.__name__: package.__version__ for package in (swift_vlpack, swift, transformers)}


def options_of_run(args: Any, config: PackingConfig) -> dict[str, Any]:
    """All packing options, and all options of training with a plain value, but for those a machine may have of its own.

    A rank with other steps, other batches or another loss would let the others wait for ever.
    """
    options: dict[str, Any] = {name: value for name, value in vars_of(config).items() if _is_common(name, value)}
    # Of a name that both have ms-swift's own counts: it is what was asked for.
    for name, value in {**vars_of(args.training_args), **vars_of(args)}.items():
        value = value.value if isinstance(value, Enum) else value
        if isinstance(value, (bool, int, float, str, type(None))) and _is_common(name, value):
            options.setdefault(name, value)
    return {**options, RESUME_DATA: os.environ.get(RESUME_DATA)}


def vars_of(options: Any) -> dict[str, Any]:
    """The fields of a data class, which have no value of their own making beside them."""
    return {spec.name: getattr(options, spec.name, None) for spec in dataclasses.fields(options)}


def _is_common(name: str, value: Any) -> bool:
    is_of_machine = name.startswith(OF_A_MACHINE) or name.endswith(("_token", "_dir", "_num_proc"))
    # Paths differ from machine to machine, and what they lead to is compared by its content.
    return not is_of_machine and not (isinstance(value, str) and os.sep in value)


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
