"""What is remembered of the sizes of rows, by keys.

A row is known by a key made of everything that its size depends on, so that what is remembered is never wrong, only no
longer asked for: nothing has to be thrown away when a row, an image or a setting changes, and rows may come in another
order. Of two records with one key the later counts. The key of a failure has in it, besides, what may cure it. What was
said of failures is in a second file, of JSON lines.
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
from typing import Any

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
from swift_vlpack.plan.cut_rows import PartSize
from swift_vlpack.reasons import REASONS, about
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.media import RealFile, names_of_files, real_file
from swift_vlpack.rows.source import row_bytes

_INCURABLE = [code for code, reason in enumerate(REASONS) if not reason or about(reason).is_of_content]
_NUM_FOLDERS = 4096  # whose real paths are remembered during a pass


class KnownSizes:
    """The records of a file, sorted, to look up many keys at once."""

    def __init__(self, records: Records, cures: bytes = bytes(KEY.itemsize)) -> None:
        self._order = np.argsort(records["key"]["high"], kind="stable")  # of equal keys the latest is last
        self.records = records[self._order]
        # In plain numbers a search is quick; pairs of them numpy compares field by field.
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
        # Of equal halves the last; that other keys share all 64 bits is not to be expected, and costs one measurement.
        at = np.searchsorted(self._high, keys["high"], side="right") - 1
        return np.where((at >= 0) & (self.records["key"][np.maximum(at, 0)] == keys), at, -1)

    def _when(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(places >= 0, self._order[np.maximum(places, 0)], -1)


def _mixed(keys: Keys, cures: bytes) -> Keys:
    """The keys under which failures are found while nothing of what may cure them changes."""
    # Two numbers to mix with another two: numpy has no integers of 128 bits.
    return (np.ascontiguousarray(keys).view("<u8") ^ np.tile(np.frombuffer(cures, "<u8"), len(keys))).view(KEY)


class LengthCache:
    """The sizes of the rows of one source, found under one template and its settings."""

    def __init__(self, path: Path, context: str, cures: bytes = bytes(KEY.itemsize), cutting: str = "") -> None:
        """`context` names everything but the row that a size depends on; it becomes part of every key.

        `cures` are 16 bytes that change with what may make a row readable that was not; part of the key of failures.
        `cutting` names what decides where rows are cut; parts are remembered under it, and sizes are those of all.
        """
        self.path = path
        self._cutting = cutting
        self._context = context.encode()
        self._cures = cures
        self._real_folder = _remembering_realpath()
        self._file = LengthFile(path)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: what functools remembers cannot be pickled, and is not needed there."""
        return {**self.__dict__, "_real_folder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _real_folder=_remembering_realpath())

    def load(self) -> KnownSizes:
        """All that the file knows."""
        return KnownSizes(self._file.load(), self._cures)

    def append(self, keys: Keys, sizes: Sizes) -> None:
        """Remember sizes; rows without a key are passed over."""
        has_key = keys != NO_KEY
        if not has_key.any():
            return
        records = np.zeros(int(has_key.sum()), KEYED_SIZE)
        records["key"], records["size"] = keys[has_key], sizes[has_key]
        is_curable = ~np.isin(records["size"]["reason"], _INCURABLE)
        # The key of failures changes with the cures, that of sizes does not: no cure measures good rows again.
        records["key"][is_curable] = _mixed(records["key"][is_curable], self._cures)
        self._file.append(records)

    def tell(self, keys: Keys, faults: Iterable[Fault]) -> None:
        """Remember what was said of failures."""
        pairs = zip(keys, faults, strict=True)
        if self._file.is_usable:
            with suppress(OSError):  # whatever keeps the words from being written keeps sizes too, and that is said
                json_lines.append(self._words, [[key.tobytes().hex(), *fault] for key, fault in pairs if key != NO_KEY])

    def told(self) -> dict[bytes, Fault]:
        """What was said of failures, by key; a line that is not whole is passed over."""
        found = {}
        for line in json_lines.read(self._words):
            with suppress(ValueError, TypeError):
                key, reason, error, files = line
                found[bytes.fromhex(key)] = Fault(str(reason), str(error), tuple(map(str, files)))
        return found

    def tell_parts(self, keys: Keys, parts: Iterable[Sequence[PartSize]]) -> None:
        """Remember how rows are cut."""
        pairs = zip(keys, parts, strict=True)
        if self._file.is_usable:
            lines = [[key.tobytes().hex(), *of_row] for key, of_row in pairs if key != NO_KEY]
            with suppress(OSError):  # as with words
                json_lines.append(self._parts, lines)

    def told_parts(self) -> dict[bytes, tuple[PartSize, ...]]:
        """How rows are cut, by key; of two lines the later counts, and one that is not whole is passed over."""
        found = {}
        for line in json_lines.read(self._parts):
            with suppress(ValueError, TypeError, OverflowError):
                key, *parts = line
                found[bytes.fromhex(key)] = tuple(PartSize(*map(int, part)) for part in parts)
        return found

    @property
    def _parts(self) -> Path:
        return self.path.with_suffix(f".{self._cutting}.parts")

    @property
    def _words(self) -> Path:
        return self.path.with_suffix(".failures")

    def remember(
        self,
        row: Mapping[str, Any],
        size: tuple[int, int, int, int],
        aspect: float,
        parts: Sequence[PartSize] = (),
    ) -> None:
        """Note the true size of one row for the next run; one that is resumed goes on with what was planned."""
        key, stamp = self.key_and_stamp(row)
        keys = np.array([key], KEY)
        self._notes.append(keys, np.array([(*size, aspect, 0, IN_FULL, stamp)], SIZE))
        if parts:
            self._notes.tell_parts(keys, [parts])

    def take_over_notes(self) -> None:
        """A new run begins with the sizes that loading found to be true."""
        notes = self._notes
        if notes.path.exists():
            records = notes.load().records
            self.append(records["key"], records["size"])
            parts = notes.told_parts()
            if parts:
                self.tell_parts(np.frombuffer(b"".join(parts), KEY), parts.values())
            for path in (notes.path, notes._parts):
                with suppress(OSError):
                    path.unlink()

    @property
    def _notes(self) -> LengthCache:
        return LengthCache(self.path.with_suffix(".notes"), "", cutting=f"{self._cutting}.notes")

    def key(self, row: Mapping[str, Any]) -> Keys:
        """The key of a row: its content, and which files it names in which state; `NO_KEY` where it has no content.

        128 bits, so that among a million rows no two have the same by chance.
        """
        return self.key_and_stamp(row)[0]

    def key_and_stamp(self, row: Mapping[str, Any]) -> tuple[Keys, int]:
        """The key of a row, and the stamp of its files.

        The stamp changes with everything that is done to a file: to its content, in place and with its time put back,
        or only to its mode or its links. So it is not in the key: where it is another one, the header is read again.
        """
        try:
            content = row_bytes(row, as_encoded=True)
        except (TypeError, ValueError):
            return NO_KEY, 0
        files = [real_file(text) for text in names_of_files(row)]
        digest = hashlib.blake2b(self._context, digest_size=16)
        digest.update(content)
        digest.update(repr([self._state(file) for file in files]).encode())
        times = [file.state.st_ctime_ns for file in files if file is not None]
        return np.frombuffer(digest.digest(), KEY)[0], zlib.crc32(repr(times).encode()) if times else 0

    def keys(self, rows: Iterable[Mapping[str, Any]]) -> Keys:
        """The keys of many rows."""
        return np.array([self.key(row) for row in rows], KEY)

    def fingerprint(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Of the content of rows; files may be copies, in another state on another machine."""
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            with suppress(TypeError, ValueError):
                digest.update(row_bytes(row, as_encoded=True))
        return digest.hexdigest()

    def _state(self, found: RealFile | None) -> tuple[Any, ...] | None:
        """Which file it is, and its size and time of change; None where it is not there or the text is no path.

        With the real path: another folder may have a file of the same name, size and time.
        """
        if found is None:
            return None
        path = os.path.abspath(found.path)
        # A file that is no link is where its folder is, and where folders really are is remembered.
        if os.path.islink(path):
            path = os.path.realpath(path)
        folder, name = os.path.split(path)
        state = found.state
        return (
            os.path.join(self._real_folder(folder), name),
            stat.S_IFMT(state.st_mode),
            state.st_size,
            # In nanoseconds: an image that is rewritten within a second, at the same size, is another one.
            state.st_mtime_ns,
        )


def _remembering_realpath() -> Callable[[str], str]:
    return lru_cache(_NUM_FOLDERS)(os.path.realpath)
