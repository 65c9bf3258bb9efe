"""Encode the rows of a source without a length: a streamed `datasets` data set, webdataset, or any other iterable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import dill  # type: ignore[import-untyped]
from torch.utils.data import get_worker_info

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.shares import EVERYTHING, Share
from swift_vlpack.rows.encoder import RowEncoder, Template, sample_or_error
from swift_vlpack.rows.patches import check_worker, no_worker
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, SampleError, SampleId
from swift_vlpack.rows.source import Row, RowSource

_END: Any = object()
FARTHEST_ROW = 20_000
"""Highest row that is read a second time: a stream has to be read from its start to get there."""


class StreamedRows:
    """Encode the rows of a stream in the order in which they come.

    Every dataloader worker of every rank reads one share of the stream. If the stream has a shard for each share, a
    share reads its own shards. Otherwise it reads all rows and encodes every n-th of them. The k-th row of share s has
    the number `s + k * num_shares`. Without shards that is its place in the stream; with shards it is just unique.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        template: Template | None,
        *,
        name: str = "stream",
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        """Encode rows with this template. `seed` is used for all draws while rows are read and encoded."""
        check_worker()
        self.rows = rows
        self.sources: tuple[RowSource, ...] = ()
        self.template = template
        self.encoder = RowEncoder(template)
        self.name = name
        self.strict = strict
        self._seed = seed

    def __repr__(self) -> str:
        return f"<StreamedRows: {self.name}>"

    def encode_for(self, config: PackingConfig) -> None:
        """Encode rows for a run with these options from now on: mask labels, and cut rows."""
        self.encoder = RowEncoder.of(self.template, config)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the rows with dill, for spawned workers: ms-swift maps a lambda, which pickle refuses."""
        return {**self.__dict__, "rows": dill.dumps(self.rows)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "rows": dill.loads(state["rows"])})

    @property
    def num_shards(self) -> int:
        """Return how many shards the stream has."""
        return int(getattr(self.rows, "num_shards", 1))

    def has_shards_for(self, num_shares: int) -> bool:
        """Tell whether every share can have shards of its own, so that no row is read by two shares."""
        return hasattr(self.rows, "shard") and self.num_shards >= num_shares

    def why_not_again(self, sample_ids: Collection[SampleId]) -> str | None:
        """Say why samples cannot be encoded a second time, as `samples` does for `held`; None if they can."""
        if isinstance(self.rows, Iterator):
            return "the stream cannot be read again"
        farthest = max(sample_id.row for sample_id in sample_ids)
        return None if farthest <= FARTHEST_ROW else f"the stream would have to be read again to row {farthest}"

    def first_rows(self, num_rows: int) -> list[Row]:
        """Return the first rows of epoch 0, not encoded. Returns none of an iterator, which cannot be read again."""
        if isinstance(self.rows, Iterator):
            return []
        # Always read epoch 0: a run that resumes in a later epoch compares these rows with those of the saved run.
        _set_epoch(self.rows, 0)
        return list(islice(_unsplit(self.rows), num_rows))

    def numbers_in(self, share: Share, epoch: int, sample_ids: Collection[SampleId]) -> set[int]:
        """Return the numbers of rows in a share of an epoch, by their ids, for `samples(held=...)`."""
        rows = (sample_id.row for sample_id in sample_ids)
        return {row // share.num_shares for row in rows if row % share.num_shares == share.number}

    def samples(
        self, epoch: int, share: Share = EVERYTHING, *, start: int = 0, held: Collection[int] = ()
    ) -> Iterator[Encoded | SampleError]:
        """Yield the samples of a share of an epoch: its rows with the numbers `held`, and all from `start` on.

        A row that cannot be encoded is yielded as its error. Other rows before `start` are read but not encoded.
        """
        encode = partial(self.encoder.sample, strict=self.strict)
        for index, row in enumerate(self.rows_of(epoch, share)):
            if index >= start or index in held:
                number = share.row(index)
                with RandomStream(self._seed, epoch, self.name, number):
                    sample = sample_or_error(encode, row, SampleId(self.name, number))
                yield sample

    def rows_of(self, epoch: int, share: Share) -> Iterator[Row]:
        """Yield the share's rows of an epoch, not encoded, with the random numbers by which a loader shuffles."""
        reading = RandomStream(self._seed, epoch, self.name, *share)
        rows = self._in_order(epoch, share)
        while True:
            # Enter and leave the stream for each row, because training draws from the process's states in between.
            with reading:
                row = next(rows, _END)
            if row is _END:
                return
            yield row

    def _in_order(self, epoch: int, share: Share) -> Iterator[Row]:
        number, num_shares = share
        _set_epoch(self.rows, epoch)
        if num_shares == 1 or not self.has_shards_for(num_shares):
            return islice(_unsplit(self.rows), number, None, num_shares)
        shard: Any = self.rows.shard(num_shards=num_shares, index=number)  # type: ignore[attr-defined]
        # The shard is another object, which may not inherit the stream's epoch.
        _set_epoch(shard, epoch)
        return _unsplit(shard)


def _set_epoch(rows: Any, epoch: int) -> None:
    """Set the epoch of a stream, which decides how `datasets` shuffles. Other iterables have no `set_epoch`."""
    if hasattr(rows, "set_epoch"):
        rows.set_epoch(epoch)


def _unsplit(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield all rows, even of an iterable that divides its rows among dataloader workers by itself.

    The rows are divided into shares already. `IterableDataset` of `datasets` would divide them once more, and give the
    only shard of a stream to worker 0 and nothing to the others.
    """
    if get_worker_info() is None:
        yield from rows
        return
    with no_worker():
        iterator = iter(rows)
    while True:
        with no_worker():  # only while the row is read, because the caller has to see its worker
            row = next(iterator, _END)
        if row is _END:
            return
        yield row
