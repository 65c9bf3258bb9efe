"""`vlpack report`: report a run from the files in its output directory, without importing torch or ms-swift."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from swift_vlpack.cli.command import Command
from swift_vlpack.host.path_checks import check_file
from swift_vlpack.lines import labelled, table
from swift_vlpack.pages.page import write_page
from swift_vlpack.pages.report import Report, sections
from swift_vlpack.pages.report_page import report_page
from swift_vlpack.pages.safe_text import visible
from swift_vlpack.runlog.folder import find_run
from swift_vlpack.runlog.report import run_report


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output_dir",
        type=Path,
        help="output_dir of a run, running, ended or killed; of several versions in it (v0-..., v1-...) the newest",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as one page with plots, for any browser")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _run(args: argparse.Namespace) -> int:
    if args.html is not None:
        check_file("--html", args.html)
    report = run_report(find_run(args.output_dir))
    if args.html is not None:
        write_page(args.html, report_page(report))
    if args.json:
        print(json.dumps(report, allow_nan=False))
    elif args.html is not None:
        print(f"written: {args.html}")
    else:
        # 120 columns where no terminal reads it
        print(visible(report_text(report, shutil.get_terminal_size((120, 24)).columns)))
    return 0


def report_text(report: Report, columns: int) -> str:
    """Write the report in lines of at most `columns` characters."""
    parts = []
    for section in sections(report):
        lines = labelled(((f"  {label}", text) for label, text in section.lines), width=14, columns=columns)
        shown = [f"  {line}" for line in table(section.columns, section.rows)] if section.rows else []
        parts.append("\n".join(filter(None, (section.title, lines, *shown))))
    return "\n\n".join(parts)


REPORT = Command(
    name="report",
    text="report what a run has trained: fill, speed, padding saved, sources, left-out rows",
    usage="vlpack report OUTPUT_DIR [--html FILE] [--json]",
    description=(
        "Report what a run has trained so far, during training or after it, also if it was killed: fill and speed "
        "over time, padding saved, shares of sources, left-out rows with reasons, checkpoints and resumes."
    ),
    add_flags=_add_flags,
    run=_run,
)
