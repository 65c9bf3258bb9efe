"""`vlpack plan`: what training would see, from a file of lengths here, or of a run, by `cli.plan_run`."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from swift_vlpack.cli.become import add_run_flags, become_run, run_flags
from swift_vlpack.cli.command import Command, Parser
from swift_vlpack.cli.packing_flags import add_packing_flags, is_given
from swift_vlpack.cli.plan_text import plan_text
from swift_vlpack.config import PackingConfig, chosen_options, option_names
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.launch import checked_num_ranks
from swift_vlpack.host.run_checks import check_file
from swift_vlpack.plan.length_files import plan_of_rows, read_lengths
from swift_vlpack.plan.report import plan_report
from swift_vlpack.words import by_reason, counted

LIST = "vlpack_failures.jsonl"
"""Rows that a plan leaves out."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="JSON list, JSON lines (a number, or an object with length or lengths; images, patches), or .npy",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="INT",
        default=0,
        help="seed of the order in which packs leave (default: %(default)s)",
    )
    _add_flags_of_a_run(parser)
    add_packing_flags(parser, packing_length="the run's --max_length; needed with --lengths")


def _add_flags_of_a_run(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help=f"where to list the rows of a run that are left out, if there are any (default: {LIST} in this folder)",
    )


def _plan_lengths(args: argparse.Namespace) -> int:
    if args.config is not None:
        raise ConfigError("both --lengths and --config say what to plan; give one of them")
    num_ranks = checked_num_ranks(1 if args.num_ranks is None else args.num_ranks)
    config = config_of(args)
    if config.packing_overflow != "keep":
        raise ConfigError(
            f"packing_overflow={config.packing_overflow} needs to know where the images of a row are, which lengths do "
            "not say; plan the run itself (--config), or leave it out"
        )
    lengths = read_lengths(args.lengths)
    num_rows = len(lengths.tokens)
    start = time.perf_counter()
    columns = {"images": lengths.images, "patches": lengths.patches}
    made, cut = plan_of_rows(lengths.tokens, config, **columns, seed=args.seed, label=None)
    if num_rows and not len(made):
        raise DataError(
            f"nothing would be trained: all {counted(num_rows, 'row')} are left out ({by_reason(made.num_dropped)}); "
            f"raise packing_length ({config.packing_length}) or its caps"
        )
    aligned = made.align(num_ranks)
    seconds = time.perf_counter() - start
    report = plan_report(made, aligned, num_rows=num_rows, seconds=seconds) | cut
    print(json.dumps(report) if args.json else plan_text(report))
    return 0


def config_of(args: argparse.Namespace) -> PackingConfig:
    """The packing options of flags and variables."""
    flags = {name: getattr(args, name) for name in option_names() if hasattr(args, name)}
    return PackingConfig.from_mapping(chosen_options(os.environ, flags=flags))


def _plan_run(argv: Sequence[str]) -> NoReturn:
    parser = Parser(prog="vlpack plan", add_help=False, allow_abbrev=False)
    _add_flags_of_a_run(parser)
    args, command, flags = run_flags(parser, argv)
    settings = {"form": "json" if args.json else "text", "failures": str(_list_of(args))}
    become_run("plan", args, command, flags, settings)


def _list_of(args: argparse.Namespace) -> Path:
    """The file for the rows that are left out; one that cannot be written is better known before the length pass."""
    path: Path = args.failures or Path(LIST)
    check_file("--failures", path)
    return path


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
    run=_plan_lengths,
    is_of_a_run=lambda argv: not is_given(argv, "--lengths"),
    run_of=_plan_run,
)
