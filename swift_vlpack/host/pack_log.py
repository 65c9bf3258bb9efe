"""Which samples were trained when: a line for every pack, in a file of its rank.

    {"step": 12, "epoch": 0, "pack": 23, "ids": ["captions:17", ...]}

Planned packs can be computed again, so they are on record only where that is asked for. Packs of a stream cannot, so
they always are, unless that is refused; then the file is bounded: the latest packs are kept, some millions of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.utils import get_logger

from swift_vlpack import json_lines
from swift_vlpack.config import RECORD_PACKS, is_switched_on
from swift_vlpack.rows.samples import PackRecord

logger = get_logger()

PACKS_FILE = "packs_rank{}.jsonl"
MOST_BYTES = 64 * 1024**2
"""Of a file that nobody asked for; with the one before it twice as much is kept, some 8 million samples a rank."""


class PackLog:
    """The file of a rank."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self._is_writable = True

    @classmethod
    def wanted(cls, path: Path, environ: Mapping[str, str], leads_back: bool) -> PackLog | None:
        """The file, if there shall be one: where it is asked for, or where packs cannot be computed again."""
        if not environ.get(RECORD_PACKS, "").strip():
            return None if leads_back else cls(path, MOST_BYTES)
        return cls(path) if is_switched_on(RECORD_PACKS, environ) else None

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines; a file that has become too large makes room and is kept until the next one has."""
        if not self._is_writable:
            return
        try:
            if self.most_bytes is not None and self.path.exists() and self.path.stat().st_size > self.most_bytes:
                self.path.replace(before(self.path))
            json_lines.append(self.path, lines)
        except OSError as error:
            if self.most_bytes is None:
                raise
            self._is_writable = False  # the run goes on: nobody asked for the record
            logger.warning(f"packs are no longer recorded, {self.path} cannot be written: {error}")


def as_line(record: PackRecord, step: int) -> dict[str, Any]:
    """A pack that was trained in a step."""
    ids = [str(sample_id) for sample_id in record.sample_ids]
    return {"step": step, "epoch": record.epoch, "pack": record.number, "ids": ids}


def before(path: Path) -> Path:
    """Where the older packs of a bounded file are."""
    return path.with_suffix(".before.jsonl")


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a rank, oldest first; what a killed process left half written is passed over."""
    for file in (before(path), path):
        for line in json_lines.read(file):
            if isinstance(line, dict) and {"step", "epoch", "pack", "ids"} <= set(line):
                yield line
