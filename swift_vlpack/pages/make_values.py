"""Make the values that are shown, from the plan of an epoch, the tensors of a pack and the row of a sample.

The tensors are those of training: `pack_shown` takes a batch of the trainer's collator. `SampleLookup` adds what
tensors do not say: text, file and line, images.

>>> kinds_of([1, 9, 9, 2, 3], [-100, -100, -100, 2, 3], placeholders={9})
['prompt', 'vision', 'vision', 'supervised', 'supervised']
>>> pieces_of([1, 9, 9, 2, 3], kinds_of([1, 9, 9, 2, 3], [-100, -100, -100, 2, 3], {9}), [Picture("image", None)], str)
... # doctest: +NORMALIZE_WHITESPACE
[Piece(kind='prompt', num_tokens=1, text='[1]'), Piece(kind='vision', num_tokens=2, text='[image = 2 tokens]'),
 Piece(kind='supervised', num_tokens=2, text='[2, 3]')]
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from swift_vlpack.feed.collate import Batch
from swift_vlpack.pages.values import (
    MASKED,
    PROMPT,
    SUPERVISED,
    VISION,
    Member,
    PackShown,
    Picture,
    Piece,
    SequenceTensors,
    SharedPrefix,
)
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.media import is_name, media, real_file
from swift_vlpack.rows.samples import SampleId

THUMBNAIL = 128
"""Pixels of a thumbnail's longer side: some 4 KB as JPEG, so that a page of 20 MB holds thousands of them."""
_QUALITY = 70
_AXES = ("time", "height", "width")

# -- an epoch ---------------------------------------------------------------------------------------------------------


def overview_of(plan: EpochPlan) -> dict[str, Any]:
    """Name the longest and the emptiest pack of an epoch. All else of an epoch is said by `vlpack plan`."""
    packs, tokens = plan.packs, plan.packs.num_tokens_per_pack
    has_samples = np.flatnonzero(tokens > 0)  # a pack without a sample only completes a step
    return {
        "epoch": plan.epoch,
        "num_ranks": plan.num_ranks,
        "num_packs": len(plan),
        "packing_length": packs.config.packing_length,
        "num_samples": len(packs.members),
        "mean_fill": round(packs.mean_fill, 4),
        "longest": int(tokens.argmax()),
        "emptiest": int(has_samples[tokens[has_samples].argmin()]),
    }


# -- a pack and its samples -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampleLookup:
    """Look up what the tensors of a sample do not say."""

    decode: Callable[[list[int]], str]
    placeholders: frozenset[int]
    """Ids of the tokens that the vision tower's features replace."""
    row_of: Callable[[SampleId], Mapping[str, Any] | None]
    """Returns the row of data that a sample was made of; None if it cannot be read again."""
    answer_of: Callable[[SampleId], Sequence[int] | None]
    """Returns the labels of a sample if every answer were trained; None if that is not known."""
    where_of: Callable[[SampleId], str]
    with_thumbnails: bool = False


class Place(NamedTuple):
    """The place of a pack in a run: the rank and the step that train it, among `num_packs` of its epoch."""

    num_packs: int | None = None
    rank: int = 0
    step: int | None = None


def pack_shown(batch: Batch, place: Place, lookup: SampleLookup, packing_length: int) -> PackShown:
    """Make the shown value of a pack from its batch."""
    record = batch.record
    assert record is not None
    sequence = tensors_of(batch)
    positions = _positions(batch)
    members: list[Member] = []
    prefixes: dict[int, SharedPrefix] = {}  # by where they begin
    lengths = tuple(stop - start for start, stop in pairwise(sequence.cu_seqlens))
    # Not strict, because padding after the samples has boundaries and no sample.
    for sample_id, tokens in zip(record.sample_ids, Boundaries(lengths, tuple(sequence.parents)).samples, strict=False):
        shared, member = segments_of(sample_id, [slice(*one) for one in tokens], sequence, positions, lookup)
        if shared is not None:
            before = prefixes.get(shared.start, shared)
            prefixes[shared.start] = replace(before, members=[*before.members, len(members)])
            member = replace(member, prefix=[*prefixes].index(shared.start))
        members.append(member)
    return PackShown(
        epoch=record.epoch,
        number=record.number,
        num_packs=place.num_packs,
        rank=place.rank,
        step=place.step,
        packing_length=packing_length,
        members=members,
        left_out=[{"id": str(one.sample_id), "reason": one.reason, "error": one.detail} for one in record.left_out],
        sequence=sequence,
        prefixes=list(prefixes.values()),
    )


def tensors_of(batch: Batch) -> SequenceTensors:
    """Copy the tensors of a batch into lists."""
    positions, ends = batch["position_ids"], batch["cu_seq_lens_q"]
    ends = ends.reshape(-1, ends.shape[-1])  # a second line has the prefixes, if samples share any
    return SequenceTensors(
        input_ids=batch["input_ids"][0].tolist(),
        labels=batch["labels"][0].tolist(),
        position_ids=positions.reshape(-1, positions.shape[-1]).tolist(),
        cu_seqlens=ends[0].tolist(),
        parents=ends[1][1:].tolist() if len(ends) > 1 else [],
    )


def segments_of(
    sample_id: SampleId,
    places: Sequence[slice],
    sequence: SequenceTensors,
    positions: Mapping[str, list[int]],
    lookup: SampleLookup,
) -> tuple[SharedPrefix | None, Member]:
    """Show the prefix of a sample, if it has one, and the rest. `places` are their tokens in the sequence."""
    *prefix, own = places
    ids, labels = (
        [token for place in places for token in of_sequence[place]]
        for of_sequence in (sequence.input_ids, sequence.labels)
    )
    num_shared = sum(place.stop - place.start for place in prefix)
    answer = lookup.answer_of(sample_id)
    is_same_encoding = answer is not None and len(answer) == len(ids)
    kinds = kinds_of(ids, labels, lookup.placeholders, answer if is_same_encoding else None)
    row = lookup.row_of(sample_id)
    nums = [stop - first for kind, first, stop in _runs(kinds) if kind == VISION]
    pictures = [] if row is None else pictures_of(row, nums, with_thumbnails=lookup.with_thumbnails)

    def content(tokens: slice, place: slice, pictures: Sequence[Picture]) -> dict[str, Any]:
        return {
            "start": place.start,
            "num_tokens": place.stop - place.start,
            "num_vision": kinds[tokens].count(VISION),
            "num_supervised": sum(label != NO_LABEL for label in labels[tokens]),
            "positions": {name: (min(axis[place]), max(axis[place])) for name, axis in positions.items()},
            "pictures": pictures,
            "pieces": pieces_of(ids[tokens], kinds[tokens], pictures, lookup.decode),
        }

    member = Member(
        id=str(sample_id),
        source=sample_id.source,
        where=lookup.where_of(sample_id),
        # A prefix has all media of its rows.
        **content(slice(num_shared, None), own, [] if prefix else pictures),
    )
    if not prefix:
        return None, member
    return SharedPrefix(members=(), **content(slice(num_shared), prefix[0], pictures)), member


def _positions(batch: Batch) -> dict[str, list[int]]:
    """Name the rows of `position_ids`: one is the token; three are time, height, width; four are all of these."""
    positions: torch.Tensor = batch["position_ids"]
    rows: list[list[int]] = positions.reshape(-1, positions.shape[-1]).tolist()
    names = ("token",) if len(rows) == 1 else _AXES if len(rows) == len(_AXES) else ("token", *_AXES)
    named = dict(zip(names, rows, strict=True))
    text = batch.get("text_position_ids")
    return named if text is None else {"token": text.reshape(-1).tolist(), **named}


# -- the tokens of a sample -------------------------------------------------------------------------------------------


def kinds_of(
    ids: Sequence[int], labels: Sequence[int], placeholders: Collection[int], answer: Sequence[int] | None = None
) -> list[str]:
    """Return the kind of each token.

    `answer` has the labels that the sample would have if every answer were trained: a token with a label there and none
    in `labels` is masked. Without `answer`, such a token counts as prompt.

    >>> kinds_of([1, 9, 2, 3, 4], [-100, -100, -100, 3, -100], {9}, answer=[-100, -100, 2, 3, -100])
    ['prompt', 'vision', 'masked', 'supervised', 'prompt']
    """

    def kind(token: int, label: int, in_answer: int) -> str:
        if token in placeholders:
            return VISION
        if label != NO_LABEL:
            return SUPERVISED
        return PROMPT if in_answer == NO_LABEL else MASKED

    return [kind(*each) for each in zip(ids, labels, labels if answer is None else answer, strict=True)]


def pieces_of(
    ids: Sequence[int], kinds: Sequence[str], pictures: Sequence[Picture], decode: Callable[[list[int]], str]
) -> list[Piece]:
    """Write a sample as text, each image as `[image 640x480 = 391 tokens]`."""
    runs = list(_runs(kinds))
    is_one_each = sum(kind == VISION for kind, _, _ in runs) == len(pictures)
    left = iter(pictures)
    made = []
    for kind, start, stop in runs:
        if kind != VISION:
            made.append(Piece(kind, stop - start, decode(list(ids[start:stop]))))
            continue
        picture = replace(next(left), num_tokens=stop - start) if is_one_each else Picture("vision", stop - start)
        made.append(Piece(VISION, stop - start, f"[{picture}]"))
    return made


def _runs(kinds: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield kind, start and stop of every run of tokens of one kind."""
    at = 0
    for kind, group in groupby(kinds):
        num_tokens = sum(1 for _ in group)
        yield kind, at, at + num_tokens
        at += num_tokens


# -- images of a row --------------------------------------------------------------------------------------------------


def pictures_of(row: Mapping[str, Any], num_tokens: Sequence[int], *, with_thumbnails: bool = False) -> list[Picture]:
    """List the images and videos of a row in order.

    `num_tokens` are the lengths of the runs of vision tokens. If there is one run for each image, the images get these
    numbers; otherwise it is unknown which tokens belong to which image.
    """
    named = [medium for medium in media(row) if medium.kind in ("image", "video", "tag")]
    nums = list(num_tokens) if len(num_tokens) == len(named) else [None] * len(named)
    return [
        _picture("video" if medium.kind == "video" else "image", medium.value, num, with_thumbnails)
        for medium, num in zip(named, nums, strict=True)
    ]


def _picture(kind: str, value: Any, num_tokens: int | None, with_thumbnails: bool) -> Picture:
    name = value if isinstance(value, str) and (is_name(value) or value.startswith("http")) else ""
    picture = Picture(kind, num_tokens, name=name)
    # Pillow reads no header of a video; and an image is not downloaded only to be shown.
    file = None if kind == "video" else _file(value)
    if file is None:
        return picture
    with suppress(Exception), Image.open(file) as image:  # Pillow raises many things for a broken file: no size then
        picture = replace(picture, width=image.width, height=image.height)
        if with_thumbnails:
            picture = replace(picture, thumbnail=_thumbnail(image))
    return picture


def _file(value: Any) -> str | io.BytesIO | None:
    """Return a file that Pillow can open, from bytes, a path or base64; None for anything else."""
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        return None
    if found := real_file(value):
        return found.path
    with suppress(ValueError, binascii.Error):
        return io.BytesIO(base64.b64decode(value.partition("base64,")[2] or value))
    return None


def _thumbnail(image: Image.Image) -> str:
    image.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))  # a large JPEG is decoded at a fraction of its size
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    small = Image.new("RGB", image.size, "white")
    rgba = image.convert("RGBA")
    small.paste(rgba, mask=rgba.getchannel("A"))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
