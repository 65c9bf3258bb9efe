"""`vlpack cache list` and `vlpack cache clear`: show or remove the cached lengths of rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.cli.command import Command
from swift_vlpack.config import chosen_options
from swift_vlpack.errors import ConfigError
from swift_vlpack.lengths.cache_folder import Remembered, lengths_folder, remembered_in, removed, shared_files
from swift_vlpack.lines import size, table
from swift_vlpack.words import counted

SECONDS_A_DAY = 86400
_NAMES = ("source", "template", "model_type")
_COLUMNS = ("source", "template", "model type", "rows", "size", "last used")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|clear", prog="vlpack cache")
    for name, text in (("list", "show what is remembered"), ("clear", "remove it")):
        action = actions.add_parser(name, allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}.")
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
    shared = shared_files(folder)
    report = cache_report(folder, groups, shared)
    if args.action == "list":
        print(json.dumps(report) if args.json else cache_text(report))
        return 0
    return _clear(report, [*(path for group in groups for path in group.files), *shared], is_sure=args.yes)


def cache_report(folder: Path, groups: Sequence[Remembered], shared: Sequence[Path]) -> dict[str, Any]:
    """Return the report for `--json`: an entry for each source under one template, and the sum of all sizes."""
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
            raise ConfigError("there is no terminal to ask on whether these may go; confirm with --yes")
        answer = input("Remove these? Lengths are measured again at the next start. [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing is removed")
            return 0
    num_bytes = removed(files)
    print(f"{counted(len(files), 'file')} removed from {report['folder']}, {size(num_bytes)} are free")
    return 0


def cache_text(report: Mapping[str, Any]) -> str:
    """Write the report for a reader: a table with a line for each entry, and the sum."""
    entries = report["entries"]
    if not entries:
        return f"{report['folder']}: no cached lengths"
    rows = [
        (
            *(str(entry[name] or "?") for name in _NAMES),
            f"{entry['rows']:,}",
            size(entry["bytes"]),
            ago(entry["seconds_since_used"]),
        )
        for entry in entries
    ]
    files = sum(len(entry["files"]) for entry in entries) + len(report["shared_files"])
    total = f"{counted(len(entries), 'source')}, {counted(files, 'file')}, {size(report['bytes'])}"
    return "\n".join([report["folder"], *table(_COLUMNS, rows, num_texts=len(_NAMES)), total])


def ago(seconds: float) -> str:
    """Say in days how long ago something was.

    >>> [ago(SECONDS_A_DAY * days) for days in (0, 1.2, 40)]
    ['today', '1 day ago', '40 days ago']
    """
    days = int(seconds // SECONDS_A_DAY)
    return f"{counted(days, 'day')} ago" if days > 0 else "today"


CACHE = Command(
    name="cache",
    text="list or clear the lengths that are remembered from run to run",
    usage=(
        "vlpack cache list [--packing_cache_dir FOLDER] [--json]\n"
        "       vlpack cache clear [--packing_cache_dir FOLDER] [--yes]"
    ),
    description=(
        "List or clear the remembered lengths of rows (packing_cache_dir): rows, size, when they were last used, of "
        "which source and template. What is cleared is measured again at the next start. Files that this package did "
        "not write are never touched."
    ),
    add_flags=_add_flags,
    run=_run,
)
