"""A pack as people see it, made of the very samples and tensors that training gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from swift_vlpack.feed.collate import Batch
from swift_vlpack.pages.pictures import pictures_of
from swift_vlpack.pages.pieces import Tokens, kinds_of, pieces_of, vision_runs
from swift_vlpack.pages.values import VISION, Member, PackShown, Row
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import SampleId

_AXES = ("time", "height", "width")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How what is in a row becomes text."""

    decode: Callable[[list[int]], str]
    placeholders: frozenset[int]
    """Tokens that stand for what the vision tower gives."""
    row_of: Callable[[SampleId], Mapping[str, Any] | None]
    """The row of the data that a sample was made of; None where it cannot be had again."""
    answer_of: Callable[[SampleId], Sequence[int] | None]
    """The labels of a sample if every answer were trained; None where that is not known."""
    where_of: Callable[[SampleId], str]
    with_thumbnails: bool = False


class Place(NamedTuple):
    """Where in a run a pack is."""

    num_packs: int | None = None
    rank: int = 0
    step: int | None = None


def shown(batch: Batch, place: Place, reading: Reading, packing_length: int) -> PackShown:
    """One pack; its tensors are those of the batch."""
    record = batch.record
    assert record is not None
    row = row_of(batch)
    positions = _positions(batch)
    members = [
        member_of(
            sample_id, row.input_ids[start:stop], row.labels[start:stop], reading, start=start, positions=positions
        )
        for sample_id, (start, stop) in zip(record.sample_ids, pairwise(row.cu_seqlens), strict=False)
    ]
    return PackShown(
        epoch=record.epoch,
        number=record.number,
        num_packs=place.num_packs,
        rank=place.rank,
        step=place.step,
        packing_length=packing_length,
        members=members,
        left_out=[{"id": str(one.sample_id), "reason": one.reason, "error": one.detail} for one in record.left_out],
        row=row,
    )


def row_of(batch: Batch) -> Row:
    """The tensors of a batch as lists."""
    positions = batch["position_ids"]
    return Row(
        input_ids=batch["input_ids"][0].tolist(),
        labels=batch["labels"][0].tolist(),
        position_ids=positions.reshape(-1, positions.shape[-1]).tolist(),
        cu_seqlens=batch["cu_seq_lens_q"].tolist(),
    )


def member_of(
    sample_id: SampleId,
    ids: Sequence[int],
    labels: Sequence[int],
    reading: Reading,
    *,
    start: int = 0,
    positions: Mapping[str, list[int]] = MappingProxyType({}),
) -> Member:
    """One sample."""
    answer = reading.answer_of(sample_id)
    is_whole = answer is not None and len(answer) == len(ids)
    kinds = kinds_of(Tokens(ids, labels, answer if is_whole else None), reading.placeholders)
    row, thumbnails = reading.row_of(sample_id), reading.with_thumbnails
    pictures = [] if row is None else pictures_of(row, vision_runs(kinds), with_thumbnails=thumbnails)
    inside = slice(start, start + len(ids))
    return Member(
        id=str(sample_id),
        where=reading.where_of(sample_id),
        source=sample_id.source,
        start=start,
        num_tokens=len(ids),
        num_supervised=sum(label != NO_LABEL for label in labels),
        num_vision=kinds.count(VISION),
        positions={name: (min(numbers[inside]), max(numbers[inside])) for name, numbers in positions.items()},
        pictures=pictures,
        pieces=pieces_of(ids, kinds, pictures, reading.decode),
    )


def _positions(batch: Batch) -> dict[str, list[int]]:
    """The rows of positions by what they count: tokens, and where there are more, time, height and width."""
    positions: torch.Tensor = batch["position_ids"]
    rows: list[list[int]] = positions.reshape(-1, positions.shape[-1]).tolist()
    names = ("token",) if len(rows) == 1 else _AXES if len(rows) == len(_AXES) else ("token", *_AXES)
    named = dict(zip(names, rows, strict=True))
    text = batch.get("text_position_ids")
    return named if text is None else {"token": text.reshape(-1).tolist(), **named}
