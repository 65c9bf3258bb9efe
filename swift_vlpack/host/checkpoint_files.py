"""Record sizes and digests of a checkpoint's files when it is written, and compare them before it is loaded.

The ranks share the reading: each distinct file is read by one of the ranks that see it. So it makes no difference
whether all ranks share a folder or each node has its own disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.comm import Comm
from swift_vlpack.envelope import Named, Whole

Records = Mapping[str, Sequence[Sequence[Any]]]
"""Path of a file in the checkpoint -> [bytes, digest] of each version of it. Nodes may write different versions."""
RECORDS = Named([(Whole(), str)])
"""The shape of records in a saved state."""
BYTES_OF_PIECE = 64 * 1024**2
"""Bytes of a piece. Pieces of a file are read in parallel, so that a single large file is no bottleneck."""
NUM_THREADS = 4
_PART_OF_DEEPSPEED = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
"""The name that DeepSpeed gives to the part of the optimizer that a rank saves."""
_HEADER_OF_SAFETENSORS = 8
"""Bytes at the start of a safetensors file that hold the length of its header."""


class FileIdentity(NamedTuple):
    """Facts that tell files apart: ranks with equal values see the same file, on a shared disk."""

    size: int
    inode: int
    modified: int


def recorded(folder: Path, comm: Comm, without: Collection[str] = ()) -> dict[str, list[list[Any]]]:
    """Return sizes and digests of all files below a folder. All ranks must call this and get the same result."""
    everyone = comm.results_of_all(lambda: _seen(folder, without))
    mine = shares(everyone)[comm.rank]
    records: dict[str, list[list[Any]]] = {}
    for found in comm.results_of_all(lambda: [(name, (folder / name).stat().st_size, digest_of_file(folder / name))
                                              for name in mine]):  # fmt: skip
        for name, *record in found:
            records.setdefault(name, [])
            records[name] += [record] * (record not in records[name])
    return {name: sorted(records[name]) for name in sorted(records)}


def damages(folder: Path, records: Records, comm: Comm) -> list[str]:
    """Describe every file that differs from its record. All ranks must call this and get the same result."""
    everyone = comm.results_of_all(lambda: {name: seen for name, seen in _seen(folder).items() if name in records})
    mine = shares(everyone)[comm.rank]
    lost = [f"{folder / name} is missing" for name in records if not any(name in seen for seen in everyone)]
    wrong = comm.results_of_all(lambda: [said for name in mine if (said := _damage(folder / name, records[name]))])
    return [*lost, *(said for of_rank in wrong for said in of_rank)]


def shares(everyone: Sequence[Mapping[str, FileIdentity]]) -> list[list[str]]:
    """Distribute distinct files among the ranks that see them, largest first, to the rank with the least to read.

    >>> disk, other = FileIdentity(10, 1, 1), FileIdentity(10, 1, 2)
    >>> shares([{"model": disk, "rng": FileIdentity(1, 2, 1)}, {"model": disk}, {"model": other}])
    [['model', 'rng'], [], ['model']]
    """
    seen_by: dict[tuple[int, str, FileIdentity], list[int]] = {}
    for rank, files in enumerate(everyone):
        for name, seen in files.items():
            seen_by.setdefault((-seen.size, name, seen), []).append(rank)
    names: list[list[str]] = [[] for _ in everyone]
    num_bytes = [0] * len(everyone)
    for (_, name, seen), ranks in sorted(seen_by.items()):
        rank = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        names[rank].append(name)
        num_bytes[rank] += seen.size
    return names


def digest_of_file(path: Path) -> str:
    """Return a digest of 16 hexadecimal digits, made of the CRC-32 of every piece.

    CRC-32 finds every flipped bit, and is several times faster than a cryptographic digest. The digest finds damage by
    disks and copies. It does not protect against a forged checkpoint.
    """
    starts = range(0, path.stat().st_size, BYTES_OF_PIECE)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        checksums = threads.map(lambda start: _checksum(path, start), starts)
        content = b"".join(checksum.to_bytes(4, "little") for checksum in checksums)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _checksum(path: Path, start: int) -> int:
    checksum, end = 0, start + BYTES_OF_PIECE
    with path.open("rb") as file:
        file.seek(start)
        while part := file.read(min(1024**2, end - file.tell())):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _seen(folder: Path, without: Collection[str] = ()) -> dict[str, FileIdentity]:
    return {name: _identity(folder / name) for name in _names(folder) if name not in without}


def _identity(path: Path) -> FileIdentity:
    state = path.stat()
    return FileIdentity(state.st_size, state.st_ino, state.st_mtime_ns)


def _names(folder: Path) -> Iterator[str]:
    for below, _, names in os.walk(folder):
        for name in names:
            path = Path(below, name)
            # Skip half-written files, files that NFS keeps after deletion, and links that lead nowhere.
            if not name.endswith(".partial") and not name.startswith(".nfs") and path.is_file():
                yield path.relative_to(folder).as_posix()


def _damage(path: Path, records: Sequence[Sequence[Any]]) -> str | None:
    size = path.stat().st_size
    if size not in (sizes := [of_file for of_file, _ in records]):
        written = " or ".join(f"{of_file:,}" for of_file in sizes)
        return f"{path} is {'empty' if not size else 'cut off' if size < min(sizes) else 'another file'}: it has " + (
            f"{size:,} bytes, {written} were written"
        )
    if [size, digest_of_file(path)] not in [list(record) for record in records]:
        return f"{path} is damaged, or another file: its content is not what was written"
    return None


def deepspeed_parts(folder: Path) -> set[int]:
    """Return the ranks whose part of DeepSpeed's optimizer is in a checkpoint; empty for that of another engine."""
    try:
        parts = folder / (folder / "latest").read_text(encoding="utf-8").strip()  # where DeepSpeed itself looks
        return {int(found[1]) for path in parts.iterdir() if (found := _PART_OF_DEEPSPEED.search(path.name))}
    except (OSError, ValueError):
        return set()


# -- without records --------------------------------------------------------------------------------------------------


def unreadable(folder: Path, without: str = "") -> list[str]:
    """Describe every file of a checkpoint that is empty, or shorter than its own format says.

    Reads only headers, except of JSON files. Skips files whose names begin with `without`, unless that is empty.
    """
    paths = [path for path in sorted(folder.iterdir()) if not (without and path.name.startswith(without))]
    return [said for path in paths if path.is_file() and (said := _defect(path))]


def _defect(path: Path) -> str | None:
    kind = path.suffix
    if kind not in (".json", ".safetensors", ".pt", ".pth", ".bin"):
        return None
    try:
        size = path.stat().st_size
        if not size:
            return f"{path} is empty"
        if kind == ".json":
            json.loads(path.read_bytes())
        elif kind == ".safetensors":
            if size != (whole := _size_by_header(path)):
                return f"{path} is cut off: it has {size:,} bytes, its header says {whole:,}"
        # torch's older format is no zip file, and nothing marks its end.
        elif _begins_as_zip(path) and not zipfile.is_zipfile(path):
            return f"{path} is cut off: the end of its zip file is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{path} is damaged: {type(error).__name__}: {error}"
    return None


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"P"


def _size_by_header(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_OF_SAFETENSORS), "little")
        if length > path.stat().st_size:
            return _HEADER_OF_SAFETENSORS + length
        header = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return _HEADER_OF_SAFETENSORS + length + max(ends, default=0)
