"""Save the planned sizes of rows and digests of their content, and compare both on resume.

A plan is a function of the sizes, so a resumed run that takes the saved ones has the plan of the saved run, although a
file of a row has gone or come back meanwhile. If the data itself has changed, the error names the rows.

    rows = RunRows(sources)                                   digests of the rows as they are now
    rows.as_file() -> vlpack_rows.npz -> from_bytes(...)      written to a checkpoint, and read from it
    rows.compared(saved) -> Changes, rows.take_sizes(saved)   on resume

The state of the checkpoint has the digest of this file, which is compared before the file is read (`host/state.py`).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.mix import Mix
from swift_vlpack.plan.parts import CutRows
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.media import looks_like_path, names_of_files
from swift_vlpack.rows.shared import SharedPrefixes
from swift_vlpack.rows.sizes import NUM_COLUMNS, LengthIndex
from swift_vlpack.rows.source import RowSource, row_bytes, rows_in_turn

NUM_ROWS_WITH_DIGEST = 10_000
"""Most rows of a source whose content is compared: to read all would take too long. Sizes of all rows are compared."""
NUM_CHANGES_NAMED = 3
"""Most rows of each kind of change that the error names, because a reader looks at one or two."""
NUM_PLANNED_COLUMNS = 3
"""Columns of sizes that decide a plan: length, images and patches."""
_CUT = ("cut", "cut_offsets", "cut_parts")
"""Names of the arrays with the parts of cut rows."""
_PREFIXES = {"prefix_keys": "<u8", "prefix_lengths": "<i4"}
"""Names and types of the arrays that say which rows share a prefix."""
_OF_ROW = {Reason.OVER_MAX_LENGTH, Reason.IMAGES_MALFORMED, Reason.NO_MESSAGES}
"""Reasons that a row or the options cause, and never a file."""


class SavedSource(NamedTuple):
    """A source as a checkpoint saves it."""

    name: str
    sizes: LengthIndex
    """The sizes of all rows."""
    contents: NDArray[np.uint64]
    """Digests of the rows `rows_with_digest(num_rows)`."""
    numbers: NDArray[np.int64]
    """Numbers of these rows in their file."""
    prefixes: SharedPrefixes | None = None
    """The key and length of the prefix of each row; None if the run shares no prefixes."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The number of rows that changed in one way, with a description of the first ones."""

    num_rows: int = 0
    first: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.num_rows > 0

    def __str__(self) -> str:
        more = self.num_rows - len(self.first)
        return "; ".join(self.first) + (f"; and {more} more" if more else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The rows that differ from the saved ones, by the kind of change."""

    texts: ChangedRows = ChangedRows()
    """Rows with other content."""
    sizes: ChangedRows = ChangedRows()
    """Rows with another size, although their files could be read then and can be read now."""
    gone: ChangedRows = ChangedRows()
    """Rows that cannot be read any more because of a file."""
    back: ChangedRows = ChangedRows()
    """Rows that could not be read then, and can be read now."""


class RunRows:
    """The sources of a run with digests of their rows. A stream has no sources."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self.sources = tuple(sources)
        self.contents = [row_digests(source) for source in self.sources]
        self._written: bytes | None = None

    def as_file(self) -> bytes:
        """Return the content of `vlpack_rows.npz`. It is made once, because all checkpoints of a run have the same."""
        if self._written is None:
            self._written = to_bytes(list(map(saved_source, self.sources, self.contents)))
        return self._written

    def compared(self, saved: Sequence[SavedSource]) -> Changes | None:
        """Compare the rows with saved ones; None if the names of the sources, or their order, differ."""
        # The order matters because schedules and saved sizes refer to sources by their number.
        if [one.name for one in saved] != [source.name for source in self.sources]:
            return None
        return changes(saved, self.sources, self.contents)

    def take_sizes(self, saved: Sequence[SavedSource]) -> None:
        """Replace the sizes of the sources by the saved ones."""
        self.sources, self._written = with_sizes(self.sources, saved), None

    def fingerprint(self, mix: Mix) -> dict[str, Any]:
        """Return everything that determines the schedules of all epochs."""
        contents = zip(self.sources, self.contents, strict=True)
        return {
            "shuffle": mix.shuffle,
            "sources": {source.name: [len(source.rows), source.ratio, source.sample_limit] for source in self.sources},
            "data": digest_of(*(part for source, digests in contents for part in _content(source, digests))),
            "ratio_by": mix.ratio_by,
        }


def saved_source(source: RowSource, contents: NDArray[np.uint64]) -> SavedSource:
    """Collect what a checkpoint saves of a source. Without lengths, as in buffer mode, the sizes are 0."""
    sizes = source.sizes or LengthIndex(np.zeros((NUM_COLUMNS, len(source.rows)), dtype=np.int64), {})
    numbers = np.array([source.row_number(at) for at in rows_with_digest(len(source.rows)).tolist()], dtype=np.int64)
    return SavedSource(source.name, sizes, contents, numbers, source.prefixes)


def with_sizes(sources: Iterable[RowSource], saved: Iterable[SavedSource]) -> tuple[RowSource, ...]:
    """Return the sources with the sizes and prefixes of the saved plan. One that has them stays as it is."""
    return tuple(map(_with_prefixes, map(_with_sizes, sources, saved), saved))


def _with_sizes(source: RowSource, saved: SavedSource) -> RowSource:
    if source.sizes is None:
        return replace(source, sizes=saved.sizes)
    if np.array_equal(_planned(source.sizes), _planned(saved.sizes)) and source.sizes.cut == saved.sizes.cut:
        return source
    # A checkpoint has reasons without details. Keep the present details of rows that fail for the same reason as then.
    said = {at: fault for at, fault in source.sizes.faults.items() if saved.sizes.failures.get(at) == fault.reason}
    return replace(source, sizes=replace(saved.sizes, faults=said))


def _with_prefixes(source: RowSource, saved: SavedSource) -> RowSource:
    """Let the rows share as in the saved run, so that its plan can be made again although a file is gone since."""
    now, then = source.prefixes, saved.prefixes
    if now is None or then is None:
        return source
    is_same = np.array_equal(now.key, then.key) and np.array_equal(now.length, then.length)
    return source if is_same else replace(source, prefixes=then)


def _planned(sizes: LengthIndex) -> NDArray[np.int64]:
    return sizes.columns[:NUM_PLANNED_COLUMNS]


# -- digests ----------------------------------------------------------------------------------------------------------


def rows_with_digest(num_rows: int) -> NDArray[np.int64]:
    """Choose the rows of a source whose content has a digest, in order."""
    # Draw without the run's seed: the same rows must be compared in every run over the data.
    return np.sort(permutation(num_rows, "content")[:NUM_ROWS_WITH_DIGEST])


def row_digests(source: RowSource) -> NDArray[np.uint64]:
    """Return a digest of 8 bytes for each of the `rows_with_digest`."""
    rows = rows_in_turn(source.rows, rows_with_digest(len(source.rows)).tolist())
    digests = [hashlib.blake2b(row_bytes(row), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def _content(source: RowSource, digests: NDArray[np.uint64]) -> list[bytes]:
    """Return what identifies the content of a source: its settings, the numbers of its rows, and their digests."""
    numbers = () if source.row_numbers is None else source.row_numbers
    part = [source.name, source.system, source.max_pixels, source.seed]
    return [
        json.dumps(part).encode(),
        np.asarray(numbers, dtype="<i8").tobytes(),
        digests.astype("<u8").tobytes(),
    ]


def digest_of(*parts: bytes) -> str:
    """Return a digest of 16 hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        # Write the length before each part, otherwise ("ab", "c") and ("a", "bc") would be equal.
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]


# -- as a file --------------------------------------------------------------------------------------------------------


def to_bytes(sources: Sequence[SavedSource]) -> bytes:
    """Write the sources as a compressed file of numpy arrays."""
    names = [source.name for source in sources]
    reasons = sorted({reason for source in sources for reason in source.sizes.failures.values()})
    arrays: dict[str, NDArray[Any]] = {"names": np.array(names, str), "reasons": np.array(reasons, str)}
    for number, (_, sizes, contents, numbers, prefixes) in enumerate(sources):
        failed = sorted(sizes.failures)
        # Use fixed sizes and byte order: a checkpoint may be resumed on another kind of machine.
        arrays[f"sizes{number}"] = sizes.columns.astype("<i4")
        arrays[f"failed{number}"] = np.array(failed, dtype="<i8")
        arrays[f"reason{number}"] = np.array([reasons.index(sizes.failures[at]) for at in failed], dtype="<i4")
        arrays[f"contents{number}"] = contents.astype("<u8")
        arrays[f"numbers{number}"] = numbers.astype("<i8")
        if sizes.cut is not None:
            arrays |= {f"{name}{number}": one.astype("<i8") for name, one in zip(_CUT, sizes.cut.arrays, strict=True)}
        if prefixes is not None:
            of_rows: tuple[NDArray[Any], ...] = prefixes.key, prefixes.length
            columns = zip(_PREFIXES.items(), of_rows, strict=True)
            arrays |= {f"{name}{number}": array.astype(kind) for (name, kind), array in columns}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def from_bytes(content: bytes) -> list[SavedSource]:
    """Read what `to_bytes` wrote."""
    # Do not allow pickles: they can run code, and the checkpoint may come from somebody else.
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return [_loaded(arrays, number, name) for number, name in enumerate(arrays["names"].tolist())]


def _loaded(arrays: Mapping[str, NDArray[Any]], number: int, name: str) -> SavedSource:
    reasons = arrays["reasons"][arrays[f"reason{number}"]].tolist()
    cut = prefixes = None
    if f"{_CUT[0]}{number}" in arrays:
        cut = CutRows(*(arrays[f"{word}{number}"].astype(np.int64) for word in _CUT))
    if f"{next(iter(_PREFIXES))}{number}" in arrays:
        key, length = (arrays[f"{word}{number}"] for word in _PREFIXES)
        prefixes = SharedPrefixes(key.astype(np.uint64), length.astype(np.int32))
    failures = dict(zip(arrays[f"failed{number}"].tolist(), reasons, strict=True))
    sizes = LengthIndex(arrays[f"sizes{number}"].astype(np.int64), failures, cut=cut)
    return SavedSource(name, sizes, arrays[f"contents{number}"], arrays[f"numbers{number}"], prefixes)


# -- compare with the present rows ------------------------------------------------------------------------------------


def changes(saved: Sequence[SavedSource], sources: Sequence[RowSource], contents: Sequence[NDArray[Any]]) -> Changes:
    """Compare the rows of sources with the saved ones. `contents` are the digests of the present rows."""
    numbers = {"texts": 0, "sizes": 0, "gone": 0, "back": 0}
    said: dict[str, list[str]] = {kind: [] for kind in numbers}
    for of_source in map(_of_source, saved, sources, contents):
        for kind, (num_rows, texts) in of_source.items():
            numbers[kind] += num_rows
            said[kind] += islice(texts, NUM_CHANGES_NAMED - len(said[kind]))
    return Changes(**{kind: ChangedRows(numbers[kind], tuple(said[kind])) for kind in numbers})


def _of_source(
    saved: SavedSource, source: RowSource, contents: NDArray[np.uint64]
) -> dict[str, tuple[int, Iterator[str]]]:
    """Return the rows of a source that changed, by kind: their number, and what to say of each."""
    num_then, num_now = len(saved.sizes), len(source.rows)
    if num_then != num_now:
        return {"texts": (1, iter([_first_of_another_number(saved, source, contents)]))}
    others = rows_with_digest(num_now)[saved.contents != contents].tolist()
    found: dict[str, tuple[int, Iterator[str]]]
    found = {"texts": (len(others), (f"{_place(source, at)} is not the row that was saved" for at in others))}
    if (sizes := source.sizes) is None:
        return found
    then, now = _planned(saved.sizes), _planned(sizes)
    kinds: dict[str, list[int]] = {"sizes": [], "gone": [], "back": []}
    for at in np.flatnonzero((then != now).any(axis=0)).tolist():
        reasons = {saved.sizes.failures.get(at), sizes.failures.get(at)}
        is_other = (then[0, at] and now[0, at]) or bool(reasons & _OF_ROW)
        kinds["sizes" if is_other else "back" if now[0, at] else "gone"].append(at)

    def said(at: int) -> str:
        return f"{_place(source, at)} has {_size(sizes, at)}, but had {_size(saved.sizes, at)} in the saved run"

    return found | {kind: (len(rows), map(said, rows)) for kind, rows in kinds.items()}


def _first_of_another_number(saved: SavedSource, source: RowSource, contents: NDArray[np.uint64]) -> str:
    num_then, num_now = len(saved.sizes), len(source.rows)
    said = f"{source.name} has {num_now} rows, but {num_then} were saved"
    if max(num_then, num_now) > NUM_ROWS_WITH_DIGEST:  # too many rows: the digests are of different rows then
        return said
    then = dict(zip(saved.numbers.tolist(), saved.contents.tolist(), strict=True))
    at_number = {source.row_number(at): at for at in range(num_now)}
    now = {number: int(contents[at]) for number, at in at_number.items()}
    differing = [number for number in sorted({*then, *now}) if then.get(number) != now.get(number)]
    if not differing:
        return said
    number = differing[0]
    where = (
        _place(source, at_number[number]) if number in now else f"row {number + 1} of the saved run, which is missing,"
    )
    return f"{said}; they differ from {where} on"


def _place(source: RowSource, at: int) -> str:
    files = ", ".join(filter(looks_like_path, names_of_files(source.rows[at])))
    return f"{source.sample_id(at)} ({source.where(at)}{f', files: {files}' if files else ''})"


def _size(sizes: LengthIndex, at: int) -> str:
    length, images, patches = _planned(sizes)[:, at].tolist()
    if not length:
        return sizes.failures.get(at, "no size")
    return f"{length} tokens" + (f" ({images} images, {patches} patches)" if images else "")
