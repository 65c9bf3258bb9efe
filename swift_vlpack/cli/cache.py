"""`vlpack cache list` and `vlpack cache clear`: the lengths that are remembered from run to run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from swift_vlpack.cli.cache_text import cache_text
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.doctor_advice import size
from swift_vlpack.config import chosen_options
from swift_vlpack.errors import ConfigError
from swift_vlpack.lengths.cache_folder import Remembered, lengths_folder, remembered_in, removed, shared_files
from swift_vlpack.words import counted

SECONDS_A_DAY = 86400


def _add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|clear", prog="vlpack cache")
    for name, text in (("list", "show what is remembered"), ("clear", "remove it, or a part of it")):
        action = actions.add_parser(name, allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for what in ("source", "template", "model_type"):
            action.add_argument(
                f"--{what}", metavar="PATTERN", help=f"only where the {what.replace('_', ' ')} is this; * and ? work"
            )
        action.add_argument("--older-than", type=float, metavar="DAYS", help="only what was not used for so many days")
        action.add_argument(
            "--packing_cache_dir",
            metavar="FOLDER",
            help="where it is remembered (default: VLPACK_PACKING_CACHE_DIR, else vlpack/lengths in MODELSCOPE_CACHE)",
        )
        if name == "list":
            action.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        else:
            action.add_argument("--yes", action="store_true", help="do not ask")


def _run(args: argparse.Namespace) -> int:
    flags = {"packing_cache_dir": args.packing_cache_dir} if args.packing_cache_dir else None
    folder = lengths_folder(chosen_options(os.environ, flags=flags).get("packing_cache_dir"), os.environ)
    groups = remembered_in(folder)
    wanted = [group for group in groups if _is_wanted(group, args)]
    # What all sources share is of use until the last of them goes.
    shared = shared_files(folder) if len(wanted) == len(groups) else []
    report = cache_report(folder, wanted, shared, is_filtered=_is_filtered(args))
    if args.action == "list":
        print(json.dumps(report) if args.json else cache_text(report))
        return 0
    return _clear(report, [*(path for group in wanted for path in group.files), *shared], is_sure=args.yes)


def _is_filtered(args: argparse.Namespace) -> bool:
    return any(given is not None for given in (args.source, args.template, args.model_type, args.older_than))


def _is_wanted(group: Remembered, args: argparse.Namespace) -> bool:
    about = group.about
    named = (
        (args.source, group.source),
        (args.template, about.template if about else ""),
        (args.model_type, about.model_type if about else ""),
    )
    is_named = all(pattern is None or fnmatchcase(name, pattern) for pattern, name in named)
    is_old = args.older_than is None or time.time() - group.used >= args.older_than * SECONDS_A_DAY
    return is_named and is_old


def cache_report(
    folder: Path, groups: Sequence[Remembered], shared: Sequence[Path], *, is_filtered: bool = False
) -> dict[str, Any]:
    """What is remembered, as plain numbers and names."""
    now = time.time()
    entries = [
        {
            "source": group.source,
            "origin": group.about.origin if group.about else None,
            "template": group.about.template if group.about else None,
            "model_type": group.about.model_type if group.about else None,
            "version": group.about.version if group.about else None,
            "rows": group.num_rows,
            "bytes": group.num_bytes,
            "seconds_since_used": round(max(0.0, now - group.used), 1),
            "files": [path.name for path in group.files],
        }
        for group in groups
    ]
    num_bytes = sum(group.num_bytes for group in groups) + sum(path.stat().st_size for path in shared)
    return {
        "folder": str(folder),
        "is_filtered": is_filtered,
        "bytes": num_bytes,
        "entries": entries,
        "shared_files": [path.name for path in shared],
    }


def _clear(report: dict[str, Any], files: Sequence[Path], *, is_sure: bool) -> int:
    if not files:
        print(cache_text(report))
        return 0
    if not is_sure:
        print(cache_text(report))
        if not sys.stdin.isatty():
            raise ConfigError("nobody is there to ask whether these may go; say so with --yes")
        if input("Remove these? Lengths are measured again at the next start. [y/N] ").strip().lower() not in (
            "y",
            "yes",
        ):
            print("nothing is removed")
            return 0
    num_bytes = removed(files)
    print(f"{counted(len(files), 'file')} removed from {report['folder']}, {size(num_bytes)} are free")
    return 0


CACHE = Command(
    name="cache",
    text="list or clear the lengths that are remembered from run to run",
    usage=(
        "vlpack cache list [--source PATTERN] [--template PATTERN] [--model_type PATTERN] [--older-than DAYS]\n"
        "                         [--packing_cache_dir FOLDER] [--json]\n"
        "       vlpack cache clear [the same] [--yes]"
    ),
    description=(
        "List or clear the remembered lengths of rows (packing_cache_dir): rows, size, when they were last used, of "
        "which source and template. What is cleared is measured again at the next start. Files that this package did "
        "not write are never touched."
    ),
    add_flags=_add_flags,
    run=_run,
)
