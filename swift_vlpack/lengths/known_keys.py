"""Save the keys of rows with the digests of their blocks (`row_blocks.py`), so that unchanged rows need no new key.

If a block has the same digest as before, its rows have the same keys as before, provided that their files are
unchanged. The file system is asked for each file, because neither the data file nor the time of a folder shows that an
image was edited. All other rows get their keys from `LengthCache.row_key`.

Each rank has a file next to the lengths, `SOURCE-DIGEST.RANKofN.keys`, which is written whole whenever a key was
computed. If the file is lost, the keys are computed again, which takes seconds.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.files import write_whole
from swift_vlpack.lengths.cache import RowKey, state_now
from swift_vlpack.lengths.length_file import KEY, KEYS_MAGIC, NO_KEY
from swift_vlpack.lengths.row_blocks import NUM_ROWS
from swift_vlpack.rows.media import real_file

ROW = np.dtype(
    [
        ("key", KEY),
        ("stamp", "<u4"),
        ("has_surplus_tags", "?"),  # whether its texts have more tags than the row has media
        ("num_files", "<u4"),  # texts of the row that may name a file
    ]
)

Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowKeys:
    """The keys of some rows, with the names and states of their files."""

    positions: Positions
    rows: NDArray[np.void]
    """A record of `ROW` for each row."""
    states: NDArray[np.int64]
    """The states of the files of all these rows, as `state_now` gives them."""
    name_sizes: NDArray[np.int64]
    names: bytes
    """The names of these files, one after the other."""

    @classmethod
    def empty(cls, positions: Positions) -> RowKeys:
        """Return an entry for each row without key and files, to be filled."""
        none = np.zeros(0, dtype=np.int64)
        return cls(positions, np.zeros(len(positions), ROW), none, none, b"")

    @classmethod
    def of_rows(cls, positions: Positions, keys: Sequence[RowKey], has_surplus_tags: Sequence[bool]) -> RowKeys:
        """Collect the keys of rows as they were computed."""
        rows = np.zeros(len(positions), ROW)
        for at, (one, has_surplus) in enumerate(zip(keys, has_surplus_tags, strict=True)):
            rows[at] = (one.key, one.stamp, has_surplus, len(one.names))
        # JSON may hold lone surrogates, which UTF-8 cannot encode without this error handler.
        names = [name.encode("utf-8", "surrogatepass") for one in keys for name in one.names]
        states = [state for one in keys for state in one.states]
        sizes = np.array([len(name) for name in names], dtype=np.int64)
        return cls(positions, rows, np.array(states, dtype=np.int64), sizes, b"".join(names))

    @classmethod
    def joined(cls, some: Sequence[RowKeys]) -> RowKeys:
        """Join the keys of several groups of rows."""
        return cls(
            np.concatenate([one.positions for one in some]),
            np.concatenate([one.rows for one in some]),
            np.concatenate([one.states for one in some]),
            np.concatenate([one.name_sizes for one in some]),
            b"".join(one.names for one in some),
        )

    @cached_property
    def file_starts(self) -> NDArray[np.int64]:
        """Return the index of each row's first file among all files, and the number of all files."""
        return np.concatenate([[0], np.cumsum(self.rows["num_files"], dtype=np.int64)])

    @cached_property
    def name_starts(self) -> NDArray[np.int64]:
        """Return the offset of each file's name in `names`, and the length of `names`."""
        return np.concatenate([[0], np.cumsum(self.name_sizes)])

    def files(self) -> Iterator[list[tuple[str, int]]]:
        """Yield for each row the names of its files with their states."""
        starts, states = self.name_starts.tolist(), self.states.tolist()
        for first, end in pairwise(self.file_starts.tolist()):
            names = [self.names[starts[at] : starts[at + 1]] for at in range(first, end)]
            yield [(name.decode("utf-8", "surrogatepass"), states[first + at]) for at, name in enumerate(names)]

    def at(self, chosen: NDArray[np.int64]) -> RowKeys:
        """Select rows by their place in this list."""
        rows = self.rows[chosen]
        num_files = rows["num_files"].astype(np.int64)
        # The numbers of the files of each row, for all rows in one array.
        firsts = self.file_starts[chosen] - (np.cumsum(num_files) - num_files)
        files = np.repeat(firsts, num_files) + np.arange(int(num_files.sum()))
        spans = zip(self.name_starts[files].tolist(), self.name_starts[files + 1].tolist(), strict=True)
        names = b"".join([self.names[start:end] for start, end in spans])
        return RowKeys(self.positions[chosen], rows, self.states[files], self.name_sizes[files], names)


class KnownKeys:
    """The keys that an earlier start computed for the rows of this rank."""

    def __init__(
        self, path: Path, digests: Sequence[bytes], block: NDArray[np.int64], place: NDArray[np.int64]
    ) -> None:
        """Load the saved keys, and find this rank's rows among them.

        `digests` has the digest of every block of the source. Row i of this rank is in block `block[i]` at `place[i]`;
        a block of -1 means that the row is in no block.
        """
        self._path = path
        self._digests = np.frombuffer(b"".join(digests), "V16")
        self._code = np.where(block >= 0, block * NUM_ROWS + place, -1)
        self._saved_digests, self._saved_code, self._saved = _load(path)
        number_of = {digest: number for number, digest in enumerate(self._saved_digests.tolist())}
        self._saved_block = np.array([number_of.get(digest, -1) for digest in self._digests.tolist()], dtype=np.int64)
        self._at = self._find(self._saved_block, block, place)

    def _find(
        self, saved_block: NDArray[np.int64], block: NDArray[np.int64], place: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the index of each row of this rank among the saved rows; -1 if the row was not saved."""
        at_code = np.full(len(self._saved_digests) * NUM_ROWS, -1)
        at_code[self._saved_code] = np.arange(len(self._saved_code))
        in_saved = np.where(block >= 0, saved_block[block], -1)
        is_saved = in_saved >= 0
        at = np.full(len(block), -1)
        at[is_saved] = at_code[in_saved[is_saved] * NUM_ROWS + place[is_saved]]
        return at

    def without_files(self) -> Positions:
        """Return the known rows that name no file. Their keys are unchanged."""
        return self._known(has_files=False)

    def with_files(self) -> Positions:
        """Return the known rows that name files. Their keys are unchanged if `are_unchanged` says so of their files."""
        return self._known(has_files=True)

    def _known(self, *, has_files: bool) -> Positions:
        positions = np.flatnonzero(self._at >= 0)
        return positions[(self._saved.rows["num_files"][self._at[positions]] > 0) == has_files]

    def keys(self, positions: Positions) -> RowKeys:
        """Return the keys of known rows, without their files."""
        return replace(RowKeys.empty(positions), rows=self._saved.rows[self._at[positions]])

    def of(self, positions: Positions) -> RowKeys:
        """Return everything saved about known rows, with their files."""
        return replace(self._saved.at(self._at[positions]), positions=positions)

    def save(self, unchanged: Positions, found: list[RowKeys]) -> None:
        """Save the keys of all rows of this rank. Other saved rows are kept unless they outnumber these.

        `unchanged` are rows whose saved keys hold; `found` has the keys of all others. The list `found` is emptied,
        because the names and states of a million images take 100 MB.
        """
        rows = RowKeys.joined([self.of(unchanged), *found])
        found.clear()
        kept = np.flatnonzero((self._code[rows.positions] >= 0) & (rows.rows["key"] != NO_KEY))
        digests, code = self._digests, self._code[rows.positions[kept]]
        if len(kept) < len(rows.positions):
            rows = rows.at(kept)
        # Other saved rows are in blocks that this run does not have, or other seeds drew them or held them out.
        is_other = np.ones(len(self._saved_code), dtype=bool)
        is_other[self._at[self._at >= 0]] = False
        other = np.flatnonzero(is_other)
        if 0 < len(other) <= len(code):
            # Blocks of this run have their numbers already; the other blocks get the next ones.
            number = np.full(len(self._saved_digests), -1)
            number[self._saved_block[self._saved_block >= 0]] = np.flatnonzero(self._saved_block >= 0)
            unmet = np.flatnonzero(number < 0)
            number[unmet] = len(digests) + np.arange(len(unmet))
            digests = np.concatenate([digests, self._saved_digests[unmet]])
            block, place = np.divmod(self._saved_code[other], NUM_ROWS)
            code = np.concatenate([code, number[block] * NUM_ROWS + place])
            rows = RowKeys.joined([rows, self._saved.at(other)])
        file = io.BytesIO()
        file.write(KEYS_MAGIC)
        np.savez(
            file, digests=digests, code=code, rows=rows.rows, states=rows.states, name_sizes=rows.name_sizes,
            names=np.frombuffer(rows.names, np.uint8),
        )  # fmt: skip
        with suppress(OSError):  # the file of lengths, in the same folder, reports it
            write_whole(self._path, file.getbuffer())


def are_unchanged(files: Iterable[tuple[str, int]]) -> bool:
    """Tell whether all files are in their saved state, which may be that a file is missing. Asks the file system."""
    return all(state_now(real_file(name)) == state for name, state in files)


def _load(path: Path) -> tuple[NDArray[np.void], NDArray[np.int64], RowKeys]:
    """Read a saved file. Returns (digests of blocks, codes of rows, keys), all empty if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            if file.read(len(KEYS_MAGIC)) != KEYS_MAGIC:
                raise ValueError
            saved = np.load(file, allow_pickle=False)
            code, names = saved["code"], saved["names"].tobytes()
            rows = RowKeys(np.arange(len(code)), saved["rows"], saved["states"], saved["name_sizes"], names)
            digests = saved["digests"]
            if rows.rows.dtype != ROW or len(rows.rows) != len(code) or rows.file_starts[-1] != len(rows.states):
                raise ValueError
            if len(code) and not 0 <= code.min() <= code.max() < len(digests) * NUM_ROWS:
                raise ValueError
            return digests, code, rows
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return np.zeros(0, "V16"), np.zeros(0, dtype=np.int64), RowKeys.empty(np.zeros(0, dtype=np.int64))
