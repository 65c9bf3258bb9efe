"""The file that lists every row that is trained in no pack, for those that read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines

FILE = "left_out.jsonl"
"""In the folder `vlpack` of the output directory."""


def listed(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a list; what a killed process left half written is passed over."""
    for line in json_lines.read(path):
        if isinstance(line, dict) and {"id", "reason", "epoch"} <= set(line):
            yield line
