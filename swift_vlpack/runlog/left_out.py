"""Report the rows of a run that were trained in no pack: how many, why, and which file lists them all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.files import write_whole
from swift_vlpack.reasons import about
from swift_vlpack.runlog.events import FOLDER

FILE = "left_out.jsonl"
"""The list of left-out rows in the folder `vlpack` of the output directory; `rows/left_out.py` writes it."""
ALL = "left_out_of_all_segments.jsonl"
"""The joined list, which is written if the segments of a run have several."""


def left_out_report(folder: Path, folders: Sequence[Path], epochs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Count left-out rows by reason and by source, and name the file that lists them.

    `num_rows` counts a row once; `num_lines` counts it once for every epoch that it was left out of.
    """
    paths = [path for path in (one / FOLDER / FILE for one in folders) if path.is_file()]
    lines = left_out_rows(paths)
    rows = {(line["id"], line["reason"]) for line in lines}
    by_reason = Counter(reason for _, reason in rows)
    return {
        "num_rows": len(rows),
        "num_lines": len(lines),
        "reasons": {reason: {"num_rows": number, **_about(reason)} for reason, number in sorted(by_reason.items())},
        "sources": dict(sorted(Counter(row_id.rpartition(":")[0] for row_id, _ in rows).items())),
        "file": _one_file(folder, paths, lines),
        "not_listed": _not_listed(lines, epochs),
    }


def listed(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list. Skip other lines, such as one that a killed process left unfinished."""
    for line in json_lines.read(path):
        if isinstance(line, dict) and {"id", "reason", "epoch"} <= set(line):
            yield line


def left_out_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read the lines of several lists. A row that two segments left out of the same epoch is returned once."""
    found: dict[tuple[str, int | None, str], dict[str, Any]] = {}
    for line in (line for path in paths for line in listed(path)):
        found.setdefault((line["id"], line["epoch"], line["reason"]), line)
    return list(found.values())


def _not_listed(lines: Sequence[Mapping[str, Any]], epochs: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Return the counts of those reasons that an epoch's report has and no line of that epoch.

    Numbers within a reason are not compared: if an epoch draws a row twice, it is counted twice and listed once.
    """
    listed = {(line["epoch"], line["reason"]) for line in lines}
    missing: Counter[str] = Counter()
    for epoch, report in epochs.items():
        missing.update({reason: n for reason, n in report["num_dropped"].items() if (epoch, reason) not in listed})
    return dict(sorted(missing.items()))


def _about(reason: str) -> dict[str, str]:
    try:
        known = about(reason)
    except ValueError:  # written by another version of this package
        return {"meaning": "", "remedy": ""}
    return {"meaning": known.meaning, "remedy": known.remedy}


def _one_file(folder: Path, paths: Sequence[Path], lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the file that lists every left-out row. If segments have files of their own, write a joined one."""
    if len(paths) < 2:
        return str(paths[0]) if paths else None
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path = folder / FOLDER / ALL
    try:
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError:
        return ", ".join(map(str, paths))
    return str(path)
