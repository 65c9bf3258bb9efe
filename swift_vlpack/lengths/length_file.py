"""Save the sizes of rows in a file that many processes append to, and that survives a kill at any moment.

The file is a magic line and then blocks. A block is a header (mark, number of records, checksum of the records,
checksum of the header) and fixed-size records. The file is cut at its first bad block, whether a killed process left it
unfinished or a disk damaged it; rows whose sizes are cut off are measured again. A million keys are read in 0.13 s;
from sqlite it took 26.7 s.
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

from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

MAGIC = b"vlpack lengths 4\n"
_BLOCK = struct.Struct("<4sIII")  # mark, number of records, checksum of the records, checksum of these three
_MARK = b"rows"

SIZE = np.dtype(
    [
        ("length", "<u4"),  # tokens; 0 if the row cannot be encoded
        ("images", "<u4"),
        ("patches", "<u4"),
        ("supervised", "<u4"),  # tokens with a label
        ("aspect", "<f4"),  # longer side over shorter, of the most extreme image or video
        ("reason", "u1"),  # why the row cannot be encoded: the code of a reason in `reasons.py`; 0 if it can
        ("proof", "u1"),  # how the size was found, see below
    ]
)
"""The record of one row."""

BY_HEADER = 0  # from image headers
AGREED = 1  # from image headers, and the full encoding gave the same
IN_FULL = 2  # from the full encoding
DIFFERS = 3  # from the full encoding, and headers gave another size: no header of this source is trusted

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
KEYED_SIZE = np.dtype([("key", KEY), ("size", SIZE)])
NO_KEY = np.zeros((), KEY)
"""The key of a row whose content cannot be digested, so that its size is never saved."""

Sizes = NDArray[np.void]
Keys = NDArray[np.void]
Records = NDArray[np.void]


def has_media(sizes: Sizes) -> NDArray[np.bool_]:
    """Return the mask of rows with images or videos."""
    return np.asarray((sizes["images"] > 0) | (sizes["patches"] > 0))


class LengthFile:
    """Read and append records of one file. If it cannot be read or written, warn once and continue without it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_usable = True
        self._end = 0  # end of the blocks that this process has checked
        self._inode = 0  # the file in which it checked them; another process may remove that file

    def load(self) -> Records:
        """Read all records in the order in which they were appended."""
        nothing = np.zeros(0, KEYED_SIZE)
        if not self.is_usable:
            return nothing
        # Read from the start, even after an earlier read, because another file may be there now.
        self._end = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as file:
                return self._read_on(file)
        except OSError as error:
            self._give_up(error)
            return nothing

    def append(self, records: Records) -> None:
        """Write records at the end of the file."""
        if not self.is_usable:
            return
        block = records.tobytes()
        try:
            with _locked(self.path) as file:
                self._read_on(file)
                _write(file, (b"" if self._end else MAGIC) + _header(len(records), block) + block)
                self._end = os.fstat(file).st_size
        except OSError as error:
            self._give_up(error)

    def _read_on(self, file: int) -> Records:
        """Read the records that were added since the last read, and cut the file at the first bad block."""
        state = os.fstat(file)
        # If another file has the name now, or this one became shorter, start from its beginning.
        if state.st_ino != self._inode or state.st_size < self._end:
            self._inode, self._end = state.st_ino, 0
        # A new file may have the old one's inode. So look from the beginning before anything is cut off.
        for start in (self._end, 0):
            records, num_good = _parsed(_read(file, start, state.st_size), is_start=start == 0)
            self._end = start + num_good
            if self._end == state.st_size:
                return records
        logger.warning(
            "cache of lengths %s: its last %s cannot be read, as after a kill or on a damaged disk; they are cut off, "
            "and the lengths in them are measured again", self.path, counted(state.st_size - self._end, "byte"),
        )  # fmt: skip
        os.ftruncate(file, self._end)
        return records

    def _give_up(self, error: OSError) -> None:
        self.is_usable = False
        logger.warning(
            "cache of lengths %s cannot be used (%s); lengths are measured and not saved. "
            "Set packing_cache_dir to another folder", self.path, error.strerror or error,
        )  # fmt: skip


def read_records(path: Path) -> Records:
    """Read the records of a file up to the first damage. Never changes the file."""
    return _parsed(path.read_bytes(), is_start=True)[0]


def _parsed(content: bytes, *, is_start: bool) -> tuple[Records, int]:
    """Parse blocks up to the first damaged or unfinished one. Returns (records, bytes that were parsed)."""
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


def _header(num_records: int, block: bytes) -> bytes:
    # The last four bytes are the checksum of those before them.
    head = _BLOCK.pack(_MARK, num_records, zlib.crc32(block), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def _is_header(head: bytes) -> bool:
    """Check a header by its own checksum, so that a damaged number of records is not taken for an unfinished block."""
    return head.startswith(_MARK) and bool(_BLOCK.unpack(head)[3] == zlib.crc32(head[:-4]))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file and lock it against other writers, if the file system has locks. Yields its descriptor."""
    file = _opened(path)
    while True:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(path, file):
            break
        os.close(file)  # while this process waited for the lock, another one removed the file
        file = _opened(path)
    try:
        yield file
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    # Append mode, so that two writers on a file system without locks do not overwrite each other.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _read(file: int, start: int, end: int) -> bytes:
    """Read the bytes from `start` to `end`, in a loop, because one system call reads 2 GB at most."""
    parts = []
    while start < end and (part := os.pread(file, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write(file: int, content: bytes) -> None:
    """Write all of the content, or leave the file as it was."""
    before = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, before)
        raise
