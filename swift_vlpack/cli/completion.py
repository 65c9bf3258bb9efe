"""Print a script that lets a shell complete `vlpack`: commands, flags, their choices, and files.

`shtab` writes the script from the parser. The parser of a command about a run knows its own flags only, so this module
adds the flags of the installed ms-swift.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swift_vlpack.cli import parser as parser_of_all
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.schema_values import flag_schema
from swift_vlpack.host.launch import SWIFT_COMMANDS
from swift_vlpack.host.swift_flags import Flag, flags

SHELLS = ("bash", "zsh", "fish")
"""Shells that are offered: a test presses Tab in each. shtab supports more, which no test has tried."""
_FILES = ("FILE", "PATH", "FOLDER", "OUTPUT_DIR")
"""Placeholders in the help that stand for a path."""
_FILES_OF_SWIFT = (
    *("model", "dataset", "val_dataset", "output_dir", "external_plugins", "resume_from_checkpoint", "adapters"),
    *("deepspeed", "custom_dataset_info", "logging_dir"),
)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def _run(args: argparse.Namespace) -> int:
    import shtab

    root = parser_of_all()
    _add_what_help_leaves_out(root)
    print(shtab.complete(root, args.shell), end="")
    return 0


def _add_what_help_leaves_out(parser: argparse.ArgumentParser) -> None:
    """Add all that a shell may complete to a parser and its subparsers. They cannot parse anything afterwards."""
    command: Command | None = parser.get_default("of_command")
    if command is not None and command.takes_run_flags:
        _add_line_of_run(parser)
    for action in parser._actions:
        _add_values(action)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _add_what_help_leaves_out(below)


def _add_line_of_run(parser: argparse.ArgumentParser) -> None:
    """Add what the command reads from `args.flags`: the training command or file, and the flags of ms-swift."""
    if "--config" in parser._option_string_actions:
        parser.add_argument("command", nargs="?", choices=SWIFT_COMMANDS)
    else:
        parser.add_argument("config", nargs="?", type=Path)
    for name, flag in sorted(flags().items()):
        if f"--{name}" not in parser._option_string_actions:
            made = parser.add_argument(f"--{name}", choices=_choices(flag), help=_brief(flag.text))
            if name in _FILES_OF_SWIFT:
                made.type = Path


def _choices(flag: Flag) -> tuple[str, ...] | None:
    schema = flag_schema(flag)
    values = [value for one in schema.get("anyOf", [schema]) for value in one.get("enum", ()) if value is not None]
    return tuple(dict.fromkeys(_typed(value) for value in values)) or None


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_values(action: argparse.Action) -> None:
    """Give an action what shtab reads: the choices that only its help text lists, or that its value is a file."""
    shown = str(action.metavar or "")
    if action.choices is None and shown.startswith("{"):
        # INT stands for any number.
        action.choices = [choice for choice in shown.strip("{}").split(",") if choice != "INT"]
    if action.choices is None and (action.type is Path or shown in _FILES):
        import shtab

        action.complete = shtab.FILE  # type: ignore[attr-defined] # as shtab asks for it
    action.help = _brief(action.help or "")


def _brief(text: str) -> str:
    """Shorten a help text to its first sentence, at most 100 characters: shells show one line for each flag."""
    text = text.replace("%(default)s", "").partition(". ")[0].partition(" (default")[0].rstrip(".")[:100]
    return text.replace("%", "%%")


COMPLETION = Command(
    name="completion",
    text="print a script that completes vlpack in bash, zsh or fish",
    usage="vlpack completion bash|zsh|fish",
    description=(
        "Print a script by which the shell completes commands, packing options with their choices, the options of the "
        'installed ms-swift, and files. bash: eval "$(vlpack completion bash)" in ~/.bashrc; zsh: write it to a file '
        "_vlpack in a folder of fpath; fish: write it to ~/.config/fish/completions/vlpack.fish. Write it anew when "
        "ms-swift changes."
    ),
    add_flags=_add_flags,
    run=_run,
)
