"""What both kinds of packs have in common: samples with their record, failures with their count, a fit template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from typing import Any, Protocol

from swift_vlpack.attention.prepare import check_ready
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.oversize import is_single_long
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import (
    Encoded,
    LeftOut,
    PackedSamples,
    PackRecord,
    SampleError,
    TooManyFailures,
)
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows

logger = logging.getLogger(__name__)


class Packs(Protocol):
    """A data set of packs or a feed, for those who only look at samples of it."""

    dataset: Any
    config: PackingConfig
    num_ranks: int


def epoch_plan_of(packs: Packs) -> EpochPlan | None:
    """The epoch that packs are of, where they are planned."""
    return getattr(packs, "epoch_plan", None)


def rows_of(dataset: Any, template: Template) -> FusionCaptionDataset | StreamedRows:
    """What was given as one of the two forms of rows: sized rows are the one source of a FusionCaptionDataset."""
    if isinstance(dataset, (str, bytes, PathLike)):  # whose letters would be the rows
        raise DataError(
            f"PackingDataset takes rows, not the name of a file; read {str(dataset)!r} first: "
            f"[json.loads(line) for line in open({str(dataset)!r})]"
        )
    if isinstance(dataset, (FusionCaptionDataset, StreamedRows)):
        return dataset
    if hasattr(dataset, "__len__"):
        return FusionCaptionDataset([RowSource(name="data", rows=dataset)], template)
    return StreamedRows(dataset, template)


def make_packing(template: Template, dataset: Any, config: PackingConfig) -> None:
    """Let the rows be encoded as the run wants them, and the template collate packs of them, if it is fit for that."""
    # The rows may be read by another one, such as a copy that asks for URLs in another way.
    for used in {id(one): one for one in (template, dataset.template)}.values():
        check_ready(used, needs_model=False)
    dataset.encode_for(config)
    template.packing = True
    template.padding_free = True


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
        row_multiple=config.row_multiple,
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
