"""`vlpack completion`: a script that lets the shell complete commands, flags and what they take."""

from __future__ import annotations

import argparse

from swift_vlpack.cli import parser
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.completion_shells import SHELLS
from swift_vlpack.cli.completion_words import words_of


def _add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("shell", choices=tuple(SHELLS), help="the shell that the script is for")


def _run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](words_of(parser())), end="")
    return 0


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
