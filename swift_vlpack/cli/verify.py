"""`vlpack verify`: prove a run before anybody waits for it, by `cli.verify_run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from swift_vlpack.cli.become import add_config_flag, become_run, never, run_flags
from swift_vlpack.cli.command import Command, Parser
from swift_vlpack.cli.packing_flags import add_packing_flags


def _add_flags(parser: argparse.ArgumentParser) -> None:
    _add_own_flags(parser)
    add_packing_flags(parser, packing_length="the run's --max_length")


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _verify(argv: Sequence[str]) -> NoReturn:
    parser = Parser(prog="vlpack verify", add_help=False, allow_abbrev=False)
    _add_own_flags(parser)
    args, command, flags = run_flags(parser, argv)
    become_run("verify", args, command, flags, {"form": "json" if args.json else "text"}, needs_gpu=True)


VERIFY = Command(
    name="verify",
    text="prove isolation and lengths on a run's model and data, without training",
    usage="vlpack verify [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft] [--json]",
    description=(
        "Prove what a run relies on, with its own file, flags and environment, its weights, device and data type, and "
        "train nothing: that samples of a pack do not see each other and give the logits, labels and gradients that "
        "they give alone, and that the lengths that packs are planned by are those of the full encoding, on some rows "
        "of every source. Exit code 0: it holds; 1: it does not; 2: the run cannot be made (an option, a file, the "
        "model). One process on one GPU stands for all ranks: deepspeed and fsdp are left out."
    ),
    add_flags=_add_flags,
    run=never,
    is_of_a_run=lambda argv: True,
    run_of=_verify,
)
