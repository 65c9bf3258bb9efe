"""Report the rows of a run that were trained in no pack: how many, why, and which file lists them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.reasons import about

FILE = "left_out.jsonl"
"""The list of left-out rows in the folder `vlpack` of the output directory; `rows/left_out.py` writes it."""


def left_out_report(path: Path, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the rows of a list by reason and by source.

    `num_rows` counts a row once; `num_lines` counts it once for every epoch that it was left out of. `epochs` are the
    reports of finished epochs.
    """
    lines = {(line["id"], line["reason"], line["epoch"]) for line in listed(path)}  # ranks may list a row twice
    rows = {(row, reason) for row, reason, _ in lines}
    by_reason = Counter(reason for _, reason in rows)
    # Numbers within a reason are not compared: if an epoch draws a row twice, it is counted twice and listed once.
    of_epochs, not_listed = {(reason, epoch) for _, reason, epoch in lines}, Counter[str]()
    for one in epochs:
        dropped = one["num_dropped"]
        not_listed.update({reason: dropped[reason] for reason in dropped if (reason, one["epoch"]) not in of_epochs})
    return {
        "num_rows": len(rows),
        "num_lines": len(lines),
        "reasons": {reason: {"num_rows": number, **_about(reason)} for reason, number in sorted(by_reason.items())},
        "sources": dict(sorted(Counter(row.rpartition(":")[0] for row, _ in rows).items())),
        "file": str(path) if path.is_file() else None,
        "not_listed": dict(sorted(not_listed.items())),
    }


def listed(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list. Skip other lines, such as one that a killed process left unfinished."""
    for line in json_lines.read(path):
        if isinstance(line, dict) and {"id", "reason", "epoch"} <= set(line):
            yield line


def _about(reason: str) -> dict[str, str]:
    try:
        known = about(reason)
    except ValueError:  # written by another version of this package
        return {"meaning": "", "remedy": ""}
    return {"meaning": known.meaning, "remedy": known.remedy}
