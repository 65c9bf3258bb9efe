"""Find out from ms-swift's own sampler which rows un-packed training puts into which batch.

The installed `BatchSamplerShard` runs once for each rank, up to its `len()`, where the trainer's loop ends. So the
order of an epoch is what the installed version of ms-swift trains, without a copy of its rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from swift.dataloader import BatchSamplerShard

from swift_vlpack.plan.same_steps import UnpackedRows, UnpackedStep
from swift_vlpack.rows.source import RowSource


def unpacked_rows(args: Any, sources: Sequence[RowSource], *, deletes_failing: bool) -> UnpackedRows | None:
    """Describe the rows that plain `swift sft` with the same flags draws from; None if it has no such run.

    `deletes_failing`: plain `swift sft` deletes rows that cannot be encoded, but keeps those of a cached data set,
    because it does not encode them again before it draws.
    """
    places = [source.places for source in sources if source.places is not None]
    if len(places) < len(sources):  # a fusion_config
        return None
    source_of = np.zeros(sum(map(len, places)), dtype=np.int32)
    row_of, cached = (np.zeros(len(source_of), dtype=np.int64) for _ in range(2))
    is_deleted = np.full(len(source_of), deletes_failing)
    for number, (here, source) in enumerate(zip(places, sources, strict=True)):
        source_of[here], row_of[here] = number, np.arange(len(here))
        if source.cached_lengths is not None:
            cached[here], is_deleted[here] = source.cached_lengths, False
    options = {
        "shuffle": args.train_dataloader_shuffle,
        "drop_last": args.training_args.dataloader_drop_last,
        "data_seed": args.data_seed,
        "group_by_length": args.group_by_length,
    }
    batches = partial(batches_of_epoch, options)
    return UnpackedRows(
        source=source_of, row=row_of, is_deleted_if_failing=is_deleted, lengths_of_cache=cached, batches=batches
    )


def batches_of_epoch(
    options: Mapping[str, Any], epoch: int, lengths: NDArray[np.integer[Any]], size: UnpackedStep
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the rows of an epoch in the order of their batches, and the number of the batch of each row.

    Batches count through the ranks: the first of every rank, the second of every rank, and so on.

    >>> options = {"shuffle": False, "drop_last": False, "data_seed": 0, "group_by_length": False}
    >>> size = UnpackedStep(batch_size=2, accumulation=1, num_ranks=2)
    >>> order, batch = batches_of_epoch(options, 0, np.ones(7, dtype=np.int32), size)
    >>> order.tolist(), batch.tolist()  # the seventh row is left out: 7 // 2 rows a rank
    ([0, 2, 1, 3, 4, 5], [0, 0, 1, 1, 2, 3])
    """
    rows: list[int] = []
    numbers: list[int] = []
    for rank in range(size.num_ranks):
        sampler = _SamplerOfRank(rank, size, lengths, options)
        sampler.set_epoch(epoch)
        for count, batch in enumerate(islice(sampler, len(sampler))):
            rows.extend(batch)
            numbers.extend([count * size.num_ranks + rank] * len(batch))
    order = np.argsort(np.array(numbers, dtype=np.int64), kind="stable")
    return np.array(rows, dtype=np.int64)[order], np.array(numbers, dtype=np.int32)[order]


class _SamplerOfRank(BatchSamplerShard):
    """The installed sampler of one rank of an un-packed run."""

    rank = 0
    world_size = 1

    def __init__(
        self, rank: int, size: UnpackedStep, lengths: NDArray[np.integer[Any]], options: Mapping[str, Any]
    ) -> None:
        self.rank, self.world_size = rank, size.num_ranks
        if options["group_by_length"]:
            options = {**options, "lengths": lengths.tolist()}
        super().__init__(len(lengths), size.batch_size, **options)
