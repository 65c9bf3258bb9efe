"""Mix sources by ratio: the order of one epoch as a pure function of (seed, epoch, sizes, ratios).

>>> order = schedule([Source("captions", 4, 0.5), Source("ocr", 2, 1.5)], seed=0, epoch=0)
>>> order.num_rows_per_source
(2, 3)

Every row of every source draws a random key from the stream that belongs to (seed, source name, epoch). The keys
decide which rows are drawn and where they stand, so adding a source changes neither the draws of the others nor
their order among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.shuffle import permutation, sort_keys
from swift_vlpack.plan.token_shares import draw_by_tokens

RATIOS_BY = ("rows", "tokens")


class Source(NamedTuple):
    """A data set in the mix: `round(num_rows * ratio)` of its rows are delivered in every epoch, or, by tokens, its
    ratio's part of all tokens."""

    name: str
    num_rows: int
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The order of one epoch: entry i is row `row[i]` of source number `source[i]`."""

    names: tuple[str, ...]
    source: NDArray[np.int32]  # (num_entries,)
    row: NDArray[np.int64]  # (num_entries,)

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(self.source[index]), int(self.row[index])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.source.tolist(), self.row.tolist(), strict=True)

    @property
    def num_rows_per_source(self) -> tuple[int, ...]:
        """Rows delivered, per source in the order of `names`."""
        return tuple(np.bincount(self.source, minlength=len(self.names)).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix:
    """How sources take part in every epoch: all that its schedule follows from, beside its number."""

    sources: tuple[Source, ...]
    """`num_rows` are those that take part."""
    rows: tuple[NDArray[np.int64] | None, ...]
    """Of each source the rows that take part; None where all do."""
    seed: int = 0
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Of sources that have one of their own, in place of the run's."""
    shuffle: bool = True
    ratio_by: str = "rows"
    """What the ratios count: `rows` of each source by itself, or the `tokens` of the epoch that each source gets."""

    def __post_init__(self) -> None:
        _check(self.sources)
        if self.ratio_by not in RATIOS_BY:
            raise ConfigError(f"ratio_by must be one of {', '.join(RATIOS_BY)}, got {self.ratio_by!r}")

    def schedule(
        self,
        epoch: int,
        usable: Sequence[NDArray[np.bool_]] | None = None,
        lengths: Sequence[NDArray[np.integer[Any]]] | None = None,
    ) -> Schedule:
        """The order of an epoch, in rows of the sources.

        `usable` and `lengths` say of all of their rows which can be trained, and how many tokens each has.
        """
        known = {} if usable is None else self._of_those_that_take_part(usable)
        if self.ratio_by == "tokens":
            drawn = self._schedule_by_tokens(epoch, known, lengths)
        else:
            drawn = schedule(
                self.sources, seed=self.seed, epoch=epoch, seeds=self.seeds, shuffle=self.shuffle, usable=known
            )
        rows = drawn.row.copy()
        for number, some in enumerate(self.rows):
            if some is not None:
                here = drawn.source == number
                rows[here] = some[rows[here]]
        return replace(drawn, row=rows)

    def _schedule_by_tokens(
        self, epoch: int, usable: Mapping[str, NDArray[Any]], lengths: Sequence[NDArray[Any]] | None
    ) -> Schedule:
        if lengths is None:
            raise ConfigError(
                "ratio_by: tokens needs the length of every row before the epoch begins, which packing_mode=buffer "
                "does not have; use packing_mode=plan, or ratio_by: rows"
            )
        num_tokens = self._of_those_that_take_part(lengths)
        # What cannot be trained counts for nothing; it is drawn beside the rest, and counted as left out.
        counted = [num_tokens[source.name] * usable.get(source.name, True) for source in self.sources]
        seeds = [self.seeds.get(source.name, self.seed) for source in self.sources]
        return _mixed(self.sources, draw_by_tokens(self.sources, counted, seeds, epoch), seeds, epoch, self.shuffle)

    def _of_those_that_take_part(self, facts: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        # Facts are about all rows of the source; a source that is limited draws among fewer, numbered anew.
        each = zip(self.sources, self.rows, facts, strict=True)
        return {source.name: fact if some is None else fact[some] for source, some, fact in each}


def schedule(
    sources: Sequence[Source | tuple[str, int] | tuple[str, int, float]],
    *,
    seed: int,
    epoch: int,
    seeds: Mapping[str, int] | None = None,
    shuffle: bool = True,
    usable: Mapping[str, NDArray[np.bool_]] | None = None,
) -> Schedule:
    """Draw `round(num_rows * ratio)` rows of each source and mix them.

    `usable` says of single sources which rows can be trained: then so many are drawn that `round(num_usable * ratio)`
    of them can be, the same number in every epoch. Rows between them that cannot be are drawn as well, to be counted.
    Up to ratio 1 the draw is without replacement. Beyond it every row comes floor(ratio) times, and the rest is drawn
    without replacement. Ratio 0 leaves a source out. `seeds` gives single sources a seed of their own.
    Without `shuffle` the sources follow one another, each in the order of its rows.
    """
    checked = [Source(*source) for source in sources]
    _check(checked)
    own_seeds = [(seeds or {}).get(source.name, seed) for source in checked]
    drawn = [
        _draw(source, own_seed, epoch, (usable or {}).get(source.name))
        for source, own_seed in zip(checked, own_seeds, strict=True)
    ]
    return _mixed(checked, drawn, own_seeds, epoch, shuffle)


def _mixed(
    sources: Sequence[Source], drawn: Sequence[NDArray[np.int64]], seeds: Sequence[int], epoch: int, shuffle: bool
) -> Schedule:
    """The drawn rows of all sources in one order."""
    # Without shuffling the files' own order, but which rows are drawn stays as it was drawn.
    rows = [some if shuffle else np.sort(some, kind="stable") for some in drawn]
    # By name and not by number, so that sources before this one may come or go.
    keys = [
        sort_keys(len(some), seed, source.name, epoch, "order")
        for source, seed, some in zip(sources, seeds, rows, strict=True)
    ]
    order = np.argsort(np.concatenate(keys), kind="stable") if keys and shuffle else slice(None)
    numbers = np.repeat(np.arange(len(sources), dtype=np.int32), [len(some) for some in rows])
    merged = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
    return Schedule(tuple(source.name for source in sources), numbers[order], merged[order])


def _draw(source: Source, seed: int, epoch: int, usable: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    num_rows = source.num_rows if usable is None or not usable.any() else int(usable.sum())
    num_times, num_more = divmod(round(num_rows * source.ratio), max(1, num_rows))
    everything = np.tile(np.arange(source.num_rows, dtype=np.int64), num_times)
    if num_more == 0:
        return everything
    order = permutation(source.num_rows, seed, source.name, epoch, "draw")
    if num_rows < source.num_rows and usable is not None:  # behind the last one that is needed
        num_more = int(np.searchsorted(np.cumsum(usable[order]), num_more)) + 1
    return np.concatenate((everything, order[:num_more]))


def _check(sources: Sequence[Source]) -> None:
    names = [source.name for source in sources]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two sources are named {duplicates[0]!r}; give each a name of its own")
    for name, num_rows, ratio in sources:
        if not math.isfinite(ratio) or ratio < 0:
            raise DataError(f"source {name!r}: ratio must be 0 or more, got {ratio}")
        if num_rows < 0 or (num_rows == 0 and ratio > 0):
            raise DataError(f"source {name!r} has no rows; remove it or set its ratio to 0")
