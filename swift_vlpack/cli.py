"""The `vlpack` command. Heavy imports stay inside the subcommand that needs them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from swift_vlpack import __version__
from swift_vlpack.core.account.plan_report import plan_report
from swift_vlpack.core.account.plan_text import plan_text
from swift_vlpack.core.config import PackingConfig, chosen_options, kind_of, option_names
from swift_vlpack.core.epoch.length_files import read_lengths
from swift_vlpack.core.epoch.planner import plan
from swift_vlpack.core.errors import ConfigError, VLPackError
from swift_vlpack.launch import COMMANDS, checked_num_ranks, plan_launch, plugin_path, train_launch

EXIT_USAGE = 2
LIST = "vlpack_failures.jsonl"
"""Rows that a plan leaves out."""
STDOUT, STDERR = 1, 2
"""Their file numbers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a mistake of the user is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else ""
    logging.basicConfig(format="[%(levelname)s:vlpack] %(message)s")  # as ms-swift's lines look
    try:
        if not {"-h", "--help"} & set(argv):  # most of the flags of these are ms-swift's, which argparse does not know
            if command in COMMANDS:
                _need_ms_swift()
                return _train(command, argv[1:])
            if command == "plan" and not _is_given(argv, "--lengths"):
                _need_ms_swift()
                return _plan_run(argv[1:])
        args = _parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `vlpack plan ... | head` has seen enough; what Python flushes at its end has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except VLPackError as error:
        print(f"vlpack {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _need_ms_swift() -> None:
    if find_spec("swift") is None:
        raise ConfigError(
            "ms-swift is not installed; a full `pip install swift-vlpack` brings it. Numpy alone is enough for "
            "`vlpack plan --lengths`"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vlpack", description="Vision-language packing for ms-swift.")
    parser.add_argument("--version", action="version", version=f"vlpack {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_train(commands, "sft", "swift sft with packing, and with the packing options as flags and YAML keys")
    _add_train(commands, "pt", "the same for swift pt: text and interleaved documents, every token a target")
    path = commands.add_parser("plugin-path", help="print the file for swift's --external_plugins")
    path.set_defaults(run=_plugin_path)
    return parser


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        allow_abbrev=False,
        usage=(
            "vlpack plan --lengths FILE [packing options] [--num_ranks N] [--seed N] [--json]\n"
            "       vlpack plan [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft]\n"
            "                   [--num_ranks N] [--json] [--failures FILE]"
        ),
        help="report what training would see, before it starts",
        description=(
            "Report what training would see: from a file of lengths, or from the very file, flags and environment of "
            "a run, whose rows are then measured as in training; `vlpack plan pt` is for a run of `swift pt`. No "
            "weights are loaded and no GPU is used."
        ),
    )
    command.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="JSON list, JSON lines (a number, or an object with length or lengths; images, patches), or .npy",
    )
    command.add_argument(
        "--seed",
        type=int,
        metavar="INT",
        default=0,
        help="seed of the order in which packs leave (default: %(default)s)",
    )
    _add_plan_flags(command)
    add_packing_flags(command, packing_length="the run's --max_length; needed with --lengths")
    command.set_defaults(run=_plan)


def _add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML of a training run, as `vlpack sft` and `swift sft` take")
    parser.add_argument(
        "--num_ranks",
        type=int,
        metavar="INT",
        help="data-parallel ranks that share the packs (default: NPROC_PER_NODE x NNODES of a run, else 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help=f"where to list the rows of a run that are left out, if there are any (default: {LIST} next to CONFIG)",
    )


def _add_train(commands: Any, name: str, text: str) -> None:
    command = commands.add_parser(
        name,
        usage=f"vlpack {name} [CONFIG.yaml] [packing options] [any option of swift {name}]",
        help=text,
        description=(
            f"Train packed: the command of `swift {name}`, with the packing options as flags and YAML keys. Everything "
            f"else is handed to ms-swift unchanged (`swift {name} --help` lists it); NPROC_PER_NODE and friends start "
            "torchrun as there."
        ),
    )
    add_packing_flags(command, packing_length="--max_length")


def add_packing_flags(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """One flag for every packing option, with what it takes, its help and its default here, where that is another."""
    group = parser.add_argument_group(
        "packing options",
        "The same names are keys of a training file and, in capitals behind VLPACK_, environment variables. "
        "A flag wins over a key, a key over a variable, a variable over the default.",
    )
    defaults = {"packing": "true", **defaults}
    for spec in fields(PackingConfig):
        default = defaults.get(spec.name, _shown(spec.default))
        group.add_argument(
            f"--{spec.name}",
            metavar=kind_of(spec.name),
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} (default: {default})",
        )


def _shown(default: Any) -> str:
    return {True: "true", False: "false", None: "none"}.get(default, str(default))


def _plugin_path(args: argparse.Namespace) -> int:
    print(plugin_path())
    return 0


def _train(command: str, argv: Sequence[str]) -> NoReturn:
    launch = train_launch(argv, os.environ, command=command)
    print(f"run sh: `{' '.join(launch.command)}`", flush=True)  # as ms-swift says it
    _become(launch.command, launch.environ)


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Go on as the command: signals, terminal and exit code are its own, and nobody is left to wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environ)


def _config(args: argparse.Namespace) -> PackingConfig:
    flags = {name: getattr(args, name) for name in option_names() if hasattr(args, name)}
    return PackingConfig.from_mapping(chosen_options(os.environ, flags=flags))


def _plan(args: argparse.Namespace) -> int:
    if args.config is not None:
        raise ConfigError("both --lengths and --config say what to plan; give one of them")
    num_ranks = checked_num_ranks(1 if args.num_ranks is None else args.num_ranks)
    config = _config(args)
    lengths = read_lengths(args.lengths)
    start = time.perf_counter()
    made = plan(lengths.tokens, config, images=lengths.images, patches=lengths.patches, seed=args.seed, label=None)
    aligned = made.align(num_ranks)
    seconds = time.perf_counter() - start
    report = plan_report(made, aligned, num_rows=len(lengths.tokens), seconds=seconds)
    print(json.dumps(report) if args.json else plan_text(report))
    return 0


def _plan_run(argv: Sequence[str]) -> NoReturn:
    """Become the process that plans a training run, which starts with the run's environment."""
    command, argv = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("sft", argv)
    parser = argparse.ArgumentParser(prog="vlpack plan", add_help=False, allow_abbrev=False)
    _add_plan_flags(parser)
    args, options = parser.parse_known_args(argv)
    if args.config is None and not options:
        raise ConfigError(
            "nothing to plan: give --lengths FILE, --config CONFIG.yaml, "
            f"or the options of swift {command} (--model, --dataset)"
        )
    failures = _list_of(args)
    launch = plan_launch([*([args.config] if args.config else []), *options], os.environ, num_ranks=args.num_ranks)
    report = os.dup(STDOUT)
    os.set_inheritable(report, True)
    os.dup2(STDERR, STDOUT)  # what libraries print is no part of the report
    form = "json" if args.json else "text"
    process = [sys.executable, "-m", "swift_vlpack.host.commands.process", str(report), form, str(failures)]
    _become([*process, str(launch.num_ranks), command, *launch.flags], launch.environ)


def _list_of(args: argparse.Namespace) -> Path:
    """The file for the rows that are left out; one that cannot be written is better known before the length pass."""
    path: Path = args.failures or Path(args.config or "").parent / LIST
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--failures {path}: no such directory; name a file in one that exists")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written; name a file that can be with --failures")
    return path


def _is_given(argv: Sequence[str], flag: str) -> bool:
    return any(part.partition("=")[0] == flag for part in argv)


if __name__ == "__main__":
    sys.exit(main())
