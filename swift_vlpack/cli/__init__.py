"""The `vlpack` command line: one command is one module, with one parser and one process.

`vlpack verify --config train.yaml` imports `cli/verify.py` and no other command, parses its flags and calls its `run`:

>>> main(["cache", "lst"])  # "vlpack cache: ...; did you mean list?" goes to stderr
2
>>> parse(["verify", "--config", "train.yaml", "--model", "m"]).flags  # flags of the training run pass through
['--model', 'm']

A command about a training run needs the environment of that run. So `in_run.py` sets that environment and executes the
same command line again, in the same process; in this second execution `in_run` returns and `run` does its work.

To add a command, write its module with a constant `NAME = Command(...)` (`command.py`) and list the module in
`COMMANDS`. Commands import neither torch nor ms-swift at their top, because `vlpack --help` and the refusal of a typing
mistake have to answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from swift_vlpack import __version__
from swift_vlpack.cli.command import Command, Parser
from swift_vlpack.cli.in_run import is_in_run
from swift_vlpack.errors import ConfigError, VLPackError
from swift_vlpack.gone import refuse_gone
from swift_vlpack.host.run_flags import OF_TRAINING
from swift_vlpack.pages.safe_text import visible
from swift_vlpack.words import INSTALL, did_you_mean

EXIT_USAGE = 2
COMMANDS = {
    "plan": "plan",
    "inspect": "inspect",
    "verify": "verify",
    "sft": "train",
    "pt": "train",
    "report": "report",
    "bench": "bench",
    "export": "export",
    "doctor": "doctor",
    "cache": "cache",
    "configs": "configs",
    "schema": "schema",
    "plugin-path": "plugin_path",
}
"""The module of each command, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. A mistake of the user is one line on stderr and exit code 2; a bug keeps its traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv else ""
    if not is_in_run():  # in the environment of a run, log lines go through ms-swift's own logger
        logging.basicConfig(format="[%(levelname)s:vlpack] %(message)s")
    try:
        args = parse(argv)
        status: int = args.of_command.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # `vlpack plan ... | head` closed the pipe. Python flushes stdout at exit and would fail there once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except VLPackError as error:
        print(f"vlpack {name}: {visible(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        # Inside a training run the missing module may be one of the user's own, which our install would not bring:
        # then the traceback tells more.
        if is_in_run() or (error.name or "").partition(".")[0] in ("", "swift_vlpack"):
            raise
        print(f"vlpack {name}: needs {error.name}, which is not installed; {INSTALL} brings it", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    In the result, `of_command` is the `Command`, and `flags` are the unparsed flags of a training run. Raises
    `ConfigError` for an unknown command or flag.
    """
    name = argv[0] if argv else ""
    refuse_gone(f"vlpack {name}", *(f"vlpack {name} {word.partition('=')[0]}" for word in argv[1:]))
    if name not in COMMANDS and name and not name.startswith("-"):
        meant = f"; did you mean vlpack sft {name}?" if name.endswith(OF_TRAINING) else did_you_mean(name, COMMANDS)
        raise ConfigError(f"there is no such command{meant or ' (vlpack --help lists all)'}")
    # Make one parser only: to make those of the other commands would import their modules.
    made = parser([name] if name in COMMANDS else COMMANDS)
    args, flags = made.parse_known_args(argv)
    if flags and not args.of_command.takes_run_flags:
        args.parser.error(f"unrecognized arguments: {' '.join(flags)}")
    args.flags = [*flags, *args.passed]
    args.argv = list(argv)
    return args


def parser(names: Iterable[str] = COMMANDS) -> Parser:
    """Make the parser of `vlpack` with these commands."""
    made = Parser(prog="vlpack", description="Vision-language packing for ms-swift.")
    made.add_argument("--version", action="version", version=f"vlpack {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        command_of(name).add_to(commands)
    return made


def command_of(name: str) -> Command:
    """Import a command's module and return its constant, such as `PLUGIN_PATH` for `plugin-path`."""
    module = import_module(f"swift_vlpack.cli.{COMMANDS[name]}")
    command: Command = getattr(module, name.replace("-", "_").upper())
    return command
