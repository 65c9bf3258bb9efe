"""What is remembered of lengths, for a reader.

>>> [ago(60 * 60 * 24 * days) for days in (0, 1.2, 40)]
['today', '1 day ago', '40 days ago']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift_vlpack.cli.doctor_advice import size
from swift_vlpack.words import counted

_COLUMNS = ("rows", "size", "last used", "source", "template", "model type")
_IS_RIGHT = (True, True, True, False, False, False)


def cache_text(report: Mapping[str, Any]) -> str:
    """A table, one line for every source under one template and its settings, and the sum."""
    entries = report["entries"]
    if not entries:
        return f"{report['folder']}: nothing is remembered of lengths{' that is so' if report['is_filtered'] else ''}"
    rows = [list(_COLUMNS), *map(_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [_line(row, widths) for row in rows]
    return "\n".join([report["folder"], *table, _sum(report)])


def _sum(report: Mapping[str, Any]) -> str:
    files = sum(len(entry["files"]) for entry in report["entries"]) + len(report["shared_files"])
    return f"{counted(len(report['entries']), 'source')}, {counted(files, 'file')}, {size(report['bytes'])}"


def _row(entry: Mapping[str, Any]) -> list[str]:
    of = ("source", "template", "model_type")
    return [
        f"{entry['rows']:,}", size(entry["bytes"]), ago(entry["seconds_since_used"]),
        *(str(entry[name] or "?") for name in of),
    ]  # fmt: skip


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, _IS_RIGHT, strict=True)
    return "  ".join(cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells).rstrip()


def ago(seconds: float) -> str:
    """In days."""
    days = int(seconds // 86400)
    return f"{counted(days, 'day')} ago" if days > 0 else "today"
