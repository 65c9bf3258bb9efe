"""Commands about a run, in this process: as they are executed, and executed again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from swift_vlpack.cli import main
from swift_vlpack.cli.in_run import own_command
from tests.environment import restored_environment


class Executed(BaseException):
    """The command would replace this process; no `except Exception` shall stop that."""


def run_here(argv: Sequence[Any]) -> int:
    """Run a command in the environment of its run; returns the exit code, the report is on stdout (`capfd`).

    `--verbose`, because filters of warnings would outlive the command in this process.
    """
    environs: list[dict[str, str]] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> NoReturn:
        assert command == own_command(words)
        environs.append(environ)
        raise Executed

    words = [*map(str, argv), "--verbose"]
    with restored_environment(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execve", execve)
        try:
            return main(words)
        except Executed:
            os.environ.clear()
            os.environ.update(environs[0])
        stdout, handler = os.dup(1), signal.getsignal(signal.SIGTERM)
        try:
            return main(words)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            signal.signal(signal.SIGTERM, handler)
