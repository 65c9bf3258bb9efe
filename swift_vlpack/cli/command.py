"""What a subcommand is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from swift_vlpack.errors import ConfigError
from swift_vlpack.words import did_you_mean

_UNKNOWN = re.compile(r"(?:invalid choice: '|unrecognized arguments: )([^' ]+)")


class Parser(argparse.ArgumentParser):
    """Report a mistake in one line, without the usage, and suggest the word that was meant."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` where argparse would print the usage and exit."""
        match = _UNKNOWN.search(message)
        raise ConfigError(f"{message}{did_you_mean(match[1], _words_of(self)) if match else ''}")


def _words_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags and choices of a parser, and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        yield from map(str, action.choices or ())
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _words_of(below)


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
