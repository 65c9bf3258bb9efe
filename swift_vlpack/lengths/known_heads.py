"""Remember what the rows of a source begin with, so that a later start does not read them (19 us a row).

The head of a row (`rows/prefixes.py`) depends on the content of the row, on the settings of its source, and on which of
the files that the row names exist. It does not depend on the content of these files. So the heads of a source are saved
with a digest of its rows (`row_blocks.py`). They are valid while the digest is the same and every file is in its place:

- Each start looks up the state (size and times) of every file. If a state changed, `media_digests.py` reads the file
  again; heads stay the same.
- If a file is gone, all rows are read again.
- Rows of an unknown form are read again at every start, because they may name a file that was missing.

Each source has one file next to its lengths, `SOURCE-DIGEST.heads`. If that file is lost, all rows are read again.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.comm import ALONE, Comm
from swift_vlpack.files import write_whole
from swift_vlpack.lengths.length_file import HEADS_MAGIC, Keys
from swift_vlpack.lengths.row_blocks import RowBlocks
from swift_vlpack.rows.media import real_file
from swift_vlpack.rows.prefixes import FileState, path_of
from swift_vlpack.rows.source import RowSource

SUFFIX = ".heads"
_MOST_BYTES_OF_ROW = 4096
"""Most bytes of a row, on average over a source. With more (images inside rows), nothing is remembered, because to
digest the rows takes as long as to read them."""
_OF_ROWS = ("indices", "digests", "causes", "has_digest", "num_names", "num_bytes")
_COLUMNS = (*_OF_ROWS, "names_at", "first_media")


class Heads(NamedTuple):
    """The heads of some rows of a source, in arrays."""

    indices: NDArray[np.int64]
    digests: Keys
    causes: NDArray[np.uint8]
    has_digest: NDArray[np.bool_]
    num_names: NDArray[np.int64]
    names_at: NDArray[np.int64]
    """The media of all rows one after the other, as indices into `names`."""
    num_bytes: NDArray[np.int64]
    first_media: NDArray[np.uint8]
    """The `FirstMedia` of all rows as bytes, one row after the other; `num_bytes` has the bytes of each row."""
    names: list[str]
    files: dict[str, FileState]


class KnownHeads:
    """The heads of the rows of a source that an earlier start read."""

    def __init__(self, source: RowSource, lengths_path: Path | None, comm: Comm = ALONE) -> None:
        """Digest the rows of the source. All ranks must call this. Without `lengths_path`, nothing is remembered."""
        self._source = source
        self._comm = comm
        self._path = None if lengths_path is None else lengths_path.with_suffix(SUFFIX)
        blocks = None if self._path is None or _finds_files_elsewhere() else RowBlocks.of(source, _settings(source))
        if blocks is not None and blocks.num_bytes > _MOST_BYTES_OF_ROW * len(source.rows):
            blocks = None
        self._blocks = blocks
        self._mark = b"" if blocks is None else self._marked(blocks)

    def _marked(self, blocks: RowBlocks) -> bytes:
        """Return a digest of all rows in their order."""
        rank, num_ranks = self._comm.rank, self._comm.num_ranks
        of_ranks = self._comm.results_of_all(lambda: blocks.digests(range(rank, len(blocks), num_ranks)))
        in_order = [of_ranks[block % num_ranks][block // num_ranks] for block in range(len(blocks))]
        return hashlib.blake2b(blocks.layout() + b"".join(in_order), digest_size=16).digest()

    def load(self) -> Heads | None:
        """Return valid saved heads with the present states of their files, or None. All ranks must call this."""
        if self._blocks is None:
            return None
        saved = self._comm.results_of_all(lambda: self._read() if self._comm.rank == 0 else None)[0]
        if saved is None:
            return None
        paths = [path for name in saved.names if (path := path_of(name)) is not None]
        mine = paths[self._comm.rank :: self._comm.num_ranks]
        files: dict[str, FileState] = {}
        for states in self._comm.results_of_all(lambda: _states(mine)):
            if states is None:
                return None
            files |= states
        return saved._replace(files=files)

    def missing(self, heads: Heads | None) -> NDArray[np.int64]:
        """Return the indices of the rows that must be read, given what `load` returned."""
        is_missing = np.ones(len(self._source.rows), bool)
        if heads is not None:
            is_missing[heads.indices] = False
        return np.flatnonzero(is_missing)

    def save(self, some: Sequence[Heads]) -> None:
        """Save the heads of the source, except of rows that are read at every start."""
        if self._blocks is None or self._comm.rank or not some:
            return
        heads = _certain(_joined(some), self._blocks)
        names = [name.encode("utf-8", "surrogatepass") for name in heads.names]
        file = io.BytesIO()
        file.write(HEADS_MAGIC)
        np.savez(
            file,
            mark=np.frombuffer(self._mark, np.uint8),
            names=np.frombuffer(b"".join(names), np.uint8),
            name_sizes=np.array(list(map(len, names)), np.int64),
            **{column: getattr(heads, column) for column in _COLUMNS},
        )
        assert self._path is not None
        with suppress(OSError):  # the file of lengths, in the same folder, reports the error
            write_whole(self._path, file.getbuffer())

    def _read(self) -> Heads | None:
        """Read the saved heads; None if the file is missing, damaged, or of other rows."""
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                if file.read(len(HEADS_MAGIC)) != HEADS_MAGIC:
                    return None
                saved = np.load(file, allow_pickle=False)
                if saved["mark"].tobytes() != self._mark:
                    return None
                ends, text = np.cumsum(saved["name_sizes"]).tolist(), saved["names"].tobytes()
                spans = zip([0, *ends], ends, strict=False)
                names = [text[start:end].decode("utf-8", "surrogatepass") for start, end in spans]
                return Heads(**{column: saved[column] for column in _COLUMNS}, names=names, files={})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def _finds_files_elsewhere() -> bool:
    """Tell whether a name can stand for one of two files, so that a file that appears can change which one is meant."""
    return bool(os.environ.get("ROOT_IMAGE_DIR"))


def _settings(source: RowSource) -> str:
    """Return the settings that decide heads and that `RowBlocks` does not digest by itself."""
    return repr((source.max_pixels, os.getcwd(), os.path.expanduser("~")))


def _states(paths: Sequence[str]) -> dict[str, FileState] | None:
    """Return the present state of each file; None if a file is not in its place."""
    found = {}
    for path in paths:
        file = real_file(path)
        if file is None or file.path != path:
            return None
        found[path] = FileState(file.state.st_size, file.state.st_mtime_ns, file.state.st_ctime_ns)
    return found


def _joined(some: Sequence[Heads]) -> Heads:
    names: dict[str, int] = {}
    names_at = []
    for heads in some:
        numbers = np.array([names.setdefault(name, len(names)) for name in heads.names], np.int64)
        names_at.append(numbers[heads.names_at])
    columns = {name: np.concatenate([getattr(heads, name) for heads in some]) for name in (*_OF_ROWS, "first_media")}
    return Heads(**columns, names_at=np.concatenate(names_at), names=list(names), files={})


def _certain(heads: Heads, blocks: RowBlocks) -> Heads:
    """Leave out rows that no block digests, and rows of an unknown form."""
    kept = (blocks.block[heads.indices] >= 0) & (heads.has_digest | (heads.causes > 0))
    columns = {name: getattr(heads, name)[kept] for name in _OF_ROWS}
    names_at = heads.names_at[np.repeat(kept, heads.num_names)]
    first_media = heads.first_media[np.repeat(kept, heads.num_bytes)]
    return heads._replace(**columns, names_at=names_at, first_media=first_media)
