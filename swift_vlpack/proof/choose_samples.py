"""Which real samples the proof looks at. All that it asks the packs for is here; the same answer on every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import DataError
from swift_vlpack.feed.packs import Packs
from swift_vlpack.plan.epoch import Where
from swift_vlpack.plan.packs import Plan
from swift_vlpack.proof.changes import kinds_of_media
from swift_vlpack.proof.proof_model import length_of
from swift_vlpack.rows.contents import contents_of
from swift_vlpack.rows.media import media
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address, Encoded, SampleError

FEWEST = 4
"""Samples of the pack that is asked everything: some mistakes need more than three to show."""
NUM_STREAMED = 64
"""Samples of a stream that are looked at."""
_FIRST, _SPREAD, _LOOKED_AT = 6, 18, 250
"""Rows of a kind that are tried: the shortest, then some all over its lengths, as broken rows are often short.
Rows that are looked at for media that the lengths do not count."""


def chosen_samples(packs: Packs, is_usable: Callable[[Encoded], bool]) -> list[Encoded]:
    """A few short samples, of every kind there is: an image, several, a video, text. Unusable ones are passed by.

    Beyond one of each, and two in all, only what a pack has room for: there may be no memory for a longer row.
    """
    kinds = [filter(is_usable, kind) for kind in candidates_from(packs)]
    chosen = [sample for kind in kinds if (sample := next(kind, None)) is not None]
    # Each kind of media gets a twin beside it.
    needed = sum(length_of(sample) * (2 if kinds_of_media(sample) else 1) for sample in chosen)
    room = packs.config.packing_length - needed
    for sample in _in_turn(kinds):
        if len(chosen) >= FEWEST or (len(chosen) > 1 and length_of(sample) > room):
            break
        chosen.append(sample)
        room -= length_of(sample)
    return chosen * 2 if len(chosen) == 1 else chosen


def _in_turn(kinds: Sequence[Iterator[Encoded]]) -> Iterator[Encoded]:
    """One of each, another one of each, and so on."""
    left = list(kinds)
    while left:
        found = [(kind, next(kind, None)) for kind in left]
        left = [kind for kind, sample in found if sample is not None]
        yield from (sample for _, sample in found if sample is not None)


def short_samples(packs: Packs) -> list[Encoded]:
    """A few short real samples, with and without images where there are both; the same ones on every rank."""
    by_length = sorted((sample for kind in candidates_from(packs) for sample in islice(kind, 3)), key=length_of)
    if not by_length:
        raise DataError("not one row could be encoded; the log has the reasons")
    with_images = [sample for sample in by_length if contents_of(sample).images][:2]
    text_only = [sample for sample in by_length if not contents_of(sample).images]
    few = [*with_images, *text_only, *by_length[len(with_images) :]][:3]
    return few if len(few) > 1 else few * 2


def candidates_from(packs: Packs) -> list[Iterator[Encoded]]:
    """The samples of each kind that the epoch has, short ones first, encoded as they are asked for."""
    plan = packs.epoch_plan
    if plan is None:
        samples = sorted(packs.preview(NUM_STREAMED), key=length_of)
        return [iter(kind) for kind in _grouped(samples, _kind_of_sample)]
    by_length = np.argsort(plan.lengths, kind="stable")
    by_length = by_length[plan.lengths[by_length] > 0]
    images, patches = plan.images[by_length], plan.patches[by_length]
    counted = [images == 1, images > 1, (images == 0) & (patches > 0), (images == 0) & (patches == 0)]
    kinds = [
        kind
        for is_kind in counted
        for kind in _grouped(
            _spread(by_length[is_kind], _LOOKED_AT), lambda position: _kind_of_row(packs, plan.schedule[position])
        )
    ]
    return [_encoded(packs, plan.samples(_spread(np.array(kind), _SPREAD))) for kind in kinds if kind]


def rows_of_plan(packs: Packs, window: int | None = None) -> list[list[Encoded]]:
    """The row with the most samples, that with the most images (or patches, of videos), that of the longest sample,
    and, for models that look so many tokens back, that of the shortest sample that is longer; of a stream, a row as
    full as its first rows make."""
    epoch = packs.epoch_plan
    if epoch is None:
        return [row] if (row := _filled(packs.preview(NUM_STREAMED), packs.config.packing_length)) else []
    plan = epoch.packs
    if not len(plan):
        return []
    pack_of = np.repeat(np.arange(len(plan)), plan.num_samples_per_pack)
    lengths = plan.lengths[plan.members]
    longer = np.flatnonzero(lengths > window) if window else np.array([], dtype=np.int64)
    asked_for = [int(np.argmax(lengths)), *longer[np.argsort(lengths[longer], kind="stable")][:1].tolist()]
    of_media = [] if (number := _with_most_media(plan, pack_of)) is None else [number]
    numbers = dict.fromkeys([int(np.argmax(plan.num_samples_per_pack)), *of_media, *pack_of[asked_for[::-1]].tolist()])
    rows = [list(_encoded(packs, epoch.samples(plan[number]))) for number in numbers]
    return [row for row in rows if row]


def _with_most_media(plan: Plan, pack_of: NDArray[np.int64]) -> int | None:
    """The pack with the most images, or where there are none the most patches."""
    for counts in (plan.images, plan.patches):
        if counts is not None and counts.any():
            return int(np.argmax(np.bincount(pack_of, weights=counts[plan.members])))
    return None


def tokens_of_epoch(packs: Packs) -> int:
    """That each rank trains in an epoch; 0 where nobody knows."""
    plan = packs.epoch_plan
    return 0 if plan is None else int(plan.packs.num_tokens_per_pack.sum()) // packs.num_ranks


def _encoded(packs: Packs, samples: Iterable[Where]) -> Iterator[Encoded]:
    """Those that can be encoded; what a template draws at random depends on the row alone."""
    for where in samples:
        with RandomStream("proof", *where[:2]):
            sample = packs.dataset.sample_or_error(Address(*where))
        if not isinstance(sample, SampleError):
            yield sample


def _filled(samples: Iterable[Encoded], capacity: int) -> list[Encoded]:
    row: list[Encoded] = []
    for sample in samples:
        if sum(map(length_of, row)) + length_of(sample) <= capacity:
            row.append(sample)
    return row


def _spread(positions: NDArray[np.int64], num: int) -> list[int]:
    """The first ones, then some all over."""
    over = np.linspace(0, max(0, len(positions) - 1), num=min(num, len(positions))).astype(np.int64)
    return list(dict.fromkeys([*positions[:_FIRST].tolist(), *positions[over].tolist()]))


def _grouped(items: Iterable[Any], kind_of: Callable[[Any], Hashable]) -> list[list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(kind_of(item), []).append(item)
    return list(groups.values())


def _kind_of_sample(sample: Encoded) -> Hashable:
    return min(contents_of(sample).images, 2), kinds_of_media(sample)


def _kind_of_row(packs: Packs, at: tuple[int, int]) -> Hashable:
    """What it names: sounds, which nobody counts, a video beside an image, images of families that are not counted."""
    source, number = at
    row = packs.dataset.sources[source].rows[number]
    kinds = [medium.kind for medium in media(row)]
    return frozenset(kinds), len(kinds) > 1
