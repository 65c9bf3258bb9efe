"""Define a command of `vlpack`: its help, its parser, and the flags that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from swift_vlpack.config import PackingConfig, kind_of
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
    """Declare a subcommand of `vlpack`: its help, its flags, and the function that runs it."""

    name: str
    text: str
    """One line, for the list of commands."""
    usage: str | None = None
    description: str | None = None
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed flags and returns the exit code."""
    takes_run_flags: bool = False
    """Whether flags that the parser does not know belong to a training run: they go into `args.flags`."""

    def add_to(self, commands: Any) -> None:
        """Add the command to the subparsers of argparse."""
        parser = commands.add_parser(
            self.name,
            allow_abbrev=False,
            formatter_class=_Formatter,
            usage=self.usage,
            help=self.text,
            description=self.description or f"{self.text[0].upper()}{self.text[1:]}.",
        )
        parser.set_defaults(of_command=self, parser=parser, passed=[])
        self.add_flags(parser)


class PassThrough(argparse.Action):
    """Keep a flag with its values as they were typed, for the training run that the command is about."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Append to `passed`."""
        values = [values] if isinstance(values, str) else list(values or ())
        # A new list, because the default of `passed` is one object that all parsed command lines would share.
        namespace.passed = [*namespace.passed, option_string, *values]


class _Formatter(argparse.HelpFormatter):
    """Show the value of a passed flag as it is typed, without the brackets that `nargs="?"` would give it."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar) if isinstance(action, PassThrough) else super()._format_args(action, default_metavar)


def add_packing_flags(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Add a flag with help for every packing option; `defaults` are the defaults that differ in this command.

    They pass through: `host.launch` reads them, together with the training file and the environment.
    """
    group = parser.add_argument_group(
        "packing options",
        "The same names are keys of a training file and, in capitals after VLPACK_, environment variables. "
        "A flag wins over a key, a key over a variable, a variable over the default.",
    )
    defaults = {"packing": "true", **defaults}
    for spec in fields(PackingConfig):
        default = defaults.get(spec.name, shown(spec.default))
        group.add_argument(
            f"--{spec.name}",
            action=PassThrough,
            nargs="?",  # a bare `--packing` means true; `host.launch` refuses any other flag without a value, by name
            metavar=kind_of(spec.name),
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} (default: {default})",
        )


def add_run_flags(parser: argparse.ArgumentParser, *, num_ranks: bool = True) -> None:
    """Add the flags that name the training run a command is about; ms-swift's own flags name it too."""
    parser.add_argument("--config", metavar="FILE", help="YAML of a training run, as `vlpack sft` and `swift sft` take")
    parser.add_argument("--verbose", action="store_true", help="show the warnings of ms-swift and its libraries, too")
    if num_ranks:
        parser.add_argument(
            "--num_ranks",
            type=int,
            metavar="INT",
            help="data-parallel ranks that share the packs (default: NPROC_PER_NODE x NNODES of a run, else 1)",
        )


def shown(default: Any) -> str:
    """Write a default as a user would type it.

    >>> shown(True), shown(0), shown(None)
    ('true', '0', 'none')
    """
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
