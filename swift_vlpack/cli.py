"""The `vlpack` command. Heavy imports stay inside the subcommand that needs them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from swift_vlpack import __version__
from swift_vlpack.core.config import PackingConfig, option_names, options_in_env
from swift_vlpack.core.errors import VLPackError
from swift_vlpack.core.length_files import Lengths, read_lengths
from swift_vlpack.core.plan import Plan
from swift_vlpack.core.planner import plan
from swift_vlpack.launch import plugin_path, sft_launch

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a mistake of the user is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else ""
    try:
        if command == "sft" and not {"-h", "--help"} & set(argv):
            return _sft(argv[1:])  # most of its flags are ms-swift's, which argparse does not know
        args = _parser().parse_args(argv)
        return int(args.run(args))
    except VLPackError as error:
        print(f"vlpack {command}: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vlpack", description="Vision-language packing for ms-swift.")
    parser.add_argument("--version", action="version", version=f"vlpack {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_sft(commands)
    path = commands.add_parser("plugin-path", help="print the file for swift's --external_plugins")
    path.set_defaults(run=_plugin_path)
    return parser


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="pack known lengths and report what training would see",
        description="Pack known lengths and report what training would see, without a model or an image.",
    )
    command.add_argument(
        "--lengths",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON list, JSON lines (a number, or an object with length or lengths; images, patches), or .npy",
    )
    command.add_argument("--num_ranks", type=int, default=1, help="data-parallel ranks that share the packs")
    command.add_argument("--seed", type=int, default=0, help="seed of the order in which packs leave")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    add_packing_flags(command)
    command.set_defaults(run=_plan)


def _add_sft(commands: Any) -> None:
    command = commands.add_parser(
        "sft",
        usage="vlpack sft [CONFIG.yaml] [packing options] [any option of swift sft]",
        help="swift sft with packing, and with the packing options as flags and YAML keys",
        description=(
            "Train packed: the command of `swift sft`, with the packing options as flags and YAML keys. Everything "
            "else is handed to ms-swift unchanged (`swift sft --help` lists it); NPROC_PER_NODE and friends start "
            "torchrun as there."
        ),
    )
    add_packing_flags(command)


def add_packing_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every packing option, with its help and default."""
    group = parser.add_argument_group(
        "packing options", "also read from VLPACK_* environment variables; a flag wins over its variable"
    )
    for spec in fields(PackingConfig):
        default = "required" if spec.default is MISSING else f"default: {_shown(spec.default)}"
        group.add_argument(
            f"--{spec.name}", metavar="VALUE", default=argparse.SUPPRESS, help=f"{spec.metadata['help']} ({default})"
        )


def _shown(default: Any) -> str:
    return {True: "true", False: "false", None: "none"}.get(default, str(default))


def _plugin_path(args: argparse.Namespace) -> int:
    print(plugin_path())
    return 0


def _sft(argv: Sequence[str]) -> int:
    launch = sft_launch(argv, os.environ)
    return subprocess.run(launch.command, env=launch.environ, check=False).returncode


def _config(args: argparse.Namespace) -> PackingConfig:
    flags = {name: getattr(args, name) for name in option_names() if hasattr(args, name)}
    return PackingConfig.from_mapping({**options_in_env(), **flags})


def _plan(args: argparse.Namespace) -> int:
    config = _config(args)
    lengths = read_lengths(args.lengths)
    start = time.perf_counter()
    made = plan(lengths.tokens, config, images=lengths.images, patches=lengths.patches, seed=args.seed)
    aligned = made.align(args.num_ranks)
    seconds = time.perf_counter() - start
    report = plan_report(made, aligned, lengths, seconds)
    print(json.dumps(report) if args.json else _readable(report))
    return 0


def plan_report(made: Plan, aligned: Plan, lengths: Lengths, seconds: float) -> dict[str, Any]:
    """Everything `vlpack plan` knows, as plain numbers; counts are of the plan before it is shared by ranks."""
    balance = aligned.balance
    excess = len(made) / made.lower_bound - 1 if made.lower_bound else 0.0
    return {
        "num_packs": len(made),
        "lower_bound": made.lower_bound,
        "excess_per_cent": round(100 * excess, 3),
        "mean_fill": round(made.mean_fill, 4),
        "num_samples": len(made.members),
        "num_tokens": int(made.num_tokens_per_pack.sum()),
        "num_rows": len(lengths.tokens),
        "num_dropped": sum(made.num_dropped.values()),
        "dropped": made.num_dropped,
        "single_long": int(made.is_single_long.sum()),
        "num_ranks": aligned.num_ranks,
        "packs_per_rank": aligned.num_packs_per_rank,
        "packs_split": len(aligned) - len(made) - aligned.num_empty,
        "packs_empty": aligned.num_empty,
        "balance": round(balance.slowest_to_mean, 4),
        "balance_floor": round(balance.floor, 4),
        "num_giants": balance.num_giants,
        "packing_strategy": made.config.packing_strategy,
        "method": made.method,
        "packing_length": made.config.packing_length,
        "seconds": round(seconds, 4),
        "config_digest": made.config.digest(),
        "plan_digest": aligned.digest(),
    }


def _readable(report: dict[str, Any]) -> str:
    padded = report["num_samples"] * report["packing_length"]
    saved = 1 - report["num_packs"] * report["packing_length"] / padded if padded else 0.0
    reasons = ", ".join(f"{reason} {count}" for reason, count in report["dropped"].items()) or "none"
    per_step = f"{report['packs_per_rank']} packs each, slowest rank {report['balance']:.3f} x mean"
    if report["num_giants"]:
        per_step += f" (floor {report['balance_floor']:.3f}: {report['num_giants']} samples cost more than a mean pack)"
    lines = [
        ("rows", f"{report['num_rows']} rows, {report['num_samples']} samples packed, {report['num_tokens']} tokens"),
        ("packs", f"{report['num_packs']} packs of {report['packing_length']} tokens by {report['method']}"),
        (
            "",
            f"{report['num_samples'] / max(1, report['num_packs']):.1f} samples a pack, {100 * saved:.1f}% fewer rows",
        ),
        ("fill", f"{100 * report['mean_fill']:.2f}% mean"),
        ("lower bound", f"{report['lower_bound']} packs; {report['excess_per_cent']:.3f}% above it"),
        ("ranks", f"{report['num_ranks']}: {per_step}"),
        ("", f"{report['packs_split']} packs cut in two and {report['packs_empty']} empty ones for equal steps"),
        ("single-long", f"{report['single_long']}"),
        ("left out", f"{report['num_dropped']} ({reasons})"),
        ("time", f"{report['seconds']:.2f} s"),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


if __name__ == "__main__":
    sys.exit(main())
