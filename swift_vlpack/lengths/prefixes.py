"""Find the prefixes that rows share, before training and without pixels.

The pass has five steps. In each step every rank works on its share of the rows, and all ranks get the same result:

1. Read the head of every row (`rows/prefixes.py`), and find out which
   media are the same (`media_digests.py`).
2. Group the rows of all sources by head and media. A group of two or more rows has a prefix.
3. Encode one row of each group by header, to count the tokens of its prefix. This is remembered next to the lengths.
4. Encode some rows of each source in full, to see that the prefix is the same in every row of a group.
5. Group the remaining rows with several media by their first media, the groups with most media first. Repeat steps 3
   and 4 for these groups.

A row may share with no other row although another row has its medium. Such rows are counted by cause, and the log says
for each cause what a user can do.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.comm import ALONE, Comm
from swift_vlpack.config import PackingConfig
from swift_vlpack.lengths import forked
from swift_vlpack.lengths.cache import PREFIXES
from swift_vlpack.lengths.length_file import KEY, KEYED_SIZE, Keys, LengthFile, Records
from swift_vlpack.lengths.measure import Progress
from swift_vlpack.lengths.media_digests import identities
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.plan.units import NO_KEY
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import MediaTokens, refuse_sharing
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.media import image_urls
from swift_vlpack.rows.prefixes import (
    FileState,
    FirstMedia,
    Head,
    HeadReader,
    Prefix,
    first_media_of,
    have_same_prefix,
    medium_of,
    path_of,
    prefix_of,
    prefix_of_system,
    rows_of_probes,
)
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import SampleError
from swift_vlpack.rows.shared import Alone, SharedPrefixes, counted_causes
from swift_vlpack.rows.source import RowSource, rows_at
from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

NUM_GROUPS_CHECKED = 8
"""Number of groups of each source from which two rows are encoded in full and compared."""
_ROWS_OF_TASK = 2048
"""Rows of a task whose heads are read: 50 ms."""
_GROUPS_OF_TASK = 64
"""Rows of a task that are encoded by header: 20 to 50 ms."""
_NUM_ROWS_WORTH_A_PROCESS = 20_000
_NUM_GROUPS_WORTH_A_PROCESS = 500


class SourceToShare(NamedTuple):
    """A measured source, the encoders of its rows, and the file in which its lengths are remembered."""

    source: RowSource
    encoders: Encoders
    lengths_path: Path | None = None

    @property
    def encoder(self) -> RowEncoder:
        """Return the encoder that reads headers, if headers of this source are trusted; else the full one."""
        assert self.source.sizes is not None
        by_header = self.encoders.by_header if self.source.sizes.without_headers is None else None
        return by_header or self.encoders.in_full


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingLimits:
    """The options that decide which rows may share."""

    packing_length: int
    least_system_tokens: int
    """`packing_share_min`: fewest tokens of a system turn that rows without media share."""

    @classmethod
    def of(cls, config: PackingConfig) -> SharingLimits:
        """Read the options."""
        return cls(packing_length=config.packing_length, least_system_tokens=config.packing_share_min)


def with_prefixes(
    given: Sequence[SourceToShare],
    limits: SharingLimits,
    comm: Comm = ALONE,
    *,
    folder: Path | None = None,
    is_shown: bool = False,
) -> list[RowSource]:
    """Return the sources with the prefixes that their rows share, and log how many rows share. All ranks must call it.

    Digests of files are remembered in `folder`. `is_shown` shows a progress bar.
    """
    with Progress(is_shown=is_shown) as progress:
        found = _PrefixPass(given, limits, comm, folder, progress).found()
    sources = [replace(one.source, prefixes=prefixes) for one, prefixes in zip(given, found, strict=True)]
    if comm.rank == 0:
        for source in sources:
            log_sharing(source)
    return sources


def sharing_rows(rows: FusionCaptionDataset, config: PackingConfig) -> FusionCaptionDataset:
    """Find the prefixes of measured rows that no length pass has looked at: the rows of a trainer of one's own."""
    if not config.shares_media or any(source.prefixes is not None for source in rows.sources):
        return rows
    refuse_sharing(getattr(rows.template, "config", None))
    given = [
        SourceToShare(source, Encoders(by_header=None, in_full=encoder))
        for source, encoder in zip(rows.sources, rows.encoders, strict=True)
    ]
    return rows.with_sources(with_prefixes(given, SharingLimits.of(config)))


def log_sharing(source: RowSource) -> None:
    """Log how many rows of a source share a prefix, and for all others why not and what to do about it."""
    prefixes = source.prefixes
    if prefixes is None:
        return
    if prefixes.num_sharing:
        rows = prefixes.rows_per_prefix
        median, p95 = np.percentile(rows, (50, 95), method="higher").tolist()  # counts that occur, as in the plan
        logger.info(
            f"source {source.name}: {counted(prefixes.num_sharing, 'row')} of {len(prefixes)} share "
            f"{counted(len(rows), 'prefix', 'prefixes')}, median {median} rows each, p95 {p95}"
        )
    else:
        logger.warning(f"source {source.name}: packing_share=media does nothing for it: no rows share a prefix")
    for alone in prefixes.alone:
        logger.warning(
            f"source {source.name}: {counted(alone.num_rows, 'row')} with a medium that other rows have too are "
            f"trained alone: they {alone.cause.text} (such as {source.where(alone.example)}); {alone.cause.way_out}"
        )


# -- heads of all rows ------------------------------------------------------------------------------------------------


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


class _HeadTask(NamedTuple):
    source: int
    indices: NDArray[np.int64]


class _HeadWork:
    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        # One reader for each source, because rows of several tasks may name the same file.
        self._readers = [HeadReader(source.max_pixels, source.system) for source in sources]

    def __call__(self, task: _HeadTask) -> Heads:
        source, reader = self._sources[task.source], self._readers[task.source]
        return _heads(task.indices, [reader.head(row) for row in rows_at(source.rows, task.indices.tolist())], reader)


def _heads(indices: NDArray[np.int64], heads: Sequence[Head], reader: HeadReader) -> Heads:
    names: dict[str, int] = {}
    places = [names.setdefault(name, len(names)) for head in heads for name in head.media]
    first = [b"".join([one.to_bytes() for one in head.first]) if head.first else b"" for head in heads]
    return Heads(
        indices,
        np.frombuffer(b"".join(head.digest or bytes(16) for head in heads), KEY),
        np.array([head.cause for head in heads], np.uint8),
        np.array([bool(head.digest) for head in heads], bool),
        np.array([len(head.media) for head in heads], np.int64),
        np.array(places, np.int64),
        np.array(list(map(len, first)), np.int64),
        np.frombuffer(b"".join(first), np.uint8),
        list(names),
        reader.take_files(),
    )


class _Rows:
    """The heads of all rows of all sources, joined: one number for every row, one for every medium."""

    def __init__(self, sources: Sequence[RowSource], of_tasks: Sequence[tuple[int, Heads]]) -> None:
        self.first = np.cumsum([0, *(len(source.rows) for source in sources)])
        num_rows = int(self.first[-1])
        self.digests = np.zeros(num_rows, KEY)
        self.causes = np.zeros(num_rows, np.uint8)
        self.has_digest = np.zeros(num_rows, bool)
        self.media: list[tuple[int, ...]] = [()] * num_rows
        self.first_media: dict[int, bytes] = {}
        """By row with several media, its `FirstMedia` as bytes (`first_media_of` reads them)."""
        names: dict[str, int] = {}
        self.files: dict[str, FileState] = {}
        for source, heads in of_tasks:
            rows = heads.indices + self.first[source]
            self.digests[rows], self.causes[rows] = heads.digests, heads.causes
            self.has_digest[rows] = heads.has_digest
            numbers = np.array([names.setdefault(name, len(names)) for name in heads.names], np.int64)
            ids, ends = numbers[heads.names_at].tolist() if len(numbers) else [], np.cumsum(heads.num_names).tolist()
            for row, start, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
                if end > start:
                    self.media[row] = tuple(ids[start:end])
            content, ends = heads.first_media.tobytes(), np.cumsum(heads.num_bytes)
            for at in np.flatnonzero(heads.num_bytes).tolist():
                self.first_media[int(rows[at])] = content[int(ends[at] - heads.num_bytes[at]) : int(ends[at])]
            for path, state in heads.files.items():
                self.files.setdefault(path, state)
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.media)

    def merge_equal_files(self, digests: dict[str, str]) -> None:
        """Give media with the same bytes one number, and put the digest or the state of the file into their names."""
        names: dict[str, int] = {}
        merged = []
        for name in self.names:
            path = path_of(name)
            if path is not None:
                # The name includes the state of the file: if the file changes, the remembered length of its prefix is
                # not found.
                content = digests.get(path) or f"{path}\n{tuple(self.files[path])}"
                name = f"{name[0]}c{content}"
            merged.append(names.setdefault(name, len(names)))
        self.names = list(names)
        self.media = [tuple([merged[one] for one in of_row]) if of_row else () for of_row in self.media]

    @cached_property
    def digests_of_names(self) -> list[bytes]:
        """Return a digest of each name; only after `merge_equal_files`."""
        return [hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest() for name in self.names]

    def keys(self) -> Keys:
        """Return the key of each row: equal for rows that may share; zeros for a row that shares with no other row."""
        keys = np.zeros(len(self), KEY)
        digests = self.digests_of_names
        packed = self.digests.tobytes()
        made = bytearray(keys.nbytes)
        for row in np.flatnonzero(self.has_digest).tolist():
            content = packed[16 * row : 16 * row + 16] + b"".join([digests[one] for one in self.media[row]])
            made[16 * row : 16 * row + 16] = hashlib.blake2b(content, digest_size=16).digest()
        return np.frombuffer(made, KEY)

    def key_of(self, row: int, beginning: FirstMedia) -> bytes:
        """Return the key of a row's beginning, which equals the key of a row that has only these media."""
        names = [self.digests_of_names[one] for one in beginning.of(self.media[row])]
        return hashlib.blake2b(beginning.digest + b"".join(names), digest_size=16).digest()


# -- lengths of prefixes ----------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """A prefix whose length is needed, with one of its rows."""

    key: bytes
    """The key under which its length is remembered."""
    source: int
    row_index: int
    has_media: bool
    beginning: FirstMedia | None = None
    """The part of the row that is the prefix; None if the prefix has all media of the row."""


class _GroupTask(NamedTuple):
    wanted: list[_Wanted]


class _GroupWork:
    """Counts the tokens of prefixes."""

    def __init__(self, given: Sequence[SourceToShare]) -> None:
        self._given = given

    @cached_property
    def _tokens(self) -> list[MediaTokens]:
        return [MediaTokens.of(one.encoders.in_full.template) for one in self._given]

    def __call__(self, task: _GroupTask) -> list[Prefix]:
        self._fetch(task)
        return [self._prefix(one) for one in task.wanted]

    def _fetch(self, task: _GroupTask) -> None:
        """Fetch the images that rows name by URL, side by side."""
        for number, one in enumerate(self._given):
            if (urls := one.encoders.urls) is not None:
                rows = (one.source.row(asked.row_index) for asked in task.wanted if asked.source == number)
                urls.forget()
                urls.read((url for row in rows for url in image_urls(row)), whole=one.encoder is one.encoders.in_full)

    def _prefix(self, wanted: _Wanted) -> Prefix:
        one = self._given[wanted.source]
        row, sample_id = one.source.row(wanted.row_index), one.source.sample_id(wanted.row_index)
        try:
            if not wanted.has_media:
                encode = one.encoders.in_full.sample
                return prefix_of_system([encode(probe, sample_id, is_watched=True) for probe in rows_of_probes(row)])
            try:
                sample = one.encoder.sample(row, sample_id)
            except SampleError:  # its header gives no size
                sample = one.encoders.in_full.sample(row, sample_id)
        except SampleError:
            return Prefix(0, Alone.CANNOT_BE_ENCODED)
        prefix = prefix_of(sample, self._tokens[wanted.source], wanted.beginning)
        # A text model leaves the media of a row alone.
        return prefix if prefix.length or prefix.cause else Prefix(0, Alone.FAMILY_UNKNOWN)


class _PrefixFile:
    """Remembers the lengths of prefixes by key, in records of the same form as lengths."""

    def __init__(self, lengths_path: Path | None) -> None:
        self._file = None if lengths_path is None else LengthFile(lengths_path.with_suffix(PREFIXES))
        records: Records = np.zeros(0, KEYED_SIZE) if self._file is None else self._file.load()
        self._known = {
            key.tobytes(): Prefix(length, Alone(cause), images, patches)
            for key, length, cause, images, patches in zip(
                records["key"],
                *(records["size"][name].tolist() for name in ("length", "reason", "images", "patches")),
                strict=True,
            )
            if cause in Alone._value2member_map_
        }

    def get(self, key: bytes) -> Prefix | None:
        return self._known.get(key)

    def save(self, found: dict[bytes, Prefix]) -> None:
        # A row that could not be encoded may be encoded at the next start.
        lasting = {key: one for key, one in found.items() if one.cause is not Alone.CANNOT_BE_ENCODED}
        if self._file is None or not lasting:
            return
        records = np.zeros(len(lasting), KEYED_SIZE)
        records["key"] = np.frombuffer(b"".join(lasting), KEY)
        records["size"]["length"] = [one.length for one in lasting.values()]
        records["size"]["reason"] = [int(one.cause) for one in lasting.values()]
        records["size"]["images"] = [one.images for one in lasting.values()]
        records["size"]["patches"] = [one.patches for one in lasting.values()]
        self._file.append(records)


# -- rows that share some of their media ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that begin with the same media."""

    key: bytes
    whole: list[int]
    """Rows with no other media."""
    partial: dict[int, FirstMedia]
    """Rows with further media, each with the beginning that it has in common with the group."""

    @property
    def members(self) -> list[int]:
        return [*self.whole, *self.partial]

    def is_known(self, length: NDArray[np.int32]) -> bool:
        """Tell whether step 3 has counted the prefix already, for the rows with no other media."""
        return bool(self.whole) and bool(length[self.whole[0]])


@dataclass(slots=True)
class _Found:
    """Collects, for each row, its key, the length of its prefix, and the cause if it shares nothing."""

    key: Keys
    length: NDArray[np.int32]
    cause: NDArray[np.uint8]
    own_media: NDArray[np.int32] | None = None  # (2, num_rows)

    def share(self, group: _Group, prefix: Prefix, sizes: NDArray[np.int64]) -> None:
        """Note the prefix of a group that shares some of its media. `sizes` has a column for each row of the run."""
        members, partial = np.array(group.members, np.int64), np.array([*group.partial], np.int64)
        if not prefix.length:
            is_unknown = prefix.cause is Alone.FAMILY_UNKNOWN
            self.cause[members] = Alone.MEDIA_NOT_DIVIDED if is_unknown else prefix.cause
            return
        if self.own_media is None:
            self.own_media = np.zeros((2, len(self.key)), np.int32)
        self.key[partial] = np.frombuffer(group.key, KEY)
        self.length[members] = prefix.length
        self.own_media[:, partial] = sizes[1:3, partial] - np.array([[prefix.images], [prefix.patches]])


# -- the pass ---------------------------------------------------------------------------------------------------------


class _PrefixPass:
    def __init__(
        self,
        given: Sequence[SourceToShare],
        limits: SharingLimits,
        comm: Comm,
        folder: Path | None,
        progress: Progress,
    ) -> None:
        self._given = given
        self._limits = limits
        self._comm = comm
        self._folder = folder
        self._progress = progress
        self._files = [_PrefixFile(one.lengths_path) for one in given]

    def found(self) -> list[SharedPrefixes]:
        """Do all steps. Returns the prefixes of each source."""
        rows = self._rows()
        keys = rows.keys()
        found = _Found(keys, np.zeros(len(rows), np.int32), rows.causes.copy())
        length, cause = found.length, found.cause
        # The numbers of all rows in their order, so that the first row of a group is the same at every start.
        of_groups = _groups(keys, self._usable(rows))
        cause[self._too_long(rows) & rows.has_digest] = Alone.TOO_LONG
        wanted = [self._wanted(rows, keys[members[0]].tobytes(), int(members[0])) for members in of_groups]
        for members, prefix in zip(of_groups, self._prefixes(wanted), strict=True):
            length[members] = prefix.length
            cause[members] = prefix.cause
        failed = self._checked(rows, keys, of_groups, length)
        for number, why in enumerate(failed):
            here = slice(rows.first[number], rows.first[number + 1])
            if why is not Alone.NOTHING_SHARED:
                length[here] = 0
                cause[here] = np.where(rows.has_digest[here], why, cause[here])
        self._share_first_media(rows, found)
        return self._shared(rows, found)

    # -- which rows are of one group

    def _rows(self) -> _Rows:
        sources = [one.source for one in self._given]
        mine = [np.arange(self._comm.rank, len(source.rows), self._comm.num_ranks) for source in sources]
        num_rows = sum(map(len, mine))

        def of_this_rank() -> list[tuple[int, Heads]]:
            tasks = deque(
                _HeadTask(number, indices[start : start + _ROWS_OF_TASK])
                for number, indices in enumerate(mine)
                for start in range(0, len(indices), _ROWS_OF_TASK)
            )
            numbers, found = [task.source for task in tasks], []
            with self._progress.stage("Media that rows share", num_rows) as bar:
                for heads in self._results(_HeadWork(sources), tasks, num_rows, _NUM_ROWS_WORTH_A_PROCESS):
                    found.append(heads)
                    bar.update(len(heads.indices))
            return list(zip(numbers, found, strict=True))

        of_tasks = [task for of_rank in self._comm.results_of_all(of_this_rank) for task in of_rank]
        rows = _Rows(sources, of_tasks)
        rows.merge_equal_files(identities(rows.files, self._folder, self._comm))
        return rows

    def _usable(self, rows: _Rows) -> NDArray[np.bool_]:
        return rows.has_digest & self._fits()

    def _fits(self) -> NDArray[np.bool_]:
        lengths = self._lengths()
        return np.asarray((lengths > 0) & (lengths < self._limits.packing_length))

    def _too_long(self, rows: _Rows) -> NDArray[np.bool_]:
        return np.asarray(self._lengths() >= self._limits.packing_length)

    def _lengths(self) -> NDArray[np.int64]:
        found = [one.source.sizes.lengths for one in self._given if one.source.sizes is not None]
        return np.concatenate([np.zeros(0, np.int64), *found])

    # -- how many tokens a group shares

    def _prefixes(self, wanted: Sequence[_Wanted]) -> list[Prefix]:
        known = self._comm.results_of_all(lambda: [self._files[source].get(key) for key, source, *_ in wanted])[0]
        missing = [at for at, one in enumerate(known) if one is None]
        mine = missing[self._comm.rank :: self._comm.num_ranks]

        def of_this_rank() -> dict[int, Prefix]:
            tasks = deque(
                _GroupTask([wanted[at] for at in mine[start : start + _GROUPS_OF_TASK]])
                for start in range(0, len(mine), _GROUPS_OF_TASK)
            )
            found: dict[int, Prefix] = {}
            places = iter(mine)
            with self._progress.stage("Lengths of prefixes", len(mine)) as bar:
                for some in self._results(_GroupWork(self._given), tasks, len(mine), _NUM_GROUPS_WORTH_A_PROCESS):
                    fresh = {next(places): one for one in some}
                    found.update(fresh)
                    self._save({wanted[at].key: one for at, one in fresh.items()}, [wanted[at].source for at in fresh])
                    bar.update(len(some))
            return found

        for found in self._comm.results_of_all(of_this_rank):
            for at, one in found.items():
                known[at] = one
        return [self._limited(one, has_media=asked.has_media) for one, asked in zip(known, wanted, strict=True)]

    def _limited(self, prefix: Prefix | None, *, has_media: bool) -> Prefix:
        assert prefix is not None
        if not has_media and prefix.length < self._limits.least_system_tokens:
            return Prefix(0)
        return prefix

    def _save(self, found: dict[bytes, Prefix], sources: Sequence[int]) -> None:
        for number in set(sources):
            of_source = zip(found.items(), sources, strict=True)
            self._files[number].save({key: one for (key, one), source in of_source if source == number})

    def _wanted(self, rows: _Rows, key: bytes, row: int, beginning: FirstMedia | None = None) -> _Wanted:
        return _Wanted(key, *self._place(rows, row), bool(rows.media[row]), beginning)

    def _place(self, rows: _Rows, row: int) -> tuple[int, int]:
        source = int(np.searchsorted(rows.first, row, side="right")) - 1
        return source, row - int(rows.first[source])

    # -- whether rows that look equal are

    def _checked(
        self, rows: _Rows, keys: Keys, of_groups: Sequence[NDArray[np.int64]], length: NDArray[np.int32]
    ) -> list[Alone]:
        """Encode two rows of some groups of each source in full. Returns, for each source, why no row may share."""
        pairs = [pair for number in range(len(self._given)) for pair in self._pairs(rows, of_groups, length, number)]
        wanted = [(source, self._check_key(rows, keys, one, other), one, other) for source, one, other in pairs]
        known = self._comm.results_of_all(lambda: [self._files[source].get(key) for source, key, *_ in wanted])[0]
        missing = [at for at, one in enumerate(known) if one is None]

        def of_this_rank() -> dict[int, Prefix]:
            found: dict[int, Prefix] = {}
            for at in missing[self._comm.rank :: self._comm.num_ranks]:
                source, key, one, other = wanted[at]
                found[at] = Prefix(0, self._compared(rows, one, other, int(length[one])))
                self._files[source].save({key: found[at]})
            return found

        for found in self._comm.results_of_all(of_this_rank):
            for at, one in found.items():
                known[at] = one
        failed = [Alone.NOTHING_SHARED] * len(self._given)
        for (source, *_), verdict in zip(wanted, known, strict=True):
            # If a template draws random numbers, that is why rows differ, so it is named before any other cause.
            if (
                verdict is not None
                and verdict.cause in (Alone.DIFFERS, Alone.DRAWS)
                and failed[source] is not Alone.DRAWS
            ):
                failed[source] = verdict.cause
        return failed

    def _pairs(
        self, rows: _Rows, of_groups: Sequence[NDArray[np.int64]], length: NDArray[np.int32], number: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield two rows of some groups, spread over a source."""
        here, end = rows.first[number], rows.first[number + 1]
        of_source = [
            (int(inside[0]), int(members[-1] if members[-1] != inside[0] else members[0]))
            for members in of_groups
            if length[members[0]] and len(inside := members[(members >= here) & (members < end)])
        ]
        spread = np.unique(np.linspace(0, max(0, len(of_source) - 1), NUM_GROUPS_CHECKED).astype(np.int64))
        for at in spread.tolist() if of_source else ():
            yield number, *of_source[at]

    def _check_key(self, rows: _Rows, keys: Keys, one: int, other: int) -> bytes:
        names = [self._given[source].source.sample_id(index) for source, index in
                 (self._place(rows, one), self._place(rows, other))]  # fmt: skip
        return hashlib.blake2b(keys[one].tobytes() + repr(names).encode(), digest_size=16).digest()

    def _compared(self, rows: _Rows, one: int, other: int, length: int) -> Alone:
        samples = []
        for row in (one, other):
            source, index = self._place(rows, row)
            given = self._given[source]
            # Each row draws from random numbers of its own, as rows of different packs do in training.
            with RandomStream("prefix", source, index) as stream:
                try:
                    samples.append(
                        given.encoders.in_full.sample(given.source.row(index), given.source.sample_id(index))
                    )
                except SampleError:
                    return Alone.CANNOT_BE_ENCODED
            if stream.has_drawn:
                return Alone.DRAWS
        tokens = MediaTokens.of(self._given[self._place(rows, one)[0]].encoders.in_full.template)
        is_same = have_same_prefix(samples[0], samples[1], length, tokens)
        return Alone.NOTHING_SHARED if is_same else Alone.DIFFERS

    # -- rows that share some of their media

    def _share_first_media(self, rows: _Rows, found: _Found) -> None:
        """Let rows that share with no other row so far share their first media."""
        groups = self._groups_by_first_media(rows, found)
        if not groups:
            return
        columns = [one.source.sizes.columns for one in self._given if one.source.sizes is not None]
        sizes = np.concatenate(columns, axis=1)
        missing = [at for at, group in enumerate(groups) if not group.is_known(found.length)]
        wanted = [self._wanted_of(rows, groups[at]) for at in missing]
        fresh = dict(zip(missing, self._prefixes(wanted), strict=True))
        for at, group in enumerate(groups):
            prefix = fresh.get(at)
            if prefix is None or (group.whole and prefix.length):
                first = group.whole[0]
                length = int(found.length[first]) if prefix is None else prefix.length
                prefix = Prefix(length, images=int(sizes[1, first]), patches=int(sizes[2, first]))
            found.share(group, prefix, sizes)
        # Compare at most one of the `whole` rows, because they were compared with each other before.
        of_groups = [np.array(sorted([*group.whole[:1], *group.partial]), np.int64) for group in groups]
        partial = np.array([row for group in groups for row in group.partial], np.int64)
        failed = self._checked(rows, found.key, of_groups, found.length)
        for number, why in enumerate(failed):
            if why is not Alone.NOTHING_SHARED:
                here = partial[(partial >= rows.first[number]) & (partial < rows.first[number + 1])]
                found.length[here], found.cause[here] = 0, why

    def _wanted_of(self, rows: _Rows, group: _Group) -> _Wanted:
        if group.whole:
            return self._wanted(rows, group.key, group.whole[0])
        row, beginning = next(iter(group.partial.items()))
        # Use another key, because a prefix with all media of its rows is remembered without its number of images.
        key = hashlib.blake2b(group.key + b"first media", digest_size=16).digest()
        return self._wanted(rows, key, row, beginning)

    def _groups_by_first_media(self, rows: _Rows, found: _Found) -> list[_Group]:
        """Group rows with several media by those that they begin with, the rows with most media in common first."""
        beginnings = self._beginnings(rows, found)
        if not beginnings:
            return []
        by_depth: dict[int, dict[bytes, list[tuple[int, FirstMedia]]]] = {}
        for row, of_row in beginnings.items():
            for one in of_row:
                by_depth.setdefault(one.num_media, {}).setdefault(rows.key_of(row, one), []).append((row, one))
        # Find the rows that have these media and no others. They may share with each other already.
        keys = {key for of_depth in by_depth.values() for key in of_depth}
        of_key: dict[bytes, list[int]] = {}
        highs = np.frombuffer(b"".join(keys), KEY)["high"]
        could = self._usable(rows) & ((found.length > 0) | (found.cause == Alone.NOTHING_SHARED))
        for row in np.flatnonzero(could & np.isin(found.key["high"], highs)).tolist():
            of_key.setdefault(found.key[row].tobytes(), []).append(row)
        placed: set[int] = set()
        groups = []
        for depth in sorted(by_depth, reverse=True):
            for key, some in by_depth[depth].items():
                partial = {row: one for row, one in some if row not in placed}
                whole = [row for row in of_key.get(key, ()) if row not in placed]
                if partial and len(partial) + len(whole) > 1:
                    groups.append(_Group(key, whole, partial))
                    placed.update(partial)
                    placed.update(whole)
        return groups

    def _beginnings(self, rows: _Rows, found: _Found) -> dict[int, list[FirstMedia]]:
        """Return, by row, the beginnings of rows that share nothing so far but have one of several media in common."""
        fits = self._fits()
        waits = fits & (found.length == 0) & ~np.isin(found.cause, (Alone.DIFFERS, Alone.DRAWS))
        several = [row for row in sorted(rows.first_media) if waits[row]]
        if not several:
            return {}
        in_rows = Counter(one for row in np.flatnonzero(fits).tolist() for one in set(rows.media[row]))
        several = [row for row in several if any(in_rows[one] > 1 for one in rows.media[row])]
        return {row: list(first_media_of(rows.first_media[row])) for row in several}

    # -- the result

    def _shared(self, rows: _Rows, found: _Found) -> list[SharedPrefixes]:
        lengths, length = self._lengths(), found.length
        shares = self._fits() & (length > 0) & (lengths > length)
        key = np.where(shares, np.maximum(found.key["high"], 1), NO_KEY).astype(np.uint64)
        # A row whose partners are all unusable shares nothing.
        _, where, numbers = np.unique(key, return_inverse=True, return_counts=True)
        shares &= numbers[where] > 1
        key[~shares] = NO_KEY
        length = np.where(shares, length, 0).astype(np.int32)
        own_media = None if found.own_media is None else np.where(shares, found.own_media, 0).astype(np.int32)
        cause = self._causes(rows, found.cause, shares)
        return [
            SharedPrefixes(
                key[here],
                length[here],
                counted_causes(cause[here]),
                None if own_media is None or not own_media[:, here].any() else own_media[:, here],
            )
            for here in (slice(*ends) for ends in zip(rows.first, rows.first[1:], strict=False))
        ]

    def _causes(self, rows: _Rows, cause: NDArray[np.uint8], shares: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Return why rows share nothing although another row has one of their media."""
        is_medium = [medium_of(name) is not None for name in rows.names]
        has_length, usable = self._lengths() > 0, self._usable(rows)
        in_rows, in_usable = Counter[int](), Counter[int]()
        of_media = Counter[tuple[int, ...]]()
        for of_row, is_read, is_usable in zip(rows.media, has_length.tolist(), usable.tolist(), strict=True):
            media = {one for one in of_row if is_medium[one]} if is_read else ()
            in_rows.update(media)
            if is_usable:
                in_usable.update(media)
                of_media[of_row] += 1
        found = np.zeros(len(rows), np.uint8)
        for row in np.flatnonzero(~shares & has_length).tolist():
            of_row = rows.media[row]
            media = {one for one in of_row if is_medium[one]}
            if cause[row]:
                found[row] = cause[row] if any(in_rows[one] > 1 for one in media) else 0
            elif usable[row] and any(in_usable[one] > 1 for one in media):
                found[row] = Alone.OTHER_TOKENS if of_media[of_row] > 1 else Alone.OTHER_MEDIA
        return found

    def _results(self, work: Any, tasks: deque[Any], amount: int, of_a_process: int) -> Iterator[Any]:
        most = max(one.encoders.num_processes for one in self._given)
        return forked.results(work, tasks, min(most, len(tasks), max(1, -(-amount // of_a_process))))


def _groups(keys: Keys, usable: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return the groups of two or more usable rows with one key, in the order of their first rows."""
    rows = np.flatnonzero(usable)
    order = rows[np.argsort(keys["high"][rows], kind="stable")]
    starts = np.flatnonzero(np.diff(keys["high"][order], prepend=keys["high"][order[:1]] + np.uint64(1)))
    groups = [group for group in np.split(order, starts[1:]) if len(group) > 1]
    return sorted(groups, key=lambda group: int(group[0]))
