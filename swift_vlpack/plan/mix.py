"""Mix sources by ratio: draw the rows of one epoch and put them in order, from (seed, epoch, sizes, ratios) alone.

>>> order = schedule([Source("captions", 4, 0.5), Source("ocr", 2, 1.5)], seed=0, epoch=0)
>>> order.num_rows_per_source
(2, 3)

Every row of every source gets a random key from the stream that belongs to (seed, source name, epoch). The keys decide
which rows are drawn, and their order. So a new source changes neither the drawn rows of other sources nor the order
among them.

With `ratio_by: tokens`, an epoch has as many tokens as all sources together. A source gets its ratio, divided by the
sum of all ratios, of these tokens. So a small source with a large ratio is repeated, and of a large source with a small
ratio a part is drawn, with other rows in every epoch.

>>> token_targets([1000, 3000], [1, 1])
[2000, 2000]
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

RATIOS_BY = ("rows", "tokens")


class Source(NamedTuple):
    """A data set in the mix: every epoch has `round(num_rows * ratio)` of its rows, or its share of all tokens."""

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
        """Count the rows of each source, in the order of `names`."""
        return tuple(np.bincount(self.source, minlength=len(self.names)).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix:
    """Everything that decides the schedule of an epoch, other than the number of the epoch."""

    sources: tuple[Source, ...]
    """The sources; their `num_rows` is the number of rows that take part."""
    rows: tuple[NDArray[np.int64] | None, ...]
    """The rows of each source that take part; None for all of them."""
    seed: int = 0
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Seeds by name, of sources that have their own seed in place of the run's."""
    shuffle: bool = True
    ratio_by: str = "rows"
    """Meaning of ratios: a share of the `rows` of a source, or a share of the `tokens` of an epoch."""

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
        """Return the order of an epoch, in rows of the sources.

        For all rows of each source, `usable` tells which can be trained, and `lengths` has the tokens.
        """
        known = {} if usable is None else self._of_rows_that_take_part(usable)
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
        num_tokens = self._of_rows_that_take_part(lengths)
        # Rows that cannot be trained count 0 tokens. They are drawn like other rows, and counted as left out.
        counted = [num_tokens[source.name] * usable.get(source.name, True) for source in self.sources]
        seeds = [self.seeds.get(source.name, self.seed) for source in self.sources]
        return _mixed(self.sources, draw_by_tokens(self.sources, counted, seeds, epoch), seeds, epoch, self.shuffle)

    def _of_rows_that_take_part(self, facts: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        # `facts` covers all rows of a source, but a limited source draws from fewer rows, which it numbers from 0.
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

    Up to ratio 1, rows are drawn without replacement. Above 1, every row comes floor(ratio) times, and the rest is
    drawn without replacement. Ratio 0 leaves a source out. `seeds` gives single sources a seed of their own. Without
    `shuffle`, the sources follow one another, each in the order of its rows.

    `usable` tells for single sources which rows can be trained. Then `round(num_usable * ratio)` usable rows are drawn,
    the same number in every epoch. Unusable rows among them are drawn as well, so that they are counted.
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
    """Put the drawn rows of all sources into one order."""
    # `shuffle` changes only the order, never the choice of rows.
    rows = [some if shuffle else np.sort(some, kind="stable") for some in drawn]
    # Seed keys with the name of a source and not with its number, so that sources before it may come or go.
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
    if num_rows < source.num_rows and usable is not None:  # take rows until enough usable ones are among them
        num_more = int(np.searchsorted(np.cumsum(usable[order]), num_more)) + 1
    return np.concatenate((everything, order[:num_more]))


def token_targets(num_tokens: Sequence[int], ratios: Sequence[float]) -> list[int]:
    """Return how many tokens of each source an epoch should have. `num_tokens` is how many each source has."""
    # A source without tokens can give none, so the other sources share its part.
    weights = [ratio if tokens else 0.0 for tokens, ratio in zip(num_tokens, ratios, strict=True)]
    total = sum(tokens for tokens, weight in zip(num_tokens, weights, strict=True) if weight)
    return [round(total * weight / sum(weights)) if weight else 0 for weight in weights]


def draw_by_tokens(
    sources: Sequence[Source], lengths: Sequence[NDArray[np.integer[Any]]], seeds: Sequence[int], epoch: int
) -> list[NDArray[np.int64]]:
    """Draw the rows of each source, as row numbers. `lengths` is 0 for rows that cannot be trained."""
    targets = token_targets([int(own.sum()) for own in lengths], [source.ratio for source in sources])
    return [
        _draw_tokens(own, target, permutation(len(own), seed, source.name, epoch, "draw"))
        if target or not source.ratio
        else np.arange(len(own), dtype=np.int64)  # no row can be trained: draw all, so that they are counted
        for source, own, target, seed in zip(sources, lengths, targets, seeds, strict=True)
    ]


def _draw_tokens(lengths: NDArray[np.integer[Any]], target: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Take all rows as often as they fit completely, then rows in drawn order up to the closest sum."""
    num_times, rest = divmod(target, max(1, int(lengths.sum())))
    everything = np.tile(np.arange(len(lengths), dtype=np.int64), num_times)
    return np.concatenate((everything, order[: _num_closest(lengths[order], rest)]))


def _num_closest(lengths: NDArray[np.integer[Any]], num_tokens: int) -> int:
    """Return the number of first rows whose sum is closest to `num_tokens`; of two equally close, the smaller.

    >>> [_num_closest(np.array([5, 4, 3]), tokens) for tokens in (0, 2, 3, 7, 8, 12)]
    [0, 0, 1, 1, 2, 3]
    """
    if num_tokens == 0:
        return 0
    sums = np.cumsum(lengths, dtype=np.int64)
    at = int(np.searchsorted(sums, num_tokens))  # the row with which the sum reaches it
    before = int(sums[at - 1]) if at else 0
    return at + 1 if int(sums[at]) - num_tokens < num_tokens - before else at


def _check(sources: Sequence[Source]) -> None:
    names = [source.name for source in sources]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two sources are named {duplicates[0]!r}; give each a name of its own")
    for name, num_rows, ratio in sources:
        if not math.isfinite(ratio) or ratio < 0:
            raise DataError(f"source {name!r}: ratio must be 0 or more, got {ratio}")
        if num_rows < 0 or (num_rows == 0 and ratio > 0):
            raise DataError(f"source {name!r} has no rows; remove it or set its ratio to 0")
