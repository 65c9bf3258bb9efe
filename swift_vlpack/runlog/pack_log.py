"""Record which samples were trained in which step: one line for every pack, in a file for each rank.

    {"step": 12, "epoch": 0, "pack": 23, "ids": ["captions:17", ...], "lengths": [40, ...]}

Where samples share prefixes, `shared` has the tokens that each shares with the sample before it. The first line of a
segment has `begin`, the time at which the run log says that the segment began. So packs of another run in the folder,
and packs of steps that a resume lost, cannot be taken for those of the segment.

Packs are recorded unless that is switched off. Unless it was asked for, the file is bounded and keeps the latest packs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.config import RECORD_PACKS, is_switched_on
from swift_vlpack.runlog.events import FOLDER

logger = logging.getLogger(__name__)

MOST_BYTES = 8 * 1024**2
"""Size at which a bounded file is renamed to be the older half. Both halves are 16 MB and hold about half a million
samples of a rank: a line has some 30 bytes a sample."""
_PREFIX = "packs_rank"


class PackLog:
    """Append packs to the file of a rank, bounded if `most_bytes` is given."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self._is_writable = True
        self._begin: str | None = None
        self._is_marked = False

    @classmethod
    def wanted(cls, path: Path, environ: Mapping[str, str]) -> PackLog | None:
        """Return the log to write, if any: an unbounded one on request, else a bounded one."""
        if not environ.get(RECORD_PACKS, "").strip():
            return cls(path, MOST_BYTES)
        return cls(path) if is_switched_on(RECORD_PACKS, environ) else None

    def begin(self, when: str) -> None:
        """Begin a segment, which the next line will name by the time of its start."""
        self._begin, self._is_marked = when, False

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append packs. A full file becomes the older half. Raises `OSError` only if the user asked for the log."""
        if not self._is_writable or not lines:
            return
        try:
            if self.most_bytes is not None and self.path.exists() and self.path.stat().st_size > self.most_bytes:
                self.path.replace(older_half(self.path))
                self._is_marked = False  # each file says by itself whose packs it has
            if self._begin is not None and not self._is_marked:
                lines = [{**lines[0], "begin": self._begin}, *lines[1:]]
            json_lines.append(self.path, lines)
            self._is_marked = True
        except OSError as error:
            if self.most_bytes is None:
                raise
            self._is_writable = False  # the user did not ask for this record, so the run continues without it
            logger.warning("packs are no longer recorded, because %s cannot be written: %s", self.path, error)


def pack_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank in an output directory."""
    return folder / FOLDER / f"{_PREFIX}{rank}.jsonl"


def older_half(path: Path) -> Path:
    """Return where the older packs of a bounded file are."""
    return path.with_suffix(".before.jsonl")


def read_packs(path: Path, begin: str) -> Iterator[dict[str, Any]]:
    """Yield the packs of the segment that began at this time, oldest first. An unfinished line is skipped."""
    for file in (older_half(path), path):
        of_segment = None
        for line in json_lines.read(file):
            if isinstance(line, dict) and {"step", "epoch", "pack", "ids"} <= set(line):
                of_segment = line.get("begin", of_segment)
                if of_segment == begin:
                    yield line
