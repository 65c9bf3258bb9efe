"""`vlpack plan`: report what training would see, from a file of lengths or from the run itself.

A file of lengths is planned with numpy alone. For a run, ms-swift's own functions make arguments, template and data, as
in training; no weights are loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_vlpack.cli.command import Command, add_packing_flags, add_run_flags
from swift_vlpack.cli.in_run import in_run
from swift_vlpack.config import PackingConfig, chosen_options
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.launch import checked_num_ranks
from swift_vlpack.host.path_checks import check_file
from swift_vlpack.host.run_flags import split_flags
from swift_vlpack.plan.length_files import read_lengths
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.report import plan_report
from swift_vlpack.rows.families import merge_size
from swift_vlpack.runlog.left_out import listed
from swift_vlpack.runlog.plan_text import plan_text
from swift_vlpack.words import by_reason, counted

if TYPE_CHECKING:
    from swift_vlpack.feed.planned_feed import PlannedFeed

logger = logging.getLogger(__name__)
LEFT_OUT_FILE = "vlpack_failures.jsonl"
"""Default of `--failures`."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="JSON list, or JSON lines (a number, or an object with length or lengths; images, patches)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="INT",
        help="seed of the order in which packs leave (default: 0, or the run's)",
    )
    add_run_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help=f"where to list the rows of a run that are left out, if there are any (default: {LEFT_OUT_FILE} in this "
        "folder)",
    )
    add_packing_flags(parser, packing_length="the run's --max_length; needed with --lengths")


def _run(args: argparse.Namespace) -> int:
    if args.lengths is not None:
        report = _lengths_report(args)
        print(json.dumps(report) if args.json else plan_text(report))
        return 0
    left_out = args.failures or Path(LEFT_OUT_FILE)
    check_file("--failures", left_out)  # now, because the length pass before it is written may take hours
    if args.seed is not None:
        args.flags = [*args.flags, "--seed", str(args.seed)]
    with in_run(args) as (run, out):
        report = training_report(run.flags, num_ranks=run.num_ranks, failures_file=left_out, command=run.command)
        print(json.dumps(report) if args.json else plan_text(report), file=out)
    return 0


def _lengths_report(args: argparse.Namespace) -> dict[str, Any]:
    """Plan a file of lengths."""
    if args.config is not None:
        raise ConfigError("both --lengths and --config say what to plan; give one of them")
    num_ranks = checked_num_ranks(1 if args.num_ranks is None else args.num_ranks)
    config = config_of(args)
    for name, needs_no_row in (("packing_overflow", "keep"), ("packing_share", "none")):
        if (value := getattr(config, name)) != needs_no_row:
            raise ConfigError(
                f"{name}={value} needs to know where the media of a row are, which lengths do not say; plan the run "
                "itself (--config), or leave it out"
            )
    lengths = read_lengths(args.lengths)
    num_rows = len(lengths.tokens)
    start = time.perf_counter()
    made = plan(lengths.tokens, config, images=lengths.images, patches=lengths.patches, seed=args.seed or 0, label=None)
    if num_rows and not len(made):
        raise DataError(
            f"nothing would be trained: {counted(num_rows, 'row')} of {num_rows} left out "
            f"({by_reason(made.num_dropped)}); raise packing_length ({config.packing_length}) or its caps"
        )
    aligned = made.align(num_ranks)
    seconds = time.perf_counter() - start
    return plan_report(made, aligned, num_rows=num_rows, seconds=seconds)


def config_of(args: argparse.Namespace) -> PackingConfig:
    """Read the packing options from flags and variables."""
    flags, others = split_flags(args.flags)
    if others:
        args.parser.error(f"unrecognized arguments: {' '.join(others)}")
    return PackingConfig.from_mapping(chosen_options(os.environ, flags=flags))


def training_report(
    flags: Sequence[str], *, num_ranks: int, failures_file: Path, command: str = "sft"
) -> dict[str, Any]:
    """Plan the run of `swift sft` or `swift pt` with these flags. Returns the report; lists left-out rows in a file."""
    from swift_vlpack.feed.epoch_report import data_report, left_out_by, left_out_warning, listing, plan_facts
    from swift_vlpack.host.run import feed_of, run_of

    start = time.perf_counter()
    _refuse_another_file(failures_file)
    with run_of(flags, num_ranks=num_ranks, command=command) as run, listing(failures_file, is_new=True):
        feed, seconds = feed_of(run)
    epoch = feed.epoch_plan
    num_listed = _list_left_out(feed, failures_file)
    if warning := left_out_warning(epoch, left_out_by(epoch, feed.dataset), feed.config):
        logger.warning("packing: %s", warning)
    accumulation = run.args.training_args.gradient_accumulation_steps
    report = plan_facts(
        epoch,
        accumulation=accumulation,
        seconds=time.perf_counter() - start,
        is_decoded_ahead=feed.is_decoded_ahead,
    )
    return {
        **report,
        **data_report(epoch, feed.dataset, merge_size(run.template)),
        "gradient_accumulation_steps": accumulation,
        **_steps(run.args, report["steps_per_epoch"]),
        "failures_file": str(failures_file) if num_listed else None,
        **seconds,
    }


def _steps(args: Any, steps_per_epoch: int) -> dict[str, int]:
    """Count steps by the arithmetic of Hugging Face's Trainer: an epoch ends with a step, whatever has accumulated."""
    num_epochs = math.ceil(args.num_train_epochs)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    if args.max_steps > 0:
        num_steps = args.max_steps
        num_epochs = math.ceil(num_steps / steps_per_epoch)
    return {"num_epochs": num_epochs, "num_steps": num_steps}


def _refuse_another_file(path: Path) -> None:
    """Raise `ConfigError` if the file has content other than an earlier list: it would be overwritten."""
    if path.exists() and path.stat().st_size and not any(listed(path)):
        raise ConfigError(
            f"{path} is not a list of left-out rows, and is not overwritten; name another file with --failures"
        )


def _list_left_out(feed: PlannedFeed, path: Path) -> int:
    """Write a line of JSON for every left-out row; without any, remove an earlier list. Returns the lines written."""
    from swift_vlpack.feed.epoch_report import left_out_rows

    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in left_out_rows(feed.epoch_plan, feed.dataset)]
    try:
        if lines:
            path.write_text("".join(lines), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:  # an error here would throw away the report, which took a whole length pass
        lost = counted(len(lines), "left-out row")
        logger.error(
            f"packing: {path} cannot be written ({error.strerror}), so the list of {lost} is missing; name another "
            "file with --failures"
        )
        return 0
    return len(lines)


PLAN = Command(
    name="plan",
    text="report what training would see, before it starts",
    usage=(
        "vlpack plan --lengths FILE [packing options] [--num_ranks N] [--seed N] [--json]\n"
        "       vlpack plan [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft]\n"
        "                   [--num_ranks N] [--json] [--failures FILE]"
    ),
    description=(
        "Report what training would see: from a file of lengths, or from the very file, flags and environment of "
        "a run, whose rows are then measured as in training; `vlpack plan pt` is for a run of `swift pt`. No "
        "weights are loaded and no GPU is used."
    ),
    add_flags=_add_flags,
    run=_run,
    takes_run_flags=True,
)
