"""What a subcommand is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One subcommand of `vlpack`: its help, and what runs it."""

    name: str
    text: str
    """One line, for the list of commands."""
    usage: str | None = None
    description: str | None = None
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    run: Callable[[argparse.Namespace], int]
    """With its own flags."""
    is_of_a_run: Callable[[Sequence[str]], bool] = lambda argv: False
    """Whether these flags say a training run, most of whose flags are ms-swift's, which argparse does not know."""
    run_of: Callable[[Sequence[str]], int] | None = None
    """With the flags of a training run."""

    def add_to(self, commands: Any) -> None:
        """Add it to the subparsers of argparse."""
        parser = commands.add_parser(
            self.name,
            allow_abbrev=False,
            usage=self.usage,
            help=self.text,
            description=self.description or f"{self.text[0].upper()}{self.text[1:]}.",
        )
        self.add_flags(parser)
        parser.set_defaults(run=self.run, of_command=self)
