"""A file that remembers the sizes of rows: appended to as rows are measured, whole whenever a process dies.

The file is a magic line and then blocks: a header (mark, number of records, checksum of these, checksum of itself) and
fixed-size records. A row is known by a key made of everything that its size depends on, so records are never wrong,
only no longer asked for; of two records with one key the later counts. The key of a failure has in it, besides, what
may cure it. A block that a killed process left unfinished at the end is cut off; any other damage sets the file aside
and starts a new one. What was said of failures is in a second file, of JSON lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.core import json_lines
from swift_vlpack.core.account.reasons import REASONS, about
from swift_vlpack.data.rows.faults import Fault
from swift_vlpack.data.rows.media import names_of_files, real_file
from swift_vlpack.data.rows.row_digest import row_bytes

logger = logging.getLogger(__name__)

MAGIC = b"vlpack lengths 2\n"
_BLOCK = struct.Struct("<4sIII")  # mark, number of records, checksum of the records, checksum of all this
_MARK = b"rows"

SIZE = np.dtype(
    [
        ("length", "<u4"),  # tokens; 0 where the row cannot be encoded
        ("images", "<u4"),
        ("patches", "<u4"),
        ("supervised", "<u4"),  # tokens with a label
        ("aspect", "<f4"),  # longer side over shorter, of the most extreme image or video
        ("reason", "u1"),  # why it cannot be encoded: its code in `core/account/reasons.py`
        ("proof", "u1"),  # how far the size is to be trusted
    ]
)
"""What is known of a row."""

BY_HEADER, AGREED, IN_FULL, DIFFERS, VOUCHED = 0, 1, 2, 3, 4
"""Proof: from image headers; from headers and found equal to the full encoding; from the full encoding; from the full
encoding, and headers gave another size, so that those of the whole source are not to be trusted; from headers, and rows
of its kinds were found equal in another source."""

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
RECORD = np.dtype([("key", KEY), ("size", SIZE)])
NO_KEY = np.zeros((), KEY)
"""Of a row that cannot be told from another one, so that nothing is remembered of it."""

_INCURABLE = [code for code, reason in enumerate(REASONS) if not reason or about(reason).is_of_content]
_NUM_FOLDERS = 4096  # whose real paths are remembered during a pass

Sizes = NDArray[np.void]
Keys = NDArray[np.void]


class KnownSizes:
    """The records of a file, sorted, to look up many keys at once."""

    def __init__(self, records: NDArray[np.void], cures: bytes = bytes(KEY.itemsize)) -> None:
        self._order = np.argsort(records["key"]["high"], kind="stable")  # of equal keys the latest is last
        self.records = records[self._order]
        self._high = np.ascontiguousarray(self.records["key"]["high"])
        self._cures = cures
        self.num_differing = int((records["size"]["proof"] == DIFFERS).sum())

    def __len__(self) -> int:
        return len(self.records)

    def of(self, keys: Keys) -> tuple[NDArray[np.bool_], Sizes]:
        """Which of the keys are known, and the sizes of those that are; of a size and a failure the later counts."""
        if not len(self.records):
            return np.zeros(len(keys), dtype=bool), np.zeros(len(keys), SIZE)
        at, failed_at = self._places(keys), self._places(_mixed(keys, self._cures))
        latest = np.where(self._when(failed_at) > self._when(at), failed_at, at)
        is_known = (latest >= 0) & (keys != NO_KEY)
        return is_known, self.records["size"][np.maximum(latest, 0)]

    def _places(self, keys: Keys) -> NDArray[np.int64]:
        """Of the latest record of each key; -1 without one."""
        at = np.searchsorted(self._high, keys["high"], side="right") - 1
        return np.where((at >= 0) & (self.records["key"][np.maximum(at, 0)] == keys), at, -1)

    def _when(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(places >= 0, self._order[np.maximum(places, 0)], -1)


def _mixed(keys: Keys, cures: bytes) -> Keys:
    """The keys under which failures are found while nothing of what may cure them changes."""
    return (np.ascontiguousarray(keys).view("<u8") ^ np.tile(np.frombuffer(cures, "<u8"), len(keys))).view(KEY)


class LengthCache:
    """One file of sizes. A file that cannot be read or written costs a warning, and the run goes on without it."""

    def __init__(self, path: Path, context: str, cures: bytes = bytes(KEY.itemsize)) -> None:
        """`context` names everything but the row that a size depends on; it becomes part of every key.

        `cures` are 16 bytes that change with what may make a row readable that was not; part of the key of failures.
        """
        self.path = path
        self._context = context.encode()
        self._cures = cures
        self._real_folder = _remembering_realpath()
        self._is_usable = True
        self._end = 0  # of the blocks that were seen to be whole
        self._inode = 0  # of the file they were seen in: another process may have set it aside

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: what functools remembers cannot be pickled, and is not needed there."""
        return {**self.__dict__, "_real_folder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _real_folder=_remembering_realpath())

    def load(self) -> KnownSizes:
        """All that the file knows."""
        if not self._is_usable:
            return KnownSizes(np.zeros(0, RECORD), self._cures)
        self._end = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as file:
                records, is_damaged = self._read_on(file)
                if is_damaged:
                    records = np.zeros(0, RECORD)
                    self._set_aside()
        except OSError as error:
            self._give_up(error)
            records = np.zeros(0, RECORD)
        return KnownSizes(records, self._cures)

    def append(self, keys: NDArray[np.void], sizes: Sizes) -> None:
        """Remember sizes; rows without a key are passed over."""
        has_key = keys != NO_KEY
        if not self._is_usable or not has_key.any():
            return
        records = np.zeros(int(has_key.sum()), RECORD)
        records["key"], records["size"] = keys[has_key], sizes[has_key]
        is_curable = ~np.isin(records["size"]["reason"], _INCURABLE)
        records["key"][is_curable] = _mixed(records["key"][is_curable], self._cures)
        block = records.tobytes()
        try:
            with _locked(self.path) as file:
                self._read_on(file)  # another process may have been killed while it wrote
                _write(file, (b"" if self._end else MAGIC) + _header(len(records), block) + block)
                self._end = os.fstat(file).st_size
        except OSError as error:
            self._give_up(error)

    def tell(self, keys: Keys, faults: Iterable[Fault]) -> None:
        """Remember what was said of failures."""
        pairs = zip(keys, faults, strict=True)
        if self._is_usable:
            with suppress(OSError):  # whatever keeps the words from being written keeps sizes too, and that is said
                json_lines.append(self._words, [[key.tobytes().hex(), *fault] for key, fault in pairs if key != NO_KEY])

    def told(self) -> dict[bytes, Fault]:
        """What was said of failures, by key; a line that is not whole is passed over."""
        found = {}
        for line in json_lines.read(self._words):
            with suppress(ValueError, TypeError):
                key, reason, error, files = line
                found[bytes.fromhex(key)] = Fault(reason, error, tuple(files))
        return found

    @property
    def _words(self) -> Path:
        return self.path.with_suffix(".failures")

    def remember(self, row: Mapping[str, Any], size: tuple[int, int, int, int], aspect: float) -> None:
        """Note the true size of one row for the next run; one that is resumed goes on with what was planned."""
        self._notes.append(self.keys([row]), np.array([(*size, aspect, 0, IN_FULL)], SIZE))

    def take_over_notes(self) -> None:
        """A new run begins with the sizes that loading found to be true."""
        notes = self._notes
        if notes.path.exists():
            records = notes.load().records
            self.append(records["key"], records["size"])
            with suppress(OSError):
                notes.path.unlink()

    @property
    def _notes(self) -> LengthCache:
        return LengthCache(self.path.with_suffix(".notes"), "")

    def key(self, row: Mapping[str, Any]) -> NDArray[np.void]:
        """The key of a row: its content, and which files it names in which state; `NO_KEY` where it has no content."""
        try:
            content = row_bytes(row, as_encoded=True)
        except (TypeError, ValueError):
            return NO_KEY
        digest = hashlib.blake2b(self._context, digest_size=16)
        digest.update(content)
        digest.update(repr([self._state(text) for text in names_of_files(row)]).encode())
        return np.frombuffer(digest.digest(), KEY)[0]

    def keys(self, rows: Iterable[Mapping[str, Any]]) -> NDArray[np.void]:
        """The keys of many rows."""
        return np.array([self.key(row) for row in rows], KEY)

    def fingerprint(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Of the content of rows; files may be copies, in another state on another machine."""
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            with suppress(TypeError, ValueError):
                digest.update(row_bytes(row, as_encoded=True))
        return digest.hexdigest()

    def _state(self, text: str) -> tuple[Any, ...] | None:
        """Which file it is, and its size and time of change; None where it is not there or the text is no path.

        With the real path: another folder may have a file of the same name, size and time.
        """
        if (found := real_file(text)) is None:
            return None
        path = os.path.abspath(found.path)
        if os.path.islink(path):
            path = os.path.realpath(path)
        folder, name = os.path.split(path)
        state = found.state
        return (
            os.path.join(self._real_folder(folder), name),
            stat.S_IFMT(state.st_mode),
            state.st_size,
            state.st_mtime_ns,
        )

    def _read_on(self, file: int) -> tuple[NDArray[np.void], bool]:
        """The records behind those that were seen, and whether the file is damaged there; cuts off unfinished ones."""
        state = os.fstat(file)
        if state.st_ino != self._inode or state.st_size < self._end:
            self._inode, self._end = state.st_ino, 0
        content = _read(file, self._end, state.st_size)
        records, num_good = _parsed(content, is_start=self._end == 0)
        self._end += num_good
        rest = content[num_good:]
        if rest and _is_unfinished(rest):
            os.ftruncate(file, self._end)
        return records, bool(rest) and not _is_unfinished(rest)

    def _set_aside(self) -> None:
        aside = self.path.with_suffix(f".damaged-{os.getpid()}")
        os.replace(self.path, aside)
        logger.warning(
            "cache of lengths %s is damaged at byte %d; it is set aside as %s and lengths are measured again",
            self.path, self._end, aside.name,
        )  # fmt: skip
        self._end = 0

    def _give_up(self, error: OSError) -> None:
        self._is_usable = False
        logger.warning(
            "cache of lengths %s cannot be used (%s); lengths are measured and not remembered. "
            "packing_cache_dir names another directory", self.path, error.strerror or error,
        )  # fmt: skip


def _remembering_realpath() -> Callable[[str], str]:
    return lru_cache(_NUM_FOLDERS)(os.path.realpath)


def _parsed(content: bytes, *, is_start: bool) -> tuple[NDArray[np.void], int]:
    """The records of all blocks up to the first that is not whole, and where that one starts."""
    if is_start and not content.startswith(MAGIC):
        return np.zeros(0, RECORD), 0
    at, blocks = len(MAGIC) if is_start else 0, []
    while at + _BLOCK.size <= len(content):
        _, num_records, checksum, _ = _BLOCK.unpack_from(content, at)
        end = at + _BLOCK.size + num_records * RECORD.itemsize
        if not _is_header(content[at : at + _BLOCK.size]) or end > len(content):
            break
        block = memoryview(content)[at + _BLOCK.size : end]
        if zlib.crc32(block) != checksum:
            break
        blocks.append(np.frombuffer(block, RECORD))
        at = end
    return np.concatenate(blocks) if blocks else np.zeros(0, RECORD), at


def _is_unfinished(rest: bytes) -> bool:
    """Whether this is the beginning of a block, or of the magic line, as a killed process leaves it."""
    if MAGIC.startswith(rest[: len(MAGIC)]):
        return len(rest) <= len(MAGIC)
    if len(rest) < _BLOCK.size:
        return _MARK.startswith(rest[: len(_MARK)])
    num_records = _BLOCK.unpack_from(rest)[1]
    return _is_header(rest[: _BLOCK.size]) and _BLOCK.size + num_records * RECORD.itemsize > len(rest)


def _header(num_records: int, block: bytes) -> bytes:
    head = _BLOCK.pack(_MARK, num_records, zlib.crc32(block), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def _is_header(head: bytes) -> bool:
    """Its own checksum tells a header with a wrong number from one whose records were not all written."""
    return head.startswith(_MARK) and bool(_BLOCK.unpack(head)[3] == zlib.crc32(head[:-4]))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The open file, in which nobody else writes meanwhile; without a lock where the file system has none."""
    file = _opened(path)
    while True:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(path, file):
            break
        os.close(file)  # while this process waited, another one set the file aside
        file = _opened(path)
    try:
        yield file
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _read(file: int, start: int, end: int) -> bytes:
    """All bytes between; one call gives at most 2 GB."""
    parts = []
    while start < end and (part := os.pread(file, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write(file: int, content: bytes) -> None:
    """Write all of it, or leave the file as it was."""
    before = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, before)
        raise
