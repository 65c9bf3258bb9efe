"""Fail a run of CI in which a test was skipped for a reason that `allowed_skips.txt` does not have.

A test that is skipped everywhere proves nothing. Where people run the suite, a missing program skips its tests; where
the variable `CI` is set (`.ci/run` sets it), only the reasons of the list may.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("allowed_skips.txt")


def allowed(text: str) -> dict[str, str]:
    """Read the list: how an allowed reason begins, and why it is allowed."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = {}
    for line in lines:
        reason, _, why = (part.strip() for part in line.partition("|"))
        if not reason or not why:
            raise ValueError(f"{LIST.name}: {line!r} is not 'REASON | WHY IT IS ALLOWED'")
        found[reason] = why
    return found


def unexpected(skips: Iterable[tuple[str, str]], known: Iterable[str]) -> list[tuple[str, str]]:
    """Return the skips, each a test and its reason, whose reason begins like none of the known ones."""
    beginnings = tuple(known)
    return [(test, reason) for test, reason in skips if not reason.startswith(beginnings)]


def is_checked(environ: Mapping[str, str]) -> bool:
    """Tell whether a skip may fail this run."""
    return environ.get("CI", "").lower() not in ("", "0", "false")


class SkipCheck:
    """Collect skips where results arrive: in the one process, or in the one that leads those of xdist."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = tuple(known)
        self.skips: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is a skip too, to pytest, and says so of itself.
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skips.append((report.nodeid, _reason(report.longrepr)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole file
            self.skips.append((report.nodeid, _reason(report.longrepr)))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and unexpected(self.skips, self.known):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._lines():
            terminalreporter.write_line(line, red=True)

    def _lines(self) -> Iterator[str]:
        for test, reason in unexpected(self.skips, self.known):
            yield (
                f"{test} was skipped: {reason}. CI allows it for the reasons of tests/{LIST.name} only: install what "
                "the test needs, or add the reason and why it is right to skip"
            )


def _reason(told: Any) -> str:
    """Take the reason out of what pytest notes of a skip: a file, a line and the words."""
    words = told[2] if isinstance(told, tuple) else str(told)
    return words.removeprefix("Skipped: ")


def register(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> None:
    """Check the skips of this run, where it is CI's; a worker of xdist leaves that to the process that leads."""
    if is_checked(environ) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipCheck(allowed(LIST.read_text(encoding="utf-8"))), "vlpack-skips")
