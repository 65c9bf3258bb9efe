"""The `vlpack` command. Heavy imports stay inside the subcommand that needs them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from swift_vlpack import __version__
from swift_vlpack.core.config import PackingConfig, option_names, options_in_env
from swift_vlpack.core.errors import ConfigError, VLPackError
from swift_vlpack.core.length_files import read_lengths
from swift_vlpack.core.plan_report import plan_report
from swift_vlpack.core.planner import plan
from swift_vlpack.launch import plan_launch, plugin_path, sft_launch

EXIT_USAGE = 2
STDERR = 2
"""Its file number, which a child takes as its stdout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a mistake of the user is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else ""
    try:
        if not {"-h", "--help"} & set(argv):  # most of the flags of these are ms-swift's, which argparse does not know
            if command == "sft":
                return _sft(argv[1:])
            if command == "plan" and not _is_given(argv, "--lengths"):
                return _plan_run(argv[1:])
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
        allow_abbrev=False,
        usage=(
            "vlpack plan --lengths FILE [packing options] [--num_ranks N] [--seed N] [--json]\n"
            "       vlpack plan [--config CONFIG.yaml] [packing options] [any option of swift sft]\n"
            "                   [--num_ranks N] [--json] [--failures FILE]"
        ),
        help="report what training would see, before it starts",
        description=(
            "Report what training would see: from a file of lengths, or from the very file, flags and environment of "
            "a run, whose rows are then measured as in training. No weights are loaded and no GPU is used."
        ),
    )
    command.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="JSON list, JSON lines (a number, or an object with length or lengths; images, patches), or .npy",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the order in which packs leave")
    _add_plan_flags(command)
    add_packing_flags(command)
    command.set_defaults(run=_plan)


def _add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML of a training run, as `vlpack sft` and `swift sft` take")
    parser.add_argument(
        "--num_ranks",
        type=int,
        help="data-parallel ranks that share the packs (default: NPROC_PER_NODE x NNODES of a run, else 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("vlpack_failures.jsonl"),
        metavar="FILE",
        help="where to write the rows of a run that cannot be encoded, if there are any (default: %(default)s)",
    )


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
    if args.config is not None:
        raise ConfigError("both --lengths and --config say what to plan; give one of them")
    config = _config(args)
    lengths = read_lengths(args.lengths)
    start = time.perf_counter()
    made = plan(lengths.tokens, config, images=lengths.images, patches=lengths.patches, seed=args.seed)
    aligned = made.align(1 if args.num_ranks is None else args.num_ranks)
    seconds = time.perf_counter() - start
    _show(plan_report(made, aligned, num_rows=len(lengths.tokens), seconds=seconds), as_json=args.json)
    return 0


def _plan_run(argv: Sequence[str]) -> int:
    """Plan a training run in a process that starts with the run's environment, and show what it reports."""
    parser = argparse.ArgumentParser(prog="vlpack plan", add_help=False, allow_abbrev=False)
    _add_plan_flags(parser)
    args, options = parser.parse_known_args(argv)
    if args.config is None and not options:
        raise ConfigError(
            "nothing to plan: give --lengths FILE, --config CONFIG.yaml, "
            "or the options of swift sft (--model, --dataset)"
        )
    if not args.failures.absolute().parent.is_dir():  # better now than after the length pass
        raise ConfigError(f"--failures {args.failures}: no such directory; name a file in one that exists")
    launch = plan_launch([*([args.config] if args.config else []), *options], os.environ, num_ranks=args.num_ranks)
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "swift_vlpack.host.plan_command"]
        command += [str(report), str(args.failures), str(launch.num_ranks), *launch.flags]
        # What libraries print is no part of the report.
        status = subprocess.run(command, env=launch.environ, stdout=STDERR, check=False).returncode
        if status == 0:
            _show(json.loads(report.read_text(encoding="utf-8")), as_json=args.json)
    return status


def _is_given(argv: Sequence[str], flag: str) -> bool:
    return any(part.partition("=")[0] == flag for part in argv)


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(report) if as_json else _readable(report))


def _readable(report: dict[str, Any]) -> str:
    is_of_run = "sources" in report
    lines = [*(_about_data(report) if is_of_run else []), *_about_packs(report)]
    lines += _about_steps(report) if is_of_run else [("time", f"{report['seconds']:.2f} s")]
    return "\n".join(f"{name:<12} {text}".rstrip() for name, text in lines)


def _about_packs(report: dict[str, Any]) -> list[tuple[str, str]]:
    padded = report["num_samples"] * report["packing_length"]
    saved = 1 - report["num_packs"] * report["packing_length"] / padded if padded else 0.0
    per_step = f"{report['packs_per_rank']} packs each, slowest rank {report['balance']:.3f} x mean"
    if report["num_giants"]:
        per_step += f" (floor {report['balance_floor']:.3f}: {report['num_giants']} samples cost more than a mean pack)"
    rows = f"{report['num_rows']} rows" + (" in epoch 0" if "sources" in report else "")
    num_unreadable = report["num_rows"] - report["num_samples"] - report["num_dropped"]
    unreadable = f", and {num_unreadable} unreadable" if num_unreadable else ""
    return [
        ("rows", f"{rows}, {report['num_samples']} samples packed, {report['num_tokens']} tokens"),
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
        ("left out", f"{report['num_dropped']} ({_by_reason(report['dropped'])}){unreadable}"),
    ]


def _about_data(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The sources of a run, as a table, and their lengths."""
    width = max(len("source"), *map(len, report["sources"]))
    num_sources = len(report["sources"])
    lines = [("data", f"{report['rows']} rows in {num_sources} source{'s' * (num_sources > 1)}")]
    lines.append(("", f"{'source':<{width}}  {'rows':>9}  {'ratio':>6}  {'asked':>7}  {'samples':>7}  {'tokens':>7}"))
    lines += [
        (
            "",
            f"{name:<{width}}  {source['rows']:>9}  {source['asked_ratio']:>6g}  {source['asked_share']:>7.1%}  "
            f"{source['share_of_samples']:>7.1%}  {source['share_of_tokens']:>7.1%}",
        )
        for name, source in report["sources"].items()
    ]
    unreadable = f"{sum(report['unreadable'].values())} rows ({_by_reason(report['unreadable'])})"
    if report["failures_file"]:
        unreadable += f", listed in {report['failures_file']}"
    if num_deleted := sum(source["num_deleted_by_loader"] for source in report["sources"].values()):
        lines.append(("", f"{num_deleted} more rows were deleted by ms-swift's loader"))
    facts = report["lengths"]
    lengths = ", ".join(f"{name} {facts[name]}" for name in ("min", "median", "p95", "p99", "max", "mean"))
    images = f"{report['share_of_rows_with_image']:.1%} of the rows have one"
    if report["share_of_vision_tokens"] is not None:
        images += f", {report['share_of_vision_tokens']:.1%} of the tokens are vision"
    return [*lines, ("unreadable", unreadable), ("lengths", f"{lengths} tokens"), ("images", images)]


def _about_steps(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            "steps",
            f"{report['num_steps']} in {report['num_epochs']} epochs, {report['steps_per_epoch']} an epoch; "
            f"{report['num_ranks']} ranks x {report['gradient_accumulation_steps']} packs a step, "
            f"{report['packs_per_epoch']} packs in every epoch",
        ),
        (
            "time",
            f"{report['seconds_lengths']:.2f} s for lengths, {report['seconds_plan']:.2f} s for packs, "
            f"{report['seconds']:.2f} s in all",
        ),
    ]


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"


if __name__ == "__main__":
    sys.exit(main())
