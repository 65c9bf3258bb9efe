"""`vlpack schema`: what editors complete and check training files by."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from swift_vlpack.cli.command import Command
from swift_vlpack.cli.schema_fusion import fusion_schema, stream_schema
from swift_vlpack.cli.schema_training import training_schema
from swift_vlpack.errors import ConfigError
from swift_vlpack.files import write_whole


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--fusion", action="store_true", help="the schema of a fusion_config file instead")
    form.add_argument("--stream", action="store_true", help="the schema of a stream of text instead")


def _run(args: argparse.Namespace) -> int:
    text = schema_text("fusion" if args.fusion else "stream" if args.stream else "training")
    if args.output is None:
        print(text, end="")
        return 0
    try:
        write_whole(args.output, text.encode())
    except OSError as error:
        raise ConfigError(f"--output {args.output}: cannot be written ({error.strerror})") from None
    return 0


def schema_text(form: str = "training") -> str:
    """Return the schema of `training`, `fusion` or `stream` files as a file."""
    schema = {"training": training_schema, "fusion": fusion_schema, "stream": stream_schema}[form]()
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


SCHEMA = Command(
    name="schema",
    text="print the JSON schema of training files, for editors",
    usage="vlpack schema [--fusion | --stream] [--output FILE]",
    description=(
        "Print the JSON schema of a training file: packing options, the options of the installed ms-swift, and the ENV "
        "block. An editor with a YAML language server completes and checks files that begin with "
        "`# yaml-language-server: $schema=FILE`; the one in configs/ is made by this command."
    ),
    add_flags=_add_flags,
    run=_run,
)
