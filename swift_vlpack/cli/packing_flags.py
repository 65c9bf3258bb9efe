"""The packing options as flags of a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from swift_vlpack.config import PackingConfig, kind_of


def add_packing_flags(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """One flag for every packing option, with what it takes, its help and its default here, where that is another."""
    group = parser.add_argument_group(
        "packing options",
        "The same names are keys of a training file and, in capitals behind VLPACK_, environment variables. "
        "A flag wins over a key, a key over a variable, a variable over the default.",
    )
    defaults = {"packing": "true", **defaults}
    for spec in fields(PackingConfig):
        default = defaults.get(spec.name, shown(spec.default))
        group.add_argument(
            f"--{spec.name}",
            metavar=kind_of(spec.name),
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} (default: {default})",
        )


def is_given(argv: Sequence[str], flag: str) -> bool:
    """Whether the flag is among these, with its value in the same part or the next."""
    return any(part.partition("=")[0] == flag for part in argv)


def shown(default: Any) -> str:
    """A default as it is typed.

    >>> shown(True), shown(0), shown(None)
    ('true', '0', 'none')
    """
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
