"""Record which samples were trained in which step: one line for every pack, in a file for each rank.

    {"step": 12, "epoch": 0, "pack": 23, "ids": ["captions:17", ...]}

Where samples share prefixes, `shared` has the tokens that each shares with the sample before it.

Packs are recorded unless that is switched off. Unless it was asked for, the file is bounded and keeps the latest packs,
some millions of samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.config import RECORD_PACKS, is_switched_on
from swift_vlpack.runlog.events import FOLDER

logger = logging.getLogger(__name__)

MOST_BYTES = 64 * 1024**2
"""Size at which a bounded file is renamed to be the older half. Both halves hold about 8 million samples of a rank."""
_PREFIX = "packs_rank"


class PackLog:
    """Append packs to the file of a rank, bounded if `most_bytes` is given."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self._is_writable = True

    @classmethod
    def wanted(cls, path: Path, environ: Mapping[str, str]) -> PackLog | None:
        """Return the log to write, if any: an unbounded one on request, else a bounded one."""
        if not environ.get(RECORD_PACKS, "").strip():
            return cls(path, MOST_BYTES)
        return cls(path) if is_switched_on(RECORD_PACKS, environ) else None

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append packs. A full file becomes the older half. Raises `OSError` only if the user asked for the log."""
        if not self._is_writable:
            return
        try:
            if self.most_bytes is not None and self.path.exists() and self.path.stat().st_size > self.most_bytes:
                self.path.replace(older_half(self.path))
            json_lines.append(self.path, lines)
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


def recorded_ranks(folder: Path) -> list[int]:
    """Return the ranks that have a file in an output directory."""
    found = [path.stem.removeprefix(_PREFIX) for path in (folder / FOLDER).glob(f"{_PREFIX}*.jsonl")]
    return sorted(int(rank) for rank in found if rank.isdecimal())


def read_packs(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the packs of a file and its older half, oldest first. An unfinished line is skipped."""
    for file in (older_half(path), path):
        for line in json_lines.read(file):
            if isinstance(line, dict) and {"step", "epoch", "pack", "ids"} <= set(line):
                yield line


def packs_of_step(lines: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Select the packs of a step. If the step was trained twice, select the last time: the first was lost."""
    latest: list[dict[str, Any]] = []
    step_before = None
    for line in lines:
        if line["step"] == step:
            latest = [*latest, line] if step_before == step else [line]
        step_before = line["step"]
    return latest
