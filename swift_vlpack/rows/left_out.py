"""Write `left_out.jsonl`, which lists every row that is trained in no pack, one JSON object a line.

    {"id": "captions:17", "where": "/data/captions.jsonl:18", "reason": "file_missing",
     "error": "no such file: /data/a.jpg", "files": ["/data/a.jpg"], "epoch": 0, "when": "2026-01-31T12:00:00+00:00"}

`id` counts rows from 0, `where` counts lines from 1. `epoch` is null for rows that ms-swift's loader deleted, because
they are in no epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.samples import LeftOut, SampleId
from swift_vlpack.rows.source import RowSource, place
from swift_vlpack.runlog.left_out import listed

logger = logging.getLogger(__name__)

Key = tuple[str, int | None, str]


def deleted_by_loader(source: RowSource) -> Iterator[LeftOut]:
    """Yield the rows of a source's file that ms-swift deleted while it loaded the file."""
    for row, said in source.lost_rows.items():
        yield LeftOut(SampleId(source.name, int(row)), Reason.DELETED_BY_LOADER.value, said)


def in_no_epoch(sources: Iterable[RowSource]) -> Iterator[LeftOut]:
    """Yield the rows that no epoch can train, in the order of their files: deleted by the loader, or unreadable."""
    for source in sources:
        failed = [] if source.sizes is None else [(index, source.sizes.fault(index)) for index in source.sizes.failures]
        unreadable = [LeftOut(source.sample_id(index), *fault) for index, fault in failed]
        yield from in_order([*deleted_by_loader(source), *unreadable])


def in_order(left_out: Iterable[LeftOut]) -> list[LeftOut]:
    """Sort rows by source, and within one by their place in its file."""
    return sorted(left_out, key=lambda one: (*one.sample_id[:2], one.sample_id.part or 0))


class LeftOutRows:
    """Append to the list of a run, a file that all ranks share. A row is listed once for each epoch and reason."""

    def __init__(self, path: Path, sources: Iterable[RowSource] = ()) -> None:
        self.path = path
        self._origins = {source.name: source.origin or source.name for source in sources}
        self._listed: set[Key] | None = None
        self._is_writable = True

    def add(self, epoch: int | None, left_out: Iterable[LeftOut]) -> None:
        """List rows of an epoch. Skip rows that the file has already, as after a resume in the same folder."""
        lines = []
        for one in left_out:
            key = (str(one.sample_id), epoch, one.reason)
            # Read the file no earlier than now: most runs leave out nothing, and the list may be long.
            listed = self._listed_before() if self._listed is None else self._listed
            if key not in listed:
                listed.add(key)
                lines.append(as_json(one, epoch, self._origins))
        if lines and self._is_writable:
            try:
                json_lines.append(self.path, lines, ensure_ascii=False)
            except OSError as error:
                self._is_writable = False
                logger.warning("left-out rows are only in the log, because %s cannot be written: %s", self.path, error)

    def _listed_before(self) -> set[Key]:
        self._listed = {(line["id"], line["epoch"], line["reason"]) for line in listed(self.path)}
        return self._listed


def as_json(left_out: LeftOut, epoch: int | None, origins: Mapping[str, str]) -> dict[str, Any]:
    """Return the line of the list for a row that is left out."""
    source, row, is_loaded, _ = left_out.sample_id
    return {
        "id": str(left_out.sample_id),
        "where": place(origins.get(source, source), row, is_loaded=is_loaded),
        "reason": left_out.reason,
        "error": left_out.detail,
        "files": list(left_out.files),
        "epoch": epoch,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
