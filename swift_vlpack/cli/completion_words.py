"""What can stand on the command line, read from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swift_vlpack.cli.command import Command
from swift_vlpack.cli.schema_training import flag_schema
from swift_vlpack.host.swift_flags import flags

OF_FILES = ("FILE", "PATH", "FOLDER", "OUTPUT_DIR")
"""What a flag takes, as the help shows it, where it is a path."""


@dataclass(frozen=True, slots=True)
class Option:
    """A flag, and what comes behind it."""

    flag: str
    text: str
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    takes_file: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """A subcommand, with all that may follow it."""

    name: str
    text: str
    options: tuple[Option, ...]
    actions: tuple[str, ...] = ()
    """Words that stand behind the command."""
    takes_file: bool = False
    """Whether a file may stand there, too."""


def words_of(root: argparse.ArgumentParser) -> list[Words]:
    """Every subcommand; one about a run takes the flags of ms-swift, too, as far as they can be read."""
    found = []
    for name, parser in _subparsers(root).items():
        below = _subparsers(parser)
        options = {option.flag: option for one in (parser, *below.values()) for option in _options(one)}
        command: Command = parser.get_default("of_command")
        is_of_run = command.takes_run_flags
        if is_of_run:
            options = {**_of_swift(), **options}
        is_told_which = is_of_run and "--config" in options
        actions = ("sft", "pt") if is_told_which else (*below, *_choices_behind(parser))
        takes_file = (is_of_run and not is_told_which) or any(map(_is_path, _behind(parser)))
        found.append(Words(name, command.text, tuple(options.values()), actions, takes_file))
    return found


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def _choices_behind(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of an argument without a flag."""
    for action in _behind(parser):
        yield from map(str, action.choices or ())


def _behind(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield action


def _is_path(action: argparse.Action) -> bool:
    return action.type is Path or str(action.metavar) in OF_FILES


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if not action.option_strings:
            continue
        shown = str(action.metavar or "")
        choices = tuple(map(str, action.choices or ())) or _in_braces(shown)
        yield Option(
            flag=action.option_strings[-1],
            text=_first_sentence(action.help or ""),
            choices=choices,
            is_switch=action.nargs == 0,
            takes_file=not choices and _is_path(action),
        )


def _in_braces(shown: str) -> tuple[str, ...]:
    """`{true,false}`, but for a choice that stands for others, as INT does."""
    if not shown.startswith("{"):
        return ()
    return tuple(choice for choice in shown.strip("{}").split(",") if choice != "INT")


def _of_swift() -> dict[str, Option]:
    found = {}
    for name, flag in sorted(flags().items()):
        schema = flag_schema(flag)
        enums = [one["enum"] for one in schema.get("anyOf", [schema]) if "enum" in one]
        choices = [
            str(value).lower() if isinstance(value, bool) else str(value) for values in enums for value in values
        ]
        found[f"--{name}"] = Option(
            flag=f"--{name}",
            text=_first_sentence(flag.text),
            choices=tuple(dict.fromkeys(choice for choice in choices if choice != "None")),
            takes_file=name in _FILES_OF_SWIFT,
        )
    return found


_FILES_OF_SWIFT = (
    *("model", "dataset", "val_dataset", "output_dir", "external_plugins", "resume_from_checkpoint", "adapters"),
    *("deepspeed", "custom_dataset_info", "logging_dir"),
)


def _first_sentence(text: str) -> str:
    """Short enough for a line beside the flag."""
    return text.replace("%(default)s", "").partition(". ")[0].partition(" (default")[0].rstrip(".")[:100]
