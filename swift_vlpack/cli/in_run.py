"""Run a command in the environment of the training run that it is about.

A run's environment is more than what a process can set for itself: PYTHONPATH, OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES
are read when Python or a library starts. So a command about a run is executed twice, by the same process:

1. `vlpack plan --config train.yaml` checks what can be checked without a heavy import, then replaces itself (`execve`)
   by the same command line with the environment of the run, and with the imports of `swift sft`: the current folder is
   not searched, so a `swift` or `queue.py` there is not what the command plans with;
2. in this second execution, `in_run` finds its mark in the environment, and the command does its work.

From then on stdout has the report alone: whatever libraries print, also from C, goes to stderr. The process is still
the one that the user started, so no parent process has to pass on signals, the terminal or the exit code.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import SWIFT_COMMANDS, RunLaunch, check_launch, run_launch
from swift_vlpack.words import INSTALL

PACKAGE = Path(__file__).parents[1]
STDOUT, STDERR = 1, 2
"""File descriptors."""
MARK = "_VLPACK_IN_RUN"
"""Variable that marks the second execution. It has the process id, so that child processes are not taken for it."""
_MAIN = "from swift_vlpack.cli import main; sys.exit(main())"
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def in_run(
    args: argparse.Namespace, *, needs_gpu: bool = False, check: Callable[[RunLaunch], None] = check_launch
) -> Iterator[tuple[RunLaunch, TextIO]]:
    """Enter the environment of the run that the flags name; yields the run and the file for the report.

    The first execution does not return from here; it calls `check`, which raises for a run that has to be refused. With
    `needs_gpu` the process sees the GPUs of one rank, else none.
    """
    if not is_in_run():
        run = run_named(args, needs_gpu=needs_gpu)
        check(run)
        replace_process(own_command(args.argv), {**run.environ, MARK: str(os.getpid())})

    logging.disable(logging.WARNING)  # because the first execution has logged the warnings
    run = run_named(args, needs_gpu=needs_gpu)
    logging.disable(logging.NOTSET)
    signal.signal(signal.SIGTERM, end_by_signal)
    if not args.verbose and "LOG_LEVEL" not in os.environ:
        _quiet_libraries()
    os.environ.setdefault("LOG_LEVEL", "WARNING")  # ms-swift prints pages otherwise; LOG_LEVEL=INFO shows them
    with _report_on_stdout() as report:
        yield run, report


def own_command(argv: Sequence[str]) -> list[str]:
    """Return the command line of a process that runs `vlpack` and imports nothing from the current folder.

    `python -m` would search that folder first, and `python -P` needs Python 3.11.
    """
    code = f"import sys; sys.path[:] = [*filter(None, sys.path), {str(PACKAGE.parent)!r}]; {_MAIN}"
    return [sys.executable, "-c", code, *argv]


def is_in_run() -> bool:
    """Tell whether this process was executed again in the environment of a run."""
    return os.environ.get(MARK) == str(os.getpid())


def run_named(args: argparse.Namespace, *, needs_gpu: bool = False) -> RunLaunch:
    """Return the training run that the flags name, with its environment."""
    need_ms_swift()
    command, flags = command_and_flags(args)
    num_ranks = getattr(args, "num_ranks", None)
    return run_launch(flags, os.environ, command=command, num_ranks=num_ranks, needs_gpu=needs_gpu)


def command_and_flags(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Split `[sft|pt] [flags of the run]`. Raises `ConfigError` if they name no run."""
    command, flags = "sft", args.flags
    if flags and flags[0] in SWIFT_COMMANDS:
        command, *flags = flags
    if args.config is None and not flags:
        otherwise = "--lengths FILE, " if args.command == "plan" else ""
        raise ConfigError(
            f"nothing to {args.command}: give {otherwise}--config CONFIG.yaml, "
            f"or the options of swift {command} (--model, --dataset)"
        )
    return command, [*([args.config] if args.config else []), *flags]


def need_ms_swift() -> None:
    """Raise `ConfigError` if ms-swift is not installed."""
    if find_spec("swift") is None:
        raise ConfigError(
            f"ms-swift is not installed; {INSTALL} brings it. Numpy alone is enough for `vlpack plan --lengths`"
        )


def replace_process(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by another program, under the same process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environ)


def end_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit with 128 + the signal's number, as shells do. `sys.exit` raises, so temporary folders are removed."""
    sys.exit(128 + number)


@contextmanager
def _report_on_stdout() -> Iterator[TextIO]:
    """Yield a file that writes to stdout, and send everything else that prints to stdout to stderr."""
    sys.stdout.flush()
    # `os.dup` makes a descriptor that child processes do not inherit. Otherwise a reader of stdout would wait until the
    # last of them ends.
    with os.fdopen(os.dup(STDOUT), "w", encoding="utf-8", errors="backslashreplace") as report:
        os.dup2(STDERR, STDOUT)
        yield report


def _quiet_libraries() -> None:
    """Hide warnings of ms-swift and its libraries, but not errors and not the lines of this package.

    Call it before any of these libraries is imported, because they read the variables at import.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    logging.getLogger("swift").addFilter(_is_ours_or_grave)


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or Path(record.pathname).is_relative_to(PACKAGE)
