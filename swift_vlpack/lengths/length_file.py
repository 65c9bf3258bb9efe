"""A file of the sizes of rows: appended to as rows are measured, whole whenever a process dies.

The file is a magic line and then blocks: a header (mark, number of records, checksum of these, checksum of itself) and
fixed-size records. A block that a killed process left unfinished at the end is cut off; any other damage sets the file
aside and starts a new one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

MAGIC = b"vlpack lengths 3\n"
_BLOCK = struct.Struct("<4sIII")  # mark, number of records, checksum of the records, checksum of all this
_MARK = b"rows"

SIZE = np.dtype(
    [
        ("length", "<u4"),  # tokens; 0 where the row cannot be encoded
        ("images", "<u4"),
        ("patches", "<u4"),
        ("supervised", "<u4"),  # tokens with a label
        ("aspect", "<f4"),  # longer side over shorter, of the most extreme image or video
        ("reason", "u1"),  # why it cannot be encoded: its code in `reasons.py`
        ("proof", "u1"),  # how far the size is to be trusted
        ("stamp", "<u4"),  # of the times at which anything of its files changed; 0 where it names none
    ]
)
"""What is known of a row."""

BY_HEADER, AGREED, IN_FULL, DIFFERS, VOUCHED = 0, 1, 2, 3, 4
"""Proof: from image headers; from headers and found equal to the full encoding; from the full encoding; from the full
encoding, and headers gave another size, so that those of the whole source are not to be trusted; from headers, and rows
of its kinds were found equal in another source."""

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
KEYED_SIZE = np.dtype([("key", KEY), ("size", SIZE)])
"""What the file has of a row."""
NO_KEY = np.zeros((), KEY)
"""Of a row that cannot be told from another one, so that nothing is remembered of it."""

Sizes = NDArray[np.void]
Keys = NDArray[np.void]
Stamps = NDArray[np.uint32]
Records = NDArray[np.void]


class LengthFile:
    """One file of records. One that cannot be read or written costs a warning, and the run goes on without it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_usable = True
        self._end = 0  # of the blocks that were seen to be whole
        self._inode = 0  # of the file they were seen in: another process may have set it aside

    def load(self) -> Records:
        """All records, in the order in which they were appended."""
        nothing = np.zeros(0, KEYED_SIZE)
        if not self.is_usable:
            return nothing
        # From the start, whatever was seen before: somebody may have put another file there.
        self._end = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as file:
                records, is_damaged = self._read_on(file)
                if is_damaged:
                    self._set_aside()
                    return nothing
                return records
        except OSError as error:
            self._give_up(error)
            return nothing

    def append(self, records: Records) -> None:
        """Write records behind those that are there."""
        if not self.is_usable:
            return
        block = records.tobytes()
        try:
            with _locked(self.path) as file:
                self._read_on(file)  # another process may have been killed while it wrote
                _write(file, (b"" if self._end else MAGIC) + _header(len(records), block) + block)
                self._end = os.fstat(file).st_size
        except OSError as error:
            self._give_up(error)

    def _read_on(self, file: int) -> tuple[Records, bool]:
        """The records behind those that were seen, and whether the file is damaged there; cuts off unfinished ones."""
        state = os.fstat(file)
        # Another file has the name, or this one was cut: what was seen of it says nothing.
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
        # By its process, so that two that find the damage at once do not overwrite each other's.
        aside = self.path.with_suffix(f".damaged-{os.getpid()}")
        os.replace(self.path, aside)
        logger.warning(
            "cache of lengths %s is damaged at byte %d; it is set aside as %s and lengths are measured again",
            self.path, self._end, aside.name,
        )  # fmt: skip
        self._end = 0

    def _give_up(self, error: OSError) -> None:
        self.is_usable = False
        logger.warning(
            "cache of lengths %s cannot be used (%s); lengths are measured and not remembered. "
            "packing_cache_dir names another directory", self.path, error.strerror or error,
        )  # fmt: skip


def read_records(path: Path) -> Records:
    """All whole records of a file, which stays as it is, whatever is wrong with it."""
    return _parsed(path.read_bytes(), is_start=True)[0]


def _parsed(content: bytes, *, is_start: bool) -> tuple[Records, int]:
    """The records of all blocks up to the first that is not whole, and where that one starts."""
    if is_start and not content.startswith(MAGIC):
        return np.zeros(0, KEYED_SIZE), 0
    at, blocks = len(MAGIC) if is_start else 0, []
    while at + _BLOCK.size <= len(content):
        _, num_records, checksum, _ = _BLOCK.unpack_from(content, at)
        end = at + _BLOCK.size + num_records * KEYED_SIZE.itemsize
        if not _is_header(content[at : at + _BLOCK.size]) or end > len(content):
            break
        block = memoryview(content)[at + _BLOCK.size : end]
        if zlib.crc32(block) != checksum:
            break
        blocks.append(np.frombuffer(block, KEYED_SIZE))
        at = end
    return np.concatenate(blocks) if blocks else np.zeros(0, KEYED_SIZE), at


def _is_unfinished(rest: bytes) -> bool:
    """Whether this is the beginning of a block, or of the magic line, as a killed process leaves it."""
    if MAGIC.startswith(rest[: len(MAGIC)]):
        return len(rest) <= len(MAGIC)
    # Less than a header has no checksum yet; its first bytes have to do.
    if len(rest) < _BLOCK.size:
        return _MARK.startswith(rest[: len(_MARK)])
    num_records = _BLOCK.unpack_from(rest)[1]
    return _is_header(rest[: _BLOCK.size]) and _BLOCK.size + num_records * KEYED_SIZE.itemsize > len(rest)


def _header(num_records: int, block: bytes) -> bytes:
    # The last four bytes are the checksum of those before them.
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
    # Appending, so that what a writer without a lock adds lands behind ours and not over it.
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
