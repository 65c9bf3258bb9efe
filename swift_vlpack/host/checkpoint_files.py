"""Record size and ends of a checkpoint's files when it is saved, and name each that differs before it is loaded.

Of a file only the first and the last 64 kB are read, so a save reads nothing back whole. A cut, empty, missing or
exchanged file is found; one flipped bit in the middle of large weights is not.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.comm import Comm
from swift_vlpack.runlog.folder import ROWS, STATE

Records = Mapping[str, Sequence[Sequence[Any]]]
"""Path of a file in the checkpoint -> [bytes, checksum] of each version of it. Nodes may write different versions."""
BYTES_OF_END = 64 * 1024


def recorded(folder: Path, comm: Comm, *, is_first: bool) -> dict[str, list[list[Any]]]:
    """Return the records of all files below a folder, as the first rank of each machine sees them."""
    records: dict[str, list[list[Any]]] = {}
    for seen in comm.results_of_all(lambda: dict(_seen(folder)) if is_first else {}):
        for name, record in seen.items():
            versions = records.setdefault(name, [])
            versions += [record] * (record not in versions)
    return records


def damages(folder: Path, records: Records, comm: Comm) -> list[str]:
    """Describe every file that differs from its record on a rank. All ranks must call this and get the same result."""
    everyone = comm.results_of_all(lambda: dict(_seen(folder)))
    found = [f"{folder / name} is missing" for name in records if not any(name in seen for seen in everyone)]
    for rank, seen in enumerate(everyone):
        where = f" (rank {rank} sees it)" if len(everyone) > 1 else ""
        wrong = (name for name in records if name in seen and seen[name] not in map(list, records[name]))
        found += [f"{folder / name} is {_difference(seen[name][0], records[name])}{where}" for name in wrong]
    return found


def _difference(size: int, records: Sequence[Sequence[Any]]) -> str:
    sizes = [written for written, _ in records]
    if size in sizes:
        return "another file: its first or last 64 kB are not what was written"
    kind = "empty" if not size else "cut off" if size < min(sizes) else "another file"
    return f"{kind}: it has {size:,} bytes, {' or '.join(f'{written:,}' for written in sizes)} were written"


def _seen(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    for below, _, names in os.walk(folder):
        for name in names:
            path = Path(below, name)
            # Skip half-written files, deleted ones that NFS keeps, links that lead nowhere, and what is written later.
            is_other = name.endswith(".partial") or name.startswith(".nfs") or name in (STATE, ROWS)
            if not is_other and path.is_file():
                yield path.relative_to(folder).as_posix(), _record(path)


def _record(path: Path) -> list[Any]:
    with path.open("rb") as file:
        size, ends = os.fstat(file.fileno()).st_size, file.read(BYTES_OF_END)
        file.seek(max(0, size - BYTES_OF_END))
        return [size, f"{zlib.crc32(ends + file.read(BYTES_OF_END)):08x}"]
