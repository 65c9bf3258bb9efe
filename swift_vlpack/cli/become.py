"""Become the process that does the work of a training run: it starts with the run's environment."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import COMMANDS, check_launch, run_launch

STDOUT, STDERR = 1, 2
"""Their file numbers."""


def become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Go on as the command: signals, terminal and exit code are its own, and nobody is left to wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environ)


def never(args: argparse.Namespace) -> NoReturn:
    """For a command whose flags are always those of a run."""
    raise AssertionError("all flags of this command are those of a run")


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Which run a command is about, beside the flags of ms-swift."""
    parser.add_argument("--config", metavar="FILE", help="YAML of a training run, as `vlpack sft` and `swift sft` take")
    parser.add_argument("--verbose", action="store_true", help="show what ms-swift and its libraries warn of, too")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Which run a command is about, and on how many ranks."""
    add_config_flag(parser)
    parser.add_argument(
        "--num_ranks",
        type=int,
        metavar="INT",
        help="data-parallel ranks that share the packs (default: NPROC_PER_NODE x NNODES of a run, else 1)",
    )


def run_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """The flags of the command, whose run (sft or pt) it is about, and the flags of that."""
    name = parser.prog.split()[-1]
    command, argv = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("sft", argv)
    args, options = parser.parse_known_args(argv)
    if args.config is None and not options:
        given_otherwise = "--lengths FILE, " if name == "plan" else ""
        raise ConfigError(
            f"nothing to {name}: give {given_otherwise}--config CONFIG.yaml, "
            f"or the options of swift {command} (--model, --dataset)"
        )
    return args, command, [*([args.config] if args.config else []), *options]


def is_quiet(args: argparse.Namespace) -> bool:
    """Tell whether ms-swift's log lines stay hidden: neither `--verbose` nor `LOG_LEVEL` is given."""
    return not args.verbose and "LOG_LEVEL" not in os.environ


def become_run(
    name: str, args: argparse.Namespace, command: str, flags: Sequence[str], settings: Mapping[str, Any], **launch: Any
) -> NoReturn:
    """Become `cli.NAME_run` in the environment of the run; its report goes to stdout, all other output to stderr.

    `settings`, JSON, are those of the command itself.
    """
    made = run_launch(flags, os.environ, num_ranks=getattr(args, "num_ranks", None), **launch)
    check_launch(made)
    report = os.dup(STDOUT)
    os.set_inheritable(report, True)
    os.dup2(STDERR, STDOUT)  # what libraries print is no part of the report
    own = {**settings, "report": report, "num_ranks": made.num_ranks, "is_quiet": is_quiet(args)}
    process = [sys.executable, "-m", "swift_vlpack.cli.process", name, json.dumps(own), command]
    become([*process, *made.flags], made.environ)
