"""Cache the sizes of a source's rows on disk.

The key of a row is a digest of the context (everything else that its size depends on, `context.py`), of its content,
and of the state of every file that it names. So a change is a cache miss. Rows may be appended or reordered. If a key
is saved twice, the later record wins.

A `.lengths` file (`length_file.py`) has sizes that were checked. A `.unchecked` file has those that a pass took from
image headers and has not proved yet, for the next start if this one is killed. A `.details` file has what few rows
have: the errors of rows that cannot be encoded, and the parts of rows that are cut.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack import json_lines
from swift_vlpack.lengths.length_file import DIFFERS, KEY, KEYED_SIZE, NO_KEY, Keys, LengthFile, Records, Sizes
from swift_vlpack.plan.parts import Part
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.media import RealFile, names_of_files, real_file
from swift_vlpack.rows.source import COLUMN_OF_ORIGIN, row_bytes

PREFIXES = ".prefixes"
"""Suffix of the file of the lengths of prefixes (`prefixes.py`)."""
_NUM_FOLDERS = 4096  # folders whose real paths are kept in memory


class Details(NamedTuple):
    """What is saved about a row besides its size."""

    fault: Fault | None = None
    parts: tuple[Part, ...] = ()


class KnownSizes:
    """Saved records, sorted to look up many keys at once."""

    def __init__(self, records: Records) -> None:
        # Sort stably, so that the latest of equal keys is last.
        self.records = records[np.argsort(records["key"]["high"], kind="stable")]
        # Search one half of the keys only: numpy would compare pairs of numbers field by field, which is slow.
        self._high = np.ascontiguousarray(self.records["key"]["high"])
        self.num_differing = int((records["size"]["proof"] == DIFFERS).sum())

    def __len__(self) -> int:
        return len(self.records)

    def of(self, keys: Keys) -> tuple[NDArray[np.bool_], Sizes]:
        """Look up keys. Returns (mask of known keys, sizes), where sizes are valid if the mask is True."""
        if not len(self.records):
            return np.zeros(len(keys), dtype=bool), np.zeros(len(keys), KEYED_SIZE["size"])
        # Should two keys ever share the high half (64 random bits), one of them is a cache miss.
        found = self.records[np.maximum(np.searchsorted(self._high, keys["high"], side="right") - 1, 0)]
        return (found["key"] == keys) & (keys != NO_KEY), found["size"]


class LengthCache:
    """Read and write the saved sizes of one source under one context."""

    def __init__(self, path: Path, context: str, cutting: str = "") -> None:
        """Name the files; nothing is read yet.

        `context` is the digest of everything but the row. `cutting` identifies the rules by which rows are cut: parts
        hold for these rules only, but sizes, which are those of whole rows, hold for all.
        """
        self.path = path
        self.context = context
        self._cutting = cutting
        self._checked = LengthFile(path)
        self._unchecked = LengthFile(path.with_suffix(".unchecked"))
        self._details = path.with_suffix(".details")
        self._real_folder = lru_cache(_NUM_FOLDERS)(os.path.realpath)

    def load(self) -> KnownSizes:
        """Read all sizes that were checked."""
        return KnownSizes(self._checked.load())

    def load_unchecked(self) -> KnownSizes:
        """Read the sizes that a start took from headers and that was killed before it had proved them."""
        is_there = self._unchecked.path.exists()  # to read a file makes it
        return KnownSizes(self._unchecked.load() if is_there else np.zeros(0, KEYED_SIZE))

    def append(self, keys: Keys, sizes: Sizes, *, is_checked: bool = True) -> None:
        """Save sizes; rows without a key are skipped."""
        has_key = keys != NO_KEY
        if has_key.any() and self._checked.is_usable:
            records = np.zeros(int(has_key.sum()), KEYED_SIZE)
            records["key"], records["size"] = keys[has_key], sizes[has_key]
            (self._checked if is_checked else self._unchecked).append(records)

    def forget_unchecked(self) -> None:
        """Remove the sizes that were not checked."""
        _remove(self._unchecked.path)

    def forget(self) -> None:
        """Remove all that is saved of this source under this context."""
        for path in (self.path, self._unchecked.path, self._details, self.path.with_suffix(PREFIXES)):
            _remove(path)

    def append_details(self, keys: Keys, details: Iterable[Details]) -> None:
        """Save errors and parts of rows."""
        if self._checked.is_usable:
            lines = [
                [key.tobytes().hex(), one.fault and [*one.fault], [part.numbers for part in one.parts], self._cutting]
                for key, one in zip(keys, details, strict=True)
                if key != NO_KEY
            ]
            with suppress(OSError):  # the file of sizes, in the same folder, reports it
                json_lines.append(self._details, lines)

    def load_details(self) -> dict[bytes, Details]:
        """Read errors of rows, and their parts by the present rules, by key."""
        found = {}
        for line in json_lines.read(self._details):
            with suppress(ValueError, TypeError, OverflowError):  # a line that a killed process left unfinished
                key, fault, parts, cutting = line
                if parts and cutting != self._cutting:
                    continue
                fault = fault and Fault(str(fault[0]), str(fault[1]), tuple(map(str, fault[2])))
                parts = tuple(Part.of_numbers(number, part) for number, part in enumerate(parts))
                found[bytes.fromhex(key)] = Details(fault or None, parts)
        return found

    def key(self, row: Mapping[str, Any], names: Iterable[str] | None = None) -> Keys:
        """Return the key of a row, or `NO_KEY` if its content cannot be digested; then its size is never saved.

        A key has 128 bits, so that no two of a million rows have the same key by chance. `names` are those of the row's
        files, if the caller has them.
        """
        try:
            content = row_bytes(row, as_encoded=True)
        except (TypeError, ValueError):
            return NO_KEY
        digest = hashlib.blake2b(self.context.encode(), digest_size=KEY.itemsize)
        digest.update(content)
        names = names_of_files(row) if names is None else names
        digest.update(repr([self._state(real_file(name)) for name in names]).encode())
        return np.frombuffer(digest.digest(), KEY)[0]

    def keys(self, rows: Iterable[Mapping[str, Any]]) -> Keys:
        """Return the keys of many rows."""
        return np.array([self.key(row) for row in rows], KEY)

    def _state(self, file: RealFile | None) -> tuple[Any, ...] | None:
        """Return the real path, size and times of a file: another folder may have one of the same name, size and time.

        The time of change (ctime) reveals an image that was changed in place and given its old time. `chmod` and a hard
        link change it as well: then the row is measured again, by its header, and no other row. The inode is left out,
        because a new mount changes it.
        """
        if file is None:
            return None
        path = os.path.abspath(file.path)
        # Resolve a link to a file each time, but a folder only once: a source has few folders.
        if os.path.islink(path):
            path = os.path.realpath(path)
        folder, name = os.path.split(path)
        state = file.state
        return os.path.join(self._real_folder(folder), name), state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _remove(path: Path) -> None:
    with suppress(OSError):  # not there, or in a folder that cannot be written
        path.unlink()


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of the content of rows, not of where it lies: files may be copies on another machine."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        with suppress(TypeError, ValueError):
            digest.update(row_bytes({**row, COLUMN_OF_ORIGIN: None}, as_encoded=True))
    return digest.hexdigest()
