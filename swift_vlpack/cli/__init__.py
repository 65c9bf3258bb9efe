"""The `vlpack` command: finds the subcommand, and makes one line of a mistake."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from swift_vlpack import __version__
from swift_vlpack.cli.command import Command, Parser
from swift_vlpack.errors import ConfigError, VLPackError
from swift_vlpack.host.run_checks import OF_TRAINING
from swift_vlpack.words import INSTALL, did_you_mean

EXIT_USAGE = 2
_WHERE = {
    "plan": "plan",
    "inspect": "inspect_command",
    "verify": "verify",
    "sft": "train",
    "pt": "train",
    "report": "report",
    "bench": "bench",
    "doctor": "doctor",
    "cache": "cache",
    "configs": "configs",
    "schema": "schema",
    "completion": "completion",
    "plugin-path": "plugin_path",
}
"""The module of each command in `commands`, in the order of the help: only that of the one that runs is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a mistake of the user is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv else ""
    logging.basicConfig(format="[%(levelname)s:vlpack] %(message)s")  # as ms-swift's lines look
    try:
        status = _run(name, argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `vlpack plan ... | head` has seen enough; what Python flushes at its end has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except VLPackError as error:
        print(f"vlpack {name}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "swift_vlpack"):
            raise
        print(f"vlpack {name}: needs {error.name}, which is not installed; {INSTALL} brings it", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(name: str, argv: Sequence[str]) -> int:
    if name and not name.startswith("-") and name not in _WHERE:
        meant = f"; did you mean vlpack sft {name}?" if name.endswith(OF_TRAINING) else did_you_mean(name, _WHERE)
        raise ConfigError(f"there is no such command{meant or ' (vlpack --help lists all)'}")
    command = command_of(name) if name in _WHERE else None
    # Most of the flags of a run are ms-swift's, which argparse does not know.
    if command and command.run_of and not {"-h", "--help"} & set(argv) and command.is_of_a_run(argv[1:]):
        _need_ms_swift()
        return command.run_of(argv[1:])
    args = parser().parse_args(argv)
    return int(args.run(args))


def _need_ms_swift() -> None:
    if find_spec("swift") is None:
        raise ConfigError(
            f"ms-swift is not installed; {INSTALL} brings it. Numpy alone is enough for `vlpack plan --lengths`"
        )


def parser() -> Parser:
    """All subcommands with their own flags."""
    made = Parser(prog="vlpack", description="Vision-language packing for ms-swift.")
    made.add_argument("--version", action="version", version=f"vlpack {__version__}")
    made.set_defaults(root=made)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in all_commands():
        command.add_to(commands)
    return made


def all_commands() -> list[Command]:
    """In the order of the help."""
    return [command_of(name) for name in _WHERE]


def command_of(name: str) -> Command:
    """The command of that name: a constant of its module, named after it."""
    module = import_module(f"swift_vlpack.cli.{_WHERE[name]}")
    command: Command = getattr(module, name.replace("-", "_").upper())
    return command


if __name__ == "__main__":
    sys.exit(main())
