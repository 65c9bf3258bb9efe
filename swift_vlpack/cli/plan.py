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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_vlpack.cli.command import Command, Parser, add_packing_flags, add_run_flags
from swift_vlpack.cli.in_run import in_run
from swift_vlpack.cli.sweep import add_sweep_flags, cases_of, planned_case, sweep_report, sweep_text
from swift_vlpack.config import SAMPLES, PackingConfig, checked_num_ranks, chosen_options
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import RunLaunch, accumulation_of, check_launch
from swift_vlpack.host.path_checks import check_file
from swift_vlpack.host.run_checks import refuse_combinations, refuse_numbers
from swift_vlpack.host.run_flags import given_options, split_flags
from swift_vlpack.plan.epoch import Recipe
from swift_vlpack.plan.length_files import read_lengths
from swift_vlpack.plan.planner import refuse_lengths_alone
from swift_vlpack.plan.report import plan_report
from swift_vlpack.plan.same_steps import UnpackedStep, kept_steps
from swift_vlpack.rows.families import merge_size
from swift_vlpack.runlog.left_out import listed
from swift_vlpack.runlog.plan_text import plan_text
from swift_vlpack.words import counted

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
    add_sweep_flags(parser)
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
        print(json.dumps(report) if args.json else _text(report))
        return 0
    left_out = args.failures or Path(LEFT_OUT_FILE)
    check_file("--failures", left_out)  # now, because the length pass before it is written may take hours
    if args.seed is not None:
        args.flags = [*args.flags, "--seed", str(args.seed)]
    with in_run(args, check=partial(_check, args)) as (run, out):
        report = _run_report(args, run, left_out)
        print(json.dumps(report) if args.json else _text(report), file=out)
    return 0


def _check(args: argparse.Namespace, run: RunLaunch) -> None:
    cases = cases_of(args, run.config, run.num_ranks)
    check_launch(replace(run, config=cases[0].config, num_ranks=cases[0].num_ranks) if cases else run)
    for case in cases:
        refuse_combinations(given_options(run.flags), case.config)
        accumulation_of(run.flags, case.config, case.num_ranks)  # raises now, before rows are measured


def _text(report: dict[str, Any]) -> str:
    return sweep_text(report) if "cases" in report else plan_text(report)


def _lengths_report(args: argparse.Namespace) -> dict[str, Any]:
    """Plan a file of lengths."""
    if args.config is not None:
        raise ConfigError("both --lengths and --config say what to plan; give one of them")
    num_ranks = checked_num_ranks(1 if args.num_ranks is None else args.num_ranks)
    config, batch_size, accumulation = _of_lengths(args)
    refuse_lengths_alone(config)
    cases = cases_of(args, config, num_ranks)
    recipe_of = partial(read_lengths(args.lengths).recipe, seed=args.seed or 0)
    if cases:
        return sweep_report(recipe_of, cases, batch_size=batch_size, accumulation=accumulation)
    start = time.perf_counter()
    epoch, accumulation = planned_case(recipe_of(config), num_ranks, batch_size, accumulation)
    seconds = time.perf_counter() - start
    report = plan_report(epoch.unshared, epoch.packs, num_rows=epoch.num_rows, seconds=seconds)
    report |= {
        "gradient_accumulation_steps": accumulation,
        "steps_per_epoch": epoch.num_steps_left(batch_size * accumulation),
    }
    if epoch.step is not None and epoch.batch is not None:
        report["kept_steps"] = kept_steps(epoch.packs, epoch.batch, epoch.step)._asdict()
    return report


def config_of(args: argparse.Namespace) -> PackingConfig:
    """Read the packing options from flags and variables."""
    return _of_lengths(args)[0]


def _of_lengths(args: argparse.Namespace) -> tuple[PackingConfig, int, int | None]:
    """Read packing options, batch size and accumulation (None if not given) of a plan of lengths."""
    flags, others = split_flags(args.flags)
    parser = Parser(add_help=False, allow_abbrev=False)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        parser.add_argument(f"--{name}", type=int)
    step, unknown = parser.parse_known_args(others)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    refuse_numbers(vars(step))
    config = PackingConfig.from_mapping(chosen_options(os.environ, flags=flags))
    return config, step.per_device_train_batch_size or 1, step.gradient_accumulation_steps


def _run_report(args: argparse.Namespace, launch: RunLaunch, left_out: Path) -> dict[str, Any]:
    """Plan a run; or, for a sweep, measure its rows once and plan them for every case."""
    if not (cases := cases_of(args, launch.config, launch.num_ranks)):
        return training_report(launch.flags, num_ranks=launch.num_ranks, failures_file=left_out, command=launch.command)
    from swift_vlpack.feed.planned import checked_step, recipe_of
    from swift_vlpack.host.args import deletes_failing_rows, packing_config
    from swift_vlpack.host.plain_order import unpacked_rows

    run, feed, seconds = _feed_of(launch.flags, cases[0].num_ranks, left_out, launch.command)
    rows, given = feed.dataset, given_options(launch.flags)

    def recipe(config: PackingConfig) -> Recipe:
        made = recipe_of(rows, config, seed=feed.seed, num_ranks=1)
        if config.packing_batch != SAMPLES:
            return made
        checked_step(UnpackedStep(1, 1, 1), config, rows)
        deletes = deletes_failing_rows(run.args)
        return replace(made, unpacked=unpacked_rows(run.args, rows.sources, deletes_failing=deletes))

    report = sweep_report(
        recipe,
        cases_of(args, packing_config(run.args), launch.num_ranks),
        batch_size=given.get("per_device_train_batch_size", 1),
        accumulation=given.get("gradient_accumulation_steps"),
    )
    return {**report, **seconds}


def _feed_of(
    flags: Sequence[str], num_ranks: int, failures_file: Path, command: str
) -> tuple[Any, PlannedFeed, dict[str, float]]:
    """Make the run and the feed that training would have. Returns both, with the seconds of lengths and packs."""
    from swift_vlpack.feed.epoch_report import listing
    from swift_vlpack.host.run import feed_of, run_of

    _refuse_another_file(failures_file)
    with run_of(flags, num_ranks=num_ranks, command=command) as run, listing(failures_file, is_new=True):
        return run, *feed_of(run)


def training_report(
    flags: Sequence[str], *, num_ranks: int, failures_file: Path, command: str = "sft"
) -> dict[str, Any]:
    """Plan the run of `swift sft` or `swift pt` with these flags. Returns the report; lists left-out rows in a file."""
    from swift_vlpack.feed.epoch_report import data_report, left_out_by, left_out_warning, plan_facts

    start = time.perf_counter()
    run, feed, seconds = _feed_of(flags, num_ranks, failures_file, command)
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
        "                   [--per_device_train_batch_size N] [--gradient_accumulation_steps N]\n"
        "       vlpack plan [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft]\n"
        "                   [--num_ranks N] [--json] [--failures FILE]\n"
        "       vlpack plan ... --sweep OPTION=X,Y ... [--ranks N,N]"
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
