"""Find out which files have the same bytes, and read as little as possible.

Files of different sizes differ. If files have equal sizes, 8 kB of their middle and end are read. Only files that are
equal there are read whole. Digests are remembered by path, size and times, so a second start reads nothing.

>>> identities({"a.jpg": FileState(10, 0, 0), "b.jpg": FileState(11, 0, 0)}) == {}  # neither is read
True
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from swift_vlpack import json_lines
from swift_vlpack.comm import ALONE, Comm
from swift_vlpack.lengths.cache_folder import MEDIA_DIGESTS
from swift_vlpack.rows.prefixes import FileState

_NUM_BYTES_SAMPLED = 4096
_NUM_BYTES_AT_ONCE = 1 << 20
_SAMPLED, _WHOLE = "sampled", "whole"

Known = dict[tuple[str, FileState, str], str]


def identities(files: Mapping[str, FileState], folder: Path | None = None, comm: Comm = ALONE) -> dict[str, str]:
    """Return a digest of the bytes of each file that may equal another file. A file without a digest equals no other.

    Every rank reads its share of the files, and all get the same result. Digests are remembered in `folder`.
    """
    saved = None if folder is None else folder / MEDIA_DIGESTS
    # Only the first rank's file counts, because ranks on several machines may have files of their own.
    known = comm.results_of_all(lambda: _load(saved) if comm.rank == 0 else {})[0]
    by_size = _repeated({path: state.size for path, state in files.items()})
    sampled = _digests(by_size, files, _SAMPLED, known, saved, comm)
    like = _repeated({path: (files[path].size, digest) for path, digest in sampled.items()})
    # A small file was read whole already.
    whole = _digests(
        (path for path in like if files[path].size > 2 * _NUM_BYTES_SAMPLED), files, _WHOLE, known, saved, comm
    )
    return {path: whole.get(path, sampled[path]) for path in like if path in whole or _is_small(files[path])}


def _is_small(state: FileState) -> bool:
    return state.size <= 2 * _NUM_BYTES_SAMPLED


def _repeated(values: Mapping[str, Hashable]) -> list[str]:
    """Return the names whose values occur more than once."""
    numbers = Counter(values.values())
    return [name for name, value in values.items() if numbers[value] > 1]


def _digests(
    paths: Iterable[str], files: Mapping[str, FileState], how: str, known: Known, saved: Path | None, comm: Comm
) -> dict[str, str]:
    wanted = sorted(paths)
    missing = [path for path in wanted if (path, files[path], how) not in known]

    def of_this_rank() -> Known:
        found = {}
        for path in missing[comm.rank :: comm.num_ranks]:
            with suppress(OSError):  # the row cannot be encoded either; the length pass says so
                found[path, files[path], how] = _digest(path, files[path].size, is_whole=how == _WHOLE)
        _save(saved, found)
        return found

    for found in comm.results_of_all(of_this_rank):
        known.update(found)
    return {path: known[path, files[path], how] for path in wanted if (path, files[path], how) in known}


def _digest(path: str, size: int, *, is_whole: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        if is_whole or size <= 2 * _NUM_BYTES_SAMPLED:
            while block := file.read(_NUM_BYTES_AT_ONCE):
                digest.update(block)
        else:
            # The start of the file is not read, because files of one camera or program begin alike.
            for start in (size // 2, size - _NUM_BYTES_SAMPLED):
                file.seek(start)
                digest.update(file.read(_NUM_BYTES_SAMPLED))
    return digest.hexdigest()


def _load(path: Path | None) -> Known:
    known: Known = {}
    for line in json_lines.read(path) if path is not None else ():
        with suppress(ValueError, TypeError):  # a line that a killed process left unfinished
            name, size, changed, inode_changed, how, digest = line
            known[str(name), FileState(size, changed, inode_changed), str(how)] = str(digest)
    return known


def _save(path: Path | None, found: Known) -> None:
    if path is not None and found:
        with suppress(OSError):  # the file of lengths, in the same folder, reports it
            json_lines.append(path, [[name, *state, how, digest] for (name, state, how), digest in found.items()])
