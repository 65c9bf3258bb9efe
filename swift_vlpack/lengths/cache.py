"""Cache the sizes of a source's rows on disk.

The key of a row is a digest of the context (everything else that its size depends on, `context.py`), of its content,
and of the state of every file that it names. So a change is a cache miss, and nothing ever has to be deleted. Rows may
be appended or reordered. If a key is saved twice, the later record wins.

Sizes are in a `.lengths` file (`length_file.py`). A file `.details` beside it has what few rows have: the errors of
rows that cannot be encoded, and the parts of rows that are cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
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

    def __init__(self, path: Path, context: str) -> None:
        """Name the files; nothing is read yet. `context` is the digest of everything but the row."""
        self.path = path
        self.context = context
        self._file = LengthFile(path)
        self._details = path.with_suffix(".details")

    def load(self) -> KnownSizes:
        """Read all sizes of the file."""
        return KnownSizes(self._file.load())

    def append(self, keys: Keys, sizes: Sizes) -> None:
        """Save sizes; rows without a key are skipped."""
        has_key = keys != NO_KEY
        if has_key.any():
            records = np.zeros(int(has_key.sum()), KEYED_SIZE)
            records["key"], records["size"] = keys[has_key], sizes[has_key]
            self._file.append(records)

    def append_details(self, keys: Keys, details: Iterable[Details]) -> None:
        """Save errors and parts of rows."""
        if self._file.is_usable:
            lines = [
                [key.tobytes().hex(), one.fault and [*one.fault], [part.numbers for part in one.parts]]
                for key, one in zip(keys, details, strict=True)
                if key != NO_KEY
            ]
            with suppress(OSError):  # the file of sizes, in the same folder, reports it
                json_lines.append(self._details, lines)

    def load_details(self) -> dict[bytes, Details]:
        """Read errors and parts of rows, by key."""
        found = {}
        for line in json_lines.read(self._details):
            with suppress(ValueError, TypeError, OverflowError):  # a line that a killed process left unfinished
                key, fault, parts = line
                fault = fault and Fault(str(fault[0]), str(fault[1]), tuple(map(str, fault[2])))
                parts = tuple(Part.of_numbers(number, part) for number, part in enumerate(parts))
                found[bytes.fromhex(key)] = Details(fault or None, parts)
        return found

    def key(self, row: Mapping[str, Any]) -> Keys:
        """Return the key of a row, or `NO_KEY` if its content cannot be digested; then its size is never saved.

        A key has 128 bits, so that no two of a million rows have the same key by chance.
        """
        try:
            content = row_bytes(row, as_encoded=True)
        except (TypeError, ValueError):
            return NO_KEY
        digest = hashlib.blake2b(self.context.encode(), digest_size=KEY.itemsize)
        digest.update(content)
        digest.update(repr([_state(real_file(name)) for name in names_of_files(row)]).encode())
        return np.frombuffer(digest.digest(), KEY)[0]

    def keys(self, rows: Iterable[Mapping[str, Any]]) -> Keys:
        """Return the keys of many rows."""
        return np.array([self.key(row) for row in rows], KEY)


def _state(file: RealFile | None) -> tuple[int, ...] | None:
    """Return numbers that change whenever a file does: the inode tells files of one name, size and time apart.

    The change time reveals a file that was replaced by one of the same size and modification time.
    """
    if file is None:
        return None
    state = file.state
    return state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of the content of rows, not of where it lies: files may be copies on another machine."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        with suppress(TypeError, ValueError):
            digest.update(row_bytes({**row, COLUMN_OF_ORIGIN: None}, as_encoded=True))
    return digest.hexdigest()
