"""`vlpack plan` for a run of `swift sft` or `swift pt`: what it would train on, by its functions, without weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.utils import get_logger

from swift_vlpack.cli.plan_text import plan_text
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.data_report import data_report, left_out_rows, size_of_step
from swift_vlpack.feed.planned import left_out_by, left_out_warning
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.host.run import feed_of, run_of
from swift_vlpack.plan.report import plan_report
from swift_vlpack.plan.resume_schedule import num_steps as num_steps_of
from swift_vlpack.rows.families import merge_size
from swift_vlpack.runlog.left_out_list import listed
from swift_vlpack.words import counted

logger = get_logger()


def main(settings: Mapping[str, Any], command: str, options: Sequence[str]) -> int:
    """Plan and write the report, as JSON or text, to the file of that number."""
    report = training_report(
        options, num_ranks=settings["num_ranks"], failures_file=Path(settings["failures"]), command=command
    )
    with open(settings["report"], "w", encoding="utf-8") as file:
        file.write((json.dumps(report) if settings["form"] == "json" else plan_text(report)) + "\n")
    return 0


def training_report(
    argv: Sequence[str], *, num_ranks: int, failures_file: Path, command: str = "sft"
) -> dict[str, Any]:
    """What ms-swift's command with the options on so many ranks would train on; rows that cannot be go into a file."""
    start = time.perf_counter()
    _check_list(failures_file)
    with run_of(argv, num_ranks=num_ranks, command=command) as run:
        feed, seconds = feed_of(run)
    epoch = feed.epoch_plan
    num_listed = _write_list(feed, failures_file)
    if warning := left_out_warning(epoch, left_out_by(epoch, feed.dataset), feed.config):
        logger.warning(f"packing: {warning}")
    report = plan_report(epoch.unshared, epoch.packs, num_rows=epoch.num_rows, seconds=time.perf_counter() - start)
    return {
        **report,
        **data_report(epoch, feed.dataset, merge_size(run.template)),
        **_steps(feed, run.args),
        "failures_file": str(failures_file) if num_listed else None,
        **seconds,
    }


def _steps(feed: PlannedFeed, args: Any) -> dict[str, Any]:
    """Steps by the arithmetic of Hugging Face's Trainer, where an epoch ends with a step whatever has accumulated."""
    accumulation = args.training_args.gradient_accumulation_steps
    steps_per_epoch = num_steps_of(feed.epoch_plan.packs.num_packs_per_rank, accumulation)
    num_epochs = math.ceil(args.num_train_epochs)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    if args.max_steps > 0:
        num_steps = args.max_steps
        num_epochs = math.ceil(num_steps / steps_per_epoch)
    return {
        "num_epochs": num_epochs,
        "packs_per_epoch": len(feed.epoch_plan),
        "gradient_accumulation_steps": accumulation,
        "steps_per_epoch": steps_per_epoch,
        "num_steps": num_steps,
        "step": size_of_step(feed.epoch_plan, accumulation=accumulation).as_json(),
    }


def _check_list(path: Path) -> None:
    """Before anything is measured: the list of rows that are left out must not take the place of something else."""
    if path.exists() and path.stat().st_size and not any(listed(path)):
        raise ConfigError(f"{path} is no list of rows that were left out; name another file with --failures")


def _write_list(feed: PlannedFeed, path: Path) -> int:
    """One JSON object a line for every row that is left out; no file where there are none, nor an earlier one."""
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in left_out_rows(feed.epoch_plan, feed.dataset)]
    try:
        if lines:
            path.write_text("".join(lines), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:  # not fatal, because the report took a whole length pass
        lost = counted(len(lines), "left-out row")
        logger.error(
            f"packing: {path} cannot be written ({error.strerror}), so the list of {lost} is missing; name another "
            "file with --failures"
        )
        return 0
    return len(lines)
