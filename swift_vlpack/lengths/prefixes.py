"""Find the prefixes that rows share, before training and without pixels.

The pass has four steps. In each step every rank works on its share of the rows, and all ranks get the same result:

1. Read the head of every row (`rows/prefixes.py`).
2. Group the rows of all sources by the keys of their heads. A group of two or more rows has a prefix.
3. Encode one row of each group by header, to count the tokens of its prefix. This is remembered next to the lengths.
4. Encode some rows of each source in full, to see that the prefix is the same in every row of a group.

A row may share with no other row although another row has its medium. Such rows are counted by cause, and the log says
for each cause what a user can do.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
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
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.plan.units import NO_KEY
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import MediaTokens, refuse_sharing
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.media import image_urls
from swift_vlpack.rows.prefixes import Head, HeadReader, how_prefixes_differ, prefix_of
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


def with_prefixes(
    given: Sequence[SourceToShare], packing_length: int, comm: Comm = ALONE, *, is_shown: bool = False
) -> list[RowSource]:
    """Return the sources with the prefixes that their rows share, and log how many rows share. All ranks must call it.

    `is_shown` shows a progress bar.
    """
    with Progress(is_shown=is_shown) as progress:
        found = _PrefixPass(given, packing_length, comm, progress).found()
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
    return rows.with_sources(with_prefixes(given, config.packing_length))


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
            f"source {source.name}: {counted(alone.num_rows, 'row')} with a medium that other rows have too, trained "
            f"alone: they {alone.cause.text} (such as {source.where(alone.example)}); {alone.cause.way_out}"
        )


# -- heads of all rows ------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """The heads of some rows of a source, in arrays."""

    indices: NDArray[np.int64]
    keys: Keys
    """The key of each row; zeros for a row that cannot share."""
    all_media: Keys
    """A digest of all media of each row."""
    num_media: NDArray[np.int64]
    media: Keys
    """The digests of the different media of each row, one row after the other."""


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
        return _heads(task.indices, [reader.head(row) for row in rows_at(source.rows, task.indices.tolist())])


def _heads(indices: NDArray[np.int64], heads: Sequence[Head]) -> Heads:
    media = [[*dict.fromkeys(head.media)] for head in heads]
    return Heads(
        indices,
        np.frombuffer(b"".join(head.key or bytes(KEY.itemsize) for head in heads), KEY),
        np.frombuffer(b"".join(_digest(b"".join(head.media)) for head in heads), KEY),
        np.array(list(map(len, media)), np.int64),
        np.frombuffer(b"".join(medium for of_row in media for medium in of_row), KEY),
    )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY.itemsize).digest()


class _Rows:
    """The heads of all rows of all sources: one number for every row."""

    def __init__(self, sources: Sequence[RowSource], of_tasks: Sequence[tuple[int, Heads]]) -> None:
        self.first = np.cumsum([0, *(len(source.rows) for source in sources)])
        self.keys = np.zeros(int(self.first[-1]), KEY)
        self._all_media = np.zeros(len(self.keys), KEY)
        rows, media = [np.zeros(0, np.int64)], [np.zeros(0, KEY)]
        for source, heads in of_tasks:
            here = heads.indices + self.first[source]
            self.keys[here], self._all_media[here] = heads.keys, heads.all_media
            rows.append(np.repeat(here, heads.num_media))
            media.append(heads.media)
        self._row, self._medium = np.concatenate(rows), np.concatenate(media)["high"]  # of each medium in a row

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def has_key(self) -> NDArray[np.bool_]:
        """Mark the rows that can share with a row of the same key."""
        return np.asarray(self.keys["high"] != 0)

    def have_medium_in_common(self, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mark the rows `among` these with a medium that another of them has."""
        inside = among[self._row]
        found = np.zeros(len(self), bool)
        found[self._row[inside][_is_repeated(self._medium[inside])]] = True
        return found

    def have_all_media_in_common(self, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mark the rows `among` these with exactly the media of another of them."""
        found = np.zeros(len(self), bool)
        found[among] = _is_repeated(self._all_media["high"][among])
        return found


def _is_repeated(values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    _, where, numbers = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray(numbers[where] > 1)


# -- lengths of prefixes ----------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """A prefix whose length is needed, with one of its rows."""

    key: bytes
    """The key under which its length is remembered."""
    source: int
    row_index: int


class _GroupWork:
    """Counts the tokens of prefixes; 0 for one that cannot be shared, None for one that could not be encoded."""

    def __init__(self, given: Sequence[SourceToShare]) -> None:
        self._given = given

    @cached_property
    def _tokens(self) -> list[MediaTokens]:
        return [MediaTokens.of(one.encoders.in_full.template) for one in self._given]

    def __call__(self, task: list[_Wanted]) -> list[int | None]:
        self._fetch(task)
        return [self._length(one) for one in task]

    def _fetch(self, task: list[_Wanted]) -> None:
        """Fetch the images that rows name by URL, side by side."""
        for number, one in enumerate(self._given):
            if (urls := one.encoders.urls) is not None:
                rows = (one.source.row(asked.row_index) for asked in task if asked.source == number)
                urls.forget()
                urls.read((url for row in rows for url in image_urls(row)), whole=one.encoder is one.encoders.in_full)

    def _length(self, wanted: _Wanted) -> int | None:
        one = self._given[wanted.source]
        row, sample_id = one.source.row(wanted.row_index), one.source.sample_id(wanted.row_index)
        for encoder in (one.encoder, one.encoders.in_full):  # the header may give no size
            with suppress(SampleError):
                return prefix_of(encoder.sample(row, sample_id), self._tokens[wanted.source])
        return None


class _PrefixFile:
    """Remembers numbers by key, in records of the same form as lengths."""

    def __init__(self, lengths_path: Path | None) -> None:
        self._file = None if lengths_path is None else LengthFile(lengths_path.with_suffix(PREFIXES))
        records: Records = np.zeros(0, KEYED_SIZE) if self._file is None else self._file.load()
        keys = (key.tobytes() for key in records["key"])
        self._known = dict(zip(keys, records["size"]["length"].tolist(), strict=True))

    def get(self, key: bytes) -> int | None:
        return self._known.get(key)

    def save(self, found: dict[bytes, int | None]) -> None:
        # A row that could not be encoded may be encoded at the next start.
        lasting = {key: number for key, number in found.items() if number is not None}
        if self._file is None or not lasting:
            return
        records = np.zeros(len(lasting), KEYED_SIZE)
        records["key"] = np.frombuffer(b"".join(lasting), KEY)
        records["size"]["length"] = list(lasting.values())
        self._file.append(records)


# -- the pass ---------------------------------------------------------------------------------------------------------


class _PrefixPass:
    def __init__(self, given: Sequence[SourceToShare], packing_length: int, comm: Comm, progress: Progress) -> None:
        self._given = given
        self._comm = comm
        self._progress = progress
        self._files = [_PrefixFile(one.lengths_path) for one in given]
        found = [one.source.sizes.lengths for one in given if one.source.sizes is not None]
        self._lengths = np.concatenate([np.zeros(0, np.int64), *found])
        self._fits = (self._lengths > 0) & (self._lengths < packing_length)

    def found(self) -> list[SharedPrefixes]:
        """Do all steps. Returns the prefixes of each source."""
        rows = self._rows()
        usable = rows.has_key & self._fits
        # The numbers of all rows in their order, so that the first row of a group is the same at every start.
        of_groups = _groups(rows.keys, usable)
        prefix = np.zeros(len(rows), np.int32)
        cannot = ~usable
        for members, length in zip(of_groups, self._lengths_of_prefixes(rows, of_groups), strict=True):
            prefix[members] = length
            cannot[members] = not length
        for number, is_same in enumerate(self._checked(rows, of_groups, prefix)):
            if not is_same:
                here = slice(rows.first[number], rows.first[number + 1])
                prefix[here], cannot[here] = 0, True
        shares = (prefix > 0) & (self._lengths > prefix)
        # A row whose partners have no token after the prefix shares nothing.
        shares[shares] = _is_repeated(rows.keys["high"][shares])
        key = np.where(shares, rows.keys["high"], NO_KEY)
        prefix[~shares] = 0
        cause = self._causes(rows, shares, usable, cannot)
        return [
            SharedPrefixes(key[here], prefix[here], counted_causes(cause[here]))
            for here in (slice(*ends) for ends in pairwise(rows.first))
        ]

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

        return _Rows(sources, [task for of_rank in self._comm.results_of_all(of_this_rank) for task in of_rank])

    # -- how many tokens a group shares

    def _lengths_of_prefixes(self, rows: _Rows, of_groups: Sequence[NDArray[np.int64]]) -> list[int]:
        firsts = [int(members[0]) for members in of_groups]
        wanted = [_Wanted(rows.keys[row].tobytes(), *self._place(rows, row)) for row in firsts]

        def measured(mine: list[int]) -> Iterator[dict[int, int | None]]:
            tasks = deque(
                [wanted[at] for at in mine[start : start + _GROUPS_OF_TASK]]
                for start in range(0, len(mine), _GROUPS_OF_TASK)
            )
            places = iter(mine)
            with self._progress.stage("Lengths of prefixes", len(mine)) as bar:
                for some in self._results(_GroupWork(self._given), tasks, len(mine), _NUM_GROUPS_WORTH_A_PROCESS):
                    yield {next(places): length for length in some}
                    bar.update(len(some))

        return [length or 0 for length in self._numbers([(one.key, one.source) for one in wanted], measured)]

    def _numbers(
        self, wanted: Sequence[tuple[bytes, int]], found: Callable[[list[int]], Iterator[dict[int, int | None]]]
    ) -> list[int | None]:
        """Return the number of each key of a source. Each rank finds and remembers some of the unknown ones."""
        known = self._comm.results_of_all(lambda: [self._files[source].get(key) for key, source in wanted])[0]
        missing = [at for at, number in enumerate(known) if number is None]

        def of_this_rank() -> dict[int, int | None]:
            of_rank: dict[int, int | None] = {}
            for some in found(missing[self._comm.rank :: self._comm.num_ranks]):
                of_rank |= some
                for source in {wanted[at][1] for at in some}:
                    of_source = {wanted[at][0]: number for at, number in some.items() if wanted[at][1] == source}
                    self._files[source].save(of_source)
            return of_rank

        for of_rank in self._comm.results_of_all(of_this_rank):
            for at, number in of_rank.items():
                known[at] = number
        return known

    def _place(self, rows: _Rows, row: int) -> tuple[int, int]:
        source = int(np.searchsorted(rows.first, row, side="right")) - 1
        return source, row - int(rows.first[source])

    # -- whether rows that look equal are

    def _checked(self, rows: _Rows, of_groups: Sequence[NDArray[np.int64]], prefix: NDArray[np.int32]) -> list[bool]:
        """Encode two rows of some groups of each source in full. Returns, for each source, whether all are equal."""
        pairs = [pair for number in range(len(self._given)) for pair in self._pairs(rows, of_groups, prefix, number)]
        wanted = [(self._check_key(rows, one, other), source) for source, one, other in pairs]

        def compared(mine: list[int]) -> Iterator[dict[int, int | None]]:
            for at in mine:
                _, one, other = pairs[at]
                yield {at: self._is_same(rows, one, other, int(prefix[one]))}

        of_pairs = zip(pairs, self._numbers(wanted, compared), strict=True)
        differing = {source for (source, *_), is_same in of_pairs if is_same == 0}
        return [number not in differing for number in range(len(self._given))]

    def _pairs(
        self, rows: _Rows, of_groups: Sequence[NDArray[np.int64]], prefix: NDArray[np.int32], number: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield two rows of some groups, spread over a source."""
        here, end = rows.first[number], rows.first[number + 1]
        of_source = [
            (int(inside[0]), int(members[-1] if members[-1] != inside[0] else members[0]))
            for members in of_groups
            if prefix[members[0]] and len(inside := members[(members >= here) & (members < end)])
        ]
        spread = np.unique(np.linspace(0, max(0, len(of_source) - 1), NUM_GROUPS_CHECKED).astype(np.int64))
        for at in spread.tolist() if of_source else ():
            yield number, *of_source[at]

    def _check_key(self, rows: _Rows, one: int, other: int) -> bytes:
        names = [self._given[source].source.sample_id(index) for source, index in
                 (self._place(rows, one), self._place(rows, other))]  # fmt: skip
        return _digest(rows.keys[one].tobytes() + repr(names).encode())

    def _is_same(self, rows: _Rows, one: int, other: int, prefix: int) -> int | None:
        """Return 1 if two rows have the same prefix, 0 if not, None if one of them cannot be encoded now."""
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
                    return None
            if stream.has_drawn:
                return 0
        return int(how_prefixes_differ(samples[0], samples[1], prefix) is None)

    # -- the result

    def _causes(
        self, rows: _Rows, shares: NDArray[np.bool_], usable: NDArray[np.bool_], cannot: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Return why rows share nothing although another row has one of their media."""
        is_read = self._lengths > 0
        cause = np.zeros(len(rows), np.uint8)
        cause[rows.have_medium_in_common(usable)] = Alone.OTHER_MEDIA
        cause[rows.have_all_media_in_common(usable)] = Alone.OTHER_TOKENS
        cause[cannot] = np.where(rows.have_medium_in_common(is_read), Alone.CANNOT, Alone.NOTHING_SHARED)[cannot]
        cause[shares] = Alone.NOTHING_SHARED
        return cause

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
