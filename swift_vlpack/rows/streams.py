"""Rows without a length: `IterableDataset` of `datasets`, webdataset-like pipelines, any other iterable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import count, islice
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


class StreamedRows:
    """Rows without a length, encoded in the order in which they come.

    A share is read from shards of its own where the stream has enough of them; otherwise by reading every row and
    encoding every n-th. A row's number is its place in the stream, or, where shards are read, a number that no other
    row has: the k-th row of share s is number `s + k * num_shares`.
    """

    def __init__(self, rows: Iterable[Row], template: Template, *, name: str = "stream", strict: bool = False) -> None:
        check_worker()
        self.rows = rows
        self.sources: tuple[RowSource, ...] = ()
        self.template = template
        self.encoder = RowEncoder(template)
        self.name = name
        self.strict = strict
        self.seed = 0
        """Of what is drawn while rows are read and encoded."""

    def __repr__(self) -> str:
        return f"<StreamedRows: {self.name}>"

    def encode_for(self, config: PackingConfig) -> None:
        """Encode rows as a run with these options wants them, from now on."""
        self.encoder = RowEncoder.of(self.template, config)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers. ms-swift maps a lambda over the rows of a stream, which pickle itself refuses."""
        return {**self.__dict__, "rows": dill.dumps(self.rows)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "rows": dill.loads(state["rows"])})

    def has_shards_for(self, num_shares: int) -> bool:
        """Whether every share can have shards of its own, so that nobody reads another's rows."""
        return hasattr(self.rows, "shard") and getattr(self.rows, "num_shards", 1) >= num_shares

    def first_rows(self, num_rows: int) -> list[Row]:
        """What the stream begins with in epoch 0, unencoded; nothing of an iterator, which cannot be read again."""
        if isinstance(self.rows, Iterator):
            return []
        # Of the first epoch, whichever a run is resumed in: its fingerprint has to be of the same rows.
        _set_epoch(self.rows, 0)
        return list(islice(_unsplit(self.rows), num_rows))

    def samples(
        self, epoch: int, share: Share = EVERYTHING, *, start: int = 0, held: Collection[int] = ()
    ) -> Iterator[Encoded | SampleError]:
        """The share's rows of an epoch: those of the numbers `held`, then all from the `start`-th on.

        Each is the sample, or why there is none. Rows before `start` are read past, not encoded.
        """
        reading = RandomStream(self.seed, epoch, self.name, *share)
        rows = self.rows_of(epoch, share)
        for index in count():
            # Entered for each row anew: between two rows whoever trains draws from the states of the process.
            with reading:
                row = next(rows, _END)
            if row is _END:
                return
            if index >= start or index in held:
                with RandomStream(self.seed, epoch, self.name, share.row(index)):
                    sample = sample_or_error(self._encode, row, SampleId(self.name, share.row(index)))
                yield sample

    def rows_of(self, epoch: int, share: Share) -> Iterator[Row]:
        """The share's rows of an epoch as they are read."""
        number, num_shares = share
        _set_epoch(self.rows, epoch)  # of the stream, if it wants to know
        if num_shares == 1 or not self.has_shards_for(num_shares):
            return islice(_unsplit(self.rows), number, None, num_shares)
        shard: Any = self.rows.shard(num_shards=num_shares, index=number)  # type: ignore[attr-defined]
        # Another object, which need not have taken over the epoch of the stream.
        _set_epoch(shard, epoch)
        return _unsplit(shard)

    def _encode(self, row: Row, sample_id: SampleId) -> Encoded:
        return self.encoder.sample(row, sample_id, strict=self.strict)


def _set_epoch(rows: Any, epoch: int) -> None:
    if hasattr(rows, "set_epoch"):
        rows.set_epoch(epoch)


def _unsplit(rows: Iterable[Row]) -> Iterator[Row]:
    """All rows, also from an iterable that splits itself among dataloader workers: shares are dealt out here.

    `IterableDataset` of `datasets`, for one, gives the only shard of a stream to worker 0 and nothing to the others.
    """
    if get_worker_info() is None:
        yield from rows
        return
    with no_worker():
        iterator = iter(rows)
    while True:
        with no_worker():  # for each row, so that whoever takes it is in its worker again
            row = next(iterator, _END)
        if row is _END:
            return
        yield row
