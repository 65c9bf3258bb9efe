"""PackingDataset: packs of encoded samples, planned ahead of time or buffered as they come.

`PackingDataset(dataset, template, config)` chooses by `packing_mode` and by whether the data is sized:

  PlannedPackingDataset    map-style: `len()` packs this epoch, `[i]` encodes the samples of pack i and no others
  BufferedPackingDataset   iterable: encodes row by row, holds `packing_buffer` of them, yields packs as they fill

Both yield `PackedSamples`, a list of encoded samples for the template's own collator.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.errors import ConfigError
from swift_vlpack.core.packing.alone import is_single_long
from swift_vlpack.data.lengths.sizes import size_of
from swift_vlpack.data.model.prepare import check_ready
from swift_vlpack.data.rows.fusion import FusionCaptionDataset, RowSource, Template
from swift_vlpack.data.rows.samples import (
    Encoded,
    LeftOut,
    PackedSamples,
    PackRecord,
    SampleError,
    TooManyFailures,
)
from swift_vlpack.data.rows.streams import StreamedRows

logger = logging.getLogger(__name__)


class PackingDataset(Dataset[PackedSamples]):
    """Packs of encoded samples. Sets `template.packing` and `padding_free`; `set_epoch` mixes and packs anew."""

    def __new__(cls, dataset: Any, template: Template, config: PackingConfig, **options: Any) -> PackingDataset:
        """Choose the form: planned for sized data, buffered for streams or where the config asks for it."""
        if cls is not PackingDataset:
            return super().__new__(cls)
        is_sized = hasattr(dataset, "__len__")
        if config.packing_mode == "plan" and not is_sized:
            raise ConfigError(
                "packing_mode=plan needs data with a length, and this has none; set packing_mode=buffer (and max_steps)"
            )
        from swift_vlpack.data.feeds.buffered import BufferedPackingDataset  # both are made of this class
        from swift_vlpack.data.feeds.planned import PlannedPackingDataset

        is_planned = config.packing_mode != "buffer" and is_sized
        return super().__new__(PlannedPackingDataset if is_planned else BufferedPackingDataset)

    def __init__(self, dataset: Any, template: Template, config: PackingConfig) -> None:
        for used in {id(one): one for one in (template, *getattr(dataset, "templates", ()))}.values():
            check_ready(used, needs_model=False)
        template.packing = True
        template.padding_free = True
        self.template = template
        self.config = config
        self.dataset = _fused(dataset, template)
        self.epoch = 0
        # Shared memory, so that workers that live on see the new epoch.
        self._shared_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For pickle (spawned workers) and copy, which call `__new__` before they fill what it made."""
        return self.dataset, self.template, self.config

    def set_epoch(self, epoch: int) -> None:
        """Let the sources be mixed anew, then pack anew."""
        self.epoch = epoch
        self._shared_epoch[0] = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def follow_epoch(self) -> None:
        """In a dataloader worker that lives on: come to the epoch that the training process has set."""
        if self.epoch != (epoch := int(self._shared_epoch[0])):
            self.set_epoch(epoch)


def packed_samples(
    samples: Sequence[Encoded], epoch: int, number: int, config: PackingConfig, left_out: Sequence[LeftOut]
) -> PackedSamples:
    """Samples with their record."""
    sizes = [size_of(sample) for sample in samples]
    record = PackRecord(
        epoch=epoch,
        number=number,
        sample_ids=tuple(sample["sample_id"] for sample in samples),
        lengths=tuple(size.length for size in sizes),
        num_images=sum(size.images for size in sizes),
        single_long=len(sizes) == 1 and is_single_long(*sizes[0][:3], config),
        left_out=tuple(left_out),
    )
    return PackedSamples(samples, record)


def counted_failure(error: SampleError, num_in_a_row: int, max_failures: int) -> LeftOut:
    """Log and count a failure; too many in a row are no accident."""
    logger.warning("%s: left out: %s: %s", error.sample_id, error.reason, error.detail)
    if num_in_a_row > max_failures:
        raise TooManyFailures(
            f"{num_in_a_row} rows in a row could not be encoded, the last is {error}. "
            "Mend the data, or raise packing_max_failures"
        ) from error
    return LeftOut(error.sample_id, *error.fault)


def _fused(dataset: Any, template: Template) -> Any:
    """A FusionCaptionDataset over what was given: itself, or sized rows as its one source, or a stream of rows."""
    if isinstance(dataset, (FusionCaptionDataset, StreamedRows)):
        return dataset
    if hasattr(dataset, "__len__"):
        return FusionCaptionDataset([RowSource(name="data", rows=dataset)], template)
    return StreamedRows(dataset, template)
