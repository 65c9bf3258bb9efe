"""Cache the sizes of a source's rows on disk.

The key of a row is a digest of the context (everything else that its size depends on, `context.py`), of its content,
and of the state of every file that it names. So a change never gives a wrong size, only a cache miss, and nothing ever
has to be deleted. Rows may be appended or reordered. If a key is saved twice, the later record wins.

Sizes are in a `.lengths` file (`length_file.py`). Three files next to it share its name: `.failures` has the errors of
rows that cannot be encoded, `.parts` has the parts of cut rows, and `.notes` has sizes that training found to be wrong,
for the next run. Keys of failures also depend on the retry key (`failures.py`), so that a failed row is retried after,
for example, a missing codec was installed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack import json_lines
from swift_vlpack.lengths.length_file import (
    DIFFERS,
    IN_FULL,
    KEY,
    KEYED_SIZE,
    NO_KEY,
    SIZE,
    Keys,
    LengthFile,
    Records,
    Sizes,
)
from swift_vlpack.plan.parts import Part
from swift_vlpack.reasons import REASONS, about
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.media import RealFile, names_of_files, real_file
from swift_vlpack.rows.source import row_bytes

_PERMANENT = [code for code, reason in enumerate(REASONS) if not reason or about(reason).is_of_content]
"""Codes of results that no retry changes: sizes, and failures that come from the content of the row itself."""
_NO_RETRY_KEY = bytes(KEY.itemsize)
_NUM_FOLDERS = 4096  # folders whose real paths are kept in memory


class RowKey(NamedTuple):
    """The key of a row, and the states of its files, which decide whether a saved size is still right."""

    key: Keys
    stamp: int = 0
    """Digest of the change times of its files."""
    names: tuple[str, ...] = ()
    """All texts of the row that may name a file."""
    states: tuple[int, ...] = ()
    """The state of each of these files, as `state_now` gives it."""


class KnownSizes:
    """Saved records, sorted to look up many keys at once."""

    def __init__(self, records: Records, retry_key: bytes = _NO_RETRY_KEY) -> None:
        # Sort stably, so that the latest of equal keys is last.
        self._order = np.argsort(records["key"]["high"], kind="stable")
        self.records = records[self._order]
        # Search one half of the keys only: numpy would compare pairs of numbers field by field, which is slow.
        self._high = np.ascontiguousarray(self.records["key"]["high"])
        self._retry_key = retry_key
        self.num_differing = int((records["size"]["proof"] == DIFFERS).sum())

    def __len__(self) -> int:
        return len(self.records)

    def of(self, keys: Keys) -> tuple[NDArray[np.bool_], Sizes]:
        """Look up keys. Returns (mask of known keys, sizes), where sizes are valid if the mask is True."""
        if not len(self.records):
            return np.zeros(len(keys), dtype=bool), np.zeros(len(keys), SIZE)
        at, failed_at = self._places(keys), self._places(_mixed(keys, self._retry_key))
        latest = np.where(self._when(failed_at) > self._when(at), failed_at, at)
        is_known = (latest >= 0) & (keys != NO_KEY)
        return is_known, self.records["size"][np.maximum(latest, 0)]

    def _places(self, keys: Keys) -> NDArray[np.int64]:
        """Find the latest record of each key; -1 without one."""
        # Only the last of the keys with the same high half is found. Should two keys ever share it (64 random bits),
        # the other one is a cache miss.
        at = np.searchsorted(self._high, keys["high"], side="right") - 1
        return np.where((at >= 0) & (self.records["key"][np.maximum(at, 0)] == keys), at, -1)

    def _when(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(places >= 0, self._order[np.maximum(places, 0)], -1)


def _mixed(keys: Keys, retry_key: bytes) -> Keys:
    """Mix the retry key into keys: failures are saved under the result."""
    # XOR pairs of 64-bit numbers, because numpy has no 128-bit integers.
    return (np.ascontiguousarray(keys).view("<u8") ^ np.tile(np.frombuffer(retry_key, "<u8"), len(keys))).view(KEY)


class LengthCache:
    """Read and write the saved sizes of one source under one template and its settings."""

    def __init__(self, path: Path, context: str, retry_key: bytes = _NO_RETRY_KEY, cutting: str = "") -> None:
        """Name the files; nothing is read yet.

        `context` is the digest of everything but the row that a size depends on. `retry_key` has 16 bytes that change
        when failed rows should be retried. `cutting` identifies the rules by which rows are cut: parts are saved for
        these rules only, but sizes, which are those of whole rows, hold for all rules.
        """
        self.path = path
        self.context = context
        self._cutting = cutting
        self._retry_key = retry_key
        self._real_folder = _remembering_realpath()
        self._file = LengthFile(path)

    def __getstate__(self) -> dict[str, Any]:
        # Spawned dataloader workers get the cache with `RowSource.remember_size`; a `lru_cache` cannot be pickled.
        return {**self.__dict__, "_real_folder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _real_folder=_remembering_realpath())

    # -- saved records ------------------------------------------------------------------------------------------------

    def load(self) -> KnownSizes:
        """Read all sizes of the file."""
        return KnownSizes(self._file.load(), self._retry_key)

    def append(self, keys: Keys, sizes: Sizes) -> None:
        """Save sizes; rows without a key are skipped."""
        has_key = keys != NO_KEY
        if not has_key.any():
            return
        records = np.zeros(int(has_key.sum()), KEYED_SIZE)
        records["key"], records["size"] = keys[has_key], sizes[has_key]
        # Mix the retry key into keys of failures only, so that good rows are not measured again after a new codec.
        is_retried = ~np.isin(records["size"]["reason"], _PERMANENT)
        records["key"][is_retried] = _mixed(records["key"][is_retried], self._retry_key)
        self._file.append(records)

    def append_faults(self, keys: Keys, faults: Iterable[Fault]) -> None:
        """Save the errors of rows that cannot be encoded."""
        self._append_lines(self._faults_file, keys, faults)

    def load_faults(self) -> dict[bytes, Fault]:
        """Read the errors of rows that cannot be encoded, by key."""
        found = {}
        for line in json_lines.read(self._faults_file):
            with suppress(ValueError, TypeError):  # a line that a killed process left unfinished
                key, reason, error, files = line
                found[bytes.fromhex(key)] = Fault(str(reason), str(error), tuple(map(str, files)))
        return found

    def append_parts(self, keys: Keys, parts: Iterable[Sequence[Part]]) -> None:
        """Save how rows are cut."""
        self._append_lines(self._parts_file, keys, [[part.numbers for part in of_row] for of_row in parts])

    def load_parts(self) -> dict[bytes, tuple[Part, ...]]:
        """Read how rows are cut, by key."""
        found = {}
        for line in json_lines.read(self._parts_file):
            with suppress(ValueError, TypeError, OverflowError):  # a line that a killed process left unfinished
                key, *parts = line
                found[bytes.fromhex(key)] = tuple(Part.of_numbers(number, part) for number, part in enumerate(parts))
        return found

    def _append_lines(self, path: Path, keys: Keys, values: Iterable[Iterable[Any]]) -> None:
        if self._file.is_usable:
            pairs = zip(keys, values, strict=True)
            with suppress(OSError):  # the file of sizes, in the same folder, reports it
                json_lines.append(path, [[key.tobytes().hex(), *value] for key, value in pairs if key != NO_KEY])

    def keys_file(self, rank: int, num_ranks: int) -> Path:
        """Return the file in which a rank saves the keys of its rows (`known_keys.py`)."""
        return self.path.with_suffix(f".{rank}of{num_ranks}.keys")

    @property
    def _faults_file(self) -> Path:
        return self.path.with_suffix(".failures")

    @property
    def _parts_file(self) -> Path:
        return self.path.with_suffix(f".{self._cutting}.parts")

    # -- notes for the next run ---------------------------------------------------------------------------------------

    def remember(
        self, row: Mapping[str, Any], size: tuple[int, int, int, int], aspect: float, parts: Sequence[Part] = ()
    ) -> None:
        """Note the true size of a row that was planned with a wrong size.

        Notes are for the next new run. A resumed run must plan with the old sizes, otherwise its packs would change.
        """
        found = self.row_key(row)
        keys = np.array([found.key], KEY)
        self._notes.append(keys, np.array([(*size, aspect, 0, IN_FULL, found.stamp)], SIZE))
        if parts:
            self._notes.append_parts(keys, [parts])

    def take_over_notes(self) -> None:
        """Move the notes of earlier runs into the cache, at the start of a new run."""
        notes = self._notes
        if notes.path.exists():
            records = notes.load().records
            self.append(records["key"], records["size"])
            parts = notes.load_parts()
            if parts:
                self.append_parts(np.frombuffer(b"".join(parts), KEY), parts.values())
            for path in (notes.path, notes._parts_file):
                with suppress(OSError):
                    path.unlink()

    @property
    def _notes(self) -> LengthCache:
        return LengthCache(self.path.with_suffix(".notes"), "", cutting=f"{self._cutting}.notes")

    # -- keys ---------------------------------------------------------------------------------------------------------

    def key(self, row: Mapping[str, Any]) -> Keys:
        """Return the key of a row, or `NO_KEY` if its content cannot be digested; then its size is never saved.

        A key has 128 bits, so that no two of a million rows have the same key by chance.
        """
        return self.row_key(row).key

    def row_key(self, row: Mapping[str, Any]) -> RowKey:
        """Return the key of a row with the stamp of its files.

        The stamp is a digest of the files' change times (ctime). A change time reveals a file that was replaced by one
        of the same size and modification time, but it also changes with the file's mode and links. So the stamp is not
        in the key. A row whose stamp changed is measured again from its header.
        """
        try:
            content = row_bytes(row, as_encoded=True)
        except (TypeError, ValueError):
            return RowKey(NO_KEY)
        names = tuple(names_of_files(row))
        files = [real_file(name) for name in names]
        digest = hashlib.blake2b(self.context.encode(), digest_size=16)
        digest.update(content)
        digest.update(repr([self._state(file) for file in files]).encode())
        times = [file.state.st_ctime_ns for file in files if file is not None]
        key, stamp = np.frombuffer(digest.digest(), KEY)[0], zlib.crc32(repr(times).encode()) if times else 0
        return RowKey(key, stamp, names, tuple(map(state_now, files)))

    def keys(self, rows: Iterable[Mapping[str, Any]]) -> Keys:
        """Return the keys of many rows."""
        return np.array([self.key(row) for row in rows], KEY)

    def _state(self, file: RealFile | None) -> tuple[Any, ...] | None:
        """Return the real path, kind, size and modification time of a file; None if there is no file.

        The real path is included because another folder may have a file of the same name, size and time.
        """
        if file is None:
            return None
        path = os.path.abspath(file.path)
        # Resolve a link to a file each time, but a folder only once: a source has few folders.
        if os.path.islink(path):
            path = os.path.realpath(path)
        folder, name = os.path.split(path)
        return (
            os.path.join(self._real_folder(folder), name),
            stat.S_IFMT(file.state.st_mode),
            file.state.st_size,
            # Use nanoseconds: an image may be rewritten at the same size within a second.
            file.state.st_mtime_ns,
        )


def state_now(file: RealFile | None) -> int:
    """Return a number that changes whenever the file's part of a key or stamp does; 0 if there is no file.

    It has the inode in place of the real path, because that takes no further system call.
    """
    if file is None:
        return 0
    state = file.state
    # Hash integers only: their hash is the same in every process.
    return hash((state.st_dev, state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns))


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of the content of rows. File states are left out: files may be copies on another machine."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        with suppress(TypeError, ValueError):
            digest.update(row_bytes(row, as_encoded=True))
    return digest.hexdigest()


def _remembering_realpath() -> Callable[[str], str]:
    return lru_cache(_NUM_FOLDERS)(os.path.realpath)
