"""Define `Packs`, the base of planned and streamed packs: rows, options, and the number of the present epoch.

`PlannedPackingDataset` (planned.py) knows every pack of an epoch ahead of time, `StreamedPackingDataset` (streamed.py)
makes packs as rows come. The proof and the commands that look at packs need only what `Packs` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from swift_vlpack.attention.prepare import check_ready, refuse_flat_attention
from swift_vlpack.config import PACKS, PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.feed.units import SHARED
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.items import is_single_long
from swift_vlpack.rows.contents import OWN, size_of
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Encoded, LeftOut, PackedSamples, PackRecord
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows


class Packs:
    """Rows that are packed epoch by epoch. The number of the epoch is stored here and nowhere else."""

    def __init__(
        self,
        dataset: Any,
        template: Template | None,
        config: PackingConfig,
        *,
        seed: int = 0,
        num_ranks: int = 1,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.dataset: Any = rows_of(dataset, template, seed, lengths)
        """The rows: a `FusionCaptionDataset` or `StreamedRows`."""
        make_packing(template, self.dataset, config)
        self.template = template
        self.config = config
        self.seed = seed
        self.num_ranks = num_ranks
        is_asked = config.effective_batch_size is not None and config.packing_batch == PACKS
        self.accumulation = config.accumulation(num_ranks) if is_asked else 1
        """Packs that each rank accumulates for an optimizer step, as `effective_batch_size` asks; else 1."""
        # Keep it in shared memory: persistent dataloader workers have the data set as it was when they were started.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """Return the epoch that was set last, also in a dataloader worker that was started before it was set."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Mix the sources and pack for another epoch. Persistent dataloader workers see the change."""
        self._epoch[0] = epoch

    @property
    def epoch_plan(self) -> EpochPlan | None:
        """Return the plan of the epoch that was set; None if packs are made as rows come."""
        return None

    @property
    def sources(self) -> tuple[RowSource, ...]:
        """Return the sources of the rows; none of a stream."""
        sources: tuple[RowSource, ...] = self.dataset.sources
        return sources

    def preview(self, num_samples: int) -> Iterator[Encoded]:
        """Yield the first samples that will be trained, encoded when they are asked for; skip rows that fail."""
        raise NotImplementedError


def rows_of(
    dataset: Any, template: Template | None, seed: int, lengths: Sequence[int] | None = None
) -> FusionCaptionDataset | StreamedRows:
    """Return rows in one of the two forms that packs are made of; a list or data set becomes a single source.

    `seed` is that of a stream which is made here. Rows that have a form already have a seed, too.
    """
    if isinstance(dataset, (str, bytes, PathLike)):  # iterating a name would take its letters for rows
        raise DataError(
            f"PackingDataset takes rows, not the name of a file; read {str(dataset)!r} first: "
            f"[json.loads(line) for line in open({str(dataset)!r})]"
        )
    if isinstance(dataset, (FusionCaptionDataset, StreamedRows)):
        if lengths is not None:
            raise ConfigError("lengths= is for one data set; give RowSource(lengths=...) those of each source")
        return dataset
    if hasattr(dataset, "__len__"):
        source = RowSource(name="data", rows=dataset, lengths=lengths)
        # A data set that draws each epoch by itself has an order, which is the schedule.
        return FusionCaptionDataset([source], template, shuffle=not source.changes)
    return StreamedRows(dataset, template, seed=seed)


def make_packing(template: Template | None, rows: FusionCaptionDataset | StreamedRows, config: PackingConfig) -> None:
    """Make rows encode with these options, and the template collate packs. Raises `ConfigError` if it cannot."""
    # The rows may have another template, such as a copy that fetches URLs in another way.
    for used in {id(one): one for one in (template, rows.template) if one is not None}.values():
        check_ready(used, needs_model=False)
        if config.shares_media:
            refuse_flat_attention(getattr(used, "model", None))
    rows.encode_for(config)
    if template is not None:
        template.packing = template.padding_free = True


def packed_samples(
    samples: Sequence[Encoded],
    epoch: int,
    number: int,
    config: PackingConfig,
    left_out: Sequence[LeftOut],
    *,
    num_apart: int = 0,
) -> PackedSamples:
    """Make a pack of samples, with the record that tells the trainer and the counts what is in it.

    `num_apart` counts the samples that were planned to share a prefix but did not once encoded.
    """
    sizes = [size_of(sample) for sample in samples]
    shared = tuple(int(sample.get(SHARED, 0)) for sample in samples)
    record = PackRecord(
        epoch=epoch,
        number=number,
        sample_ids=tuple(sample["sample_id"] for sample in samples),
        lengths=tuple(size.length for size in sizes),
        num_images=sum(size.images for size, num_shared in zip(sizes, shared, strict=True) if not num_shared),
        single_long=len(sizes) == 1 and is_single_long(*sizes[0][:3], config),
        left_out=tuple(left_out),
        sequence_multiple=config.sequence_multiple,
        shared=shared if any(shared) else (),
        num_apart=num_apart,
    )
    return PackedSamples([sample | sample.pop(OWN, {}) for sample in samples], record)
