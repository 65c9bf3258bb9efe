"""Choose the real samples and sequences of a proof, from the plan of the epoch or from the start of a stream.

All ranks choose the same, because they run the same forwards together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import DataError
from swift_vlpack.feed.packs import Packs
from swift_vlpack.plan.epoch import Where
from swift_vlpack.plan.packs import Plan
from swift_vlpack.proof.branches import as_planned, units_in
from swift_vlpack.proof.perturb import kinds_of_media
from swift_vlpack.proof.runner import length_of
from swift_vlpack.rows.contents import contents_of
from swift_vlpack.rows.media import media
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address, Encoded, SampleError

FEWEST = 4
"""Fewest samples in the pack that is measured: some mistakes need more than three samples to show."""
NUM_STREAMED = 64
"""Number of samples that are read from the start of a stream."""
_FIRST, _SPREAD = 6, 18
"""Most rows of each kind that are tried: the shortest, then some spread over all lengths, because the shortest rows are
often broken."""
_BRANCHES = 3
"""Most rows of a unit in the pack that is measured: one between two siblings."""
_LOOKED_AT = 250
"""Most rows that are opened to find kinds of media that the length pass does not count, such as sounds."""


def chosen_samples(
    packs: Packs, is_usable: Callable[[Encoded], bool], sequences: Sequence[Sequence[Encoded]] = ()
) -> list[Encoded]:
    """Choose a few short, usable samples of every kind: one image, several, a video, text; and branches of a prefix.

    Two of each kind with media, so that an exchange of these is seen. But more than one of each kind, and more than
    two in all, are taken only if they fit one pack, because there may be no memory for a longer sequence. The branches
    are those of the shortest prefix in `sequences`.
    """
    kinds = [filter(is_usable, kind) for kind in _candidates(packs)]
    firsts = [(kind, sample) for kind in kinds if (sample := next(kind, None)) is not None]
    seconds = [next(kind, None) for kind, sample in firsts if kinds_of_media(sample)]
    chosen = [sample for _, sample in firsts]
    units = [[sequence[at] for at in unit] for sequence in sequences for unit in units_in(sequence)]
    usable = [unit for unit in ([*filter(is_usable, unit)][:_BRANCHES] for unit in units) if len(unit) > 1]
    # A unit stands together, because only neighbours share a prefix.
    chosen += min(usable, key=lambda unit: sum(map(length_of, unit)), default=[])
    room = packs.config.packing_length - sum(map(length_of, chosen))
    more = [sample for sample in seconds if sample is not None]
    needed = max(FEWEST, len(chosen) + len(more))
    for sample in chain(more, _in_turn(kinds)):
        if len(chosen) >= needed or (len(chosen) > 1 and length_of(sample) > room):
            break
        chosen.append(sample)
        room -= length_of(sample)
    return chosen * 2 if len(chosen) == 1 else chosen  # a pack of one sample has no neighbour


def short_samples(packs: Packs) -> list[Encoded]:
    """Choose up to three short samples, with and without images if there are both.

    Raises `DataError` if there are none.
    """
    few = list(islice(_in_turn(_candidates(packs)), 3))
    if not few:
        raise DataError("not one row could be encoded; the log has the reasons")
    return few if len(few) > 1 else few * 2


def _in_turn(kinds: Sequence[Iterator[Encoded]]) -> Iterator[Encoded]:
    """Yield one sample of each kind, then a second sample of each kind, and so on, until no sample is left."""
    left = list(kinds)
    while left:
        found = [(kind, next(kind, None)) for kind in left]
        left = [kind for kind, sample in found if sample is not None]
        yield from (sample for _, sample in found if sample is not None)


def short_of_each_kind(samples: Sequence[Encoded]) -> list[Encoded]:
    """Choose the two shortest samples, the shortest with each kind of media, and two branches of a prefix, in order."""
    by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
    # From the longest to the shortest, because a later sample replaces an earlier sample of its kind.
    of_kinds = {kinds_of_media(samples[at]): at for at in by_length[::-1]}
    branches = next(iter(units_in(samples)), [])[:2]
    return [samples[at] for at in sorted({*by_length[:2], *of_kinds.values(), *branches})]


def _candidates(packs: Packs) -> list[Iterator[Encoded]]:
    """Return one iterator for each kind of sample in the epoch, short ones first; samples are encoded on demand."""
    plan = packs.epoch_plan
    if plan is None:
        samples = sorted(packs.preview(NUM_STREAMED), key=length_of)
        of_kinds = _grouped(samples, lambda sample: (min(contents_of(sample).images, 2), kinds_of_media(sample)))
        return [iter(kind) for kind in of_kinds]
    by_length = np.argsort(plan.lengths, kind="stable")
    by_length = by_length[plan.lengths[by_length] > 0]
    # The plan counts images and patches. Other media, such as sounds, are found by opening rows.
    images, patches = plan.images[by_length], plan.patches[by_length]
    counted = [images == 1, images > 1, (images == 0) & (patches > 0), (images == 0) & (patches == 0)]
    kinds = [
        kind
        for is_kind in counted
        for kind in _grouped(
            _spread(by_length[is_kind], _LOOKED_AT), lambda position: _kind_of_row(packs, plan.schedule[position])
        )
    ]
    return [filter(None, _encoded(packs, plan.samples(_spread(np.array(kind), _SPREAD)))) for kind in kinds if kind]


def sequences_of_plan(packs: Packs) -> list[list[Encoded]]:
    """Choose sequences of the plan: those with the most samples, the most images (or patches), the longest sample.

    If samples share prefixes, add the sequence with the most branches. Of a stream, fill one sequence with its first
    samples.
    """
    epoch = packs.epoch_plan
    if epoch is None:
        filled, room = list[Encoded](), packs.config.packing_length
        for sample in packs.preview(NUM_STREAMED):
            if length_of(sample) <= room:
                filled.append(sample)
                room -= length_of(sample)
        return [filled] if filled else []
    plan = epoch.packs
    if not len(plan):
        return []
    chosen: list[int] = []
    for scores in _scores(plan):
        most = np.flatnonzero(scores == scores.max())
        if not set(most.tolist()) & set(chosen):
            chosen.append(int(most[0]))
    # Short sequences first: the first is compared in any case, the others only while the budget of tokens lasts. Before
    # them those with a prefix, if samples share any.
    tokens = plan.num_tokens_per_pack
    chosen.sort(key=lambda number: (not plan.shared_in(number), int(tokens[number])))
    sequences = [
        as_planned(list(_encoded(packs, epoch.samples(plan[number]))), plan.shared_in(number)) for number in chosen
    ]
    return [sequence for sequence in sequences if sequence]


def _scores(plan: Plan) -> Iterator[NDArray[Any]]:
    """Yield one array of scores for each question; for each, a pack with the highest score is compared.

    The longest sample is asked for first, because few packs have a sample of that length. Many packs may have as many
    samples or images.
    """
    pack_of = np.repeat(np.arange(len(plan)), plan.num_samples_per_pack)

    def joined(join: np.ufunc, of_members: NDArray[Any]) -> NDArray[Any]:
        made = np.zeros(len(plan), dtype=np.int64)
        join.at(made, pack_of, of_members)
        return made

    yield joined(np.maximum, plan.lengths[plan.members])
    if (counts := next((counts for counts in (plan.images, plan.patches) if counts.any()), None)) is not None:
        yield joined(np.add, counts[plan.members])
    if plan.config.shares_media:
        yield joined(np.add, plan.shared_of_members > 0)
    yield plan.num_samples_per_pack


def _encoded(packs: Packs, samples: Iterable[Where]) -> Iterator[Encoded | None]:
    """Encode samples when they are asked for; None for one that cannot be. Random draws depend on the row alone."""
    for where in samples:
        with RandomStream("proof", *where[:2]):
            sample = packs.dataset.sample_or_error(Address(*where))
        yield None if isinstance(sample, SampleError) else sample


def _spread(positions: NDArray[np.int64], num: int) -> list[int]:
    """Choose the first positions, then some spread over all of them."""
    over = np.linspace(0, max(0, len(positions) - 1), num=min(num, len(positions))).astype(np.int64)
    return list(dict.fromkeys([*positions[:_FIRST].tolist(), *positions[over].tolist()]))


def _grouped(items: Iterable[Any], kind_of: Callable[[Any], Hashable]) -> list[list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(kind_of(item), []).append(item)
    return list(groups.values())


def _kind_of_row(packs: Packs, at: tuple[int, int]) -> Hashable:
    """Return the kinds of media that a row names. Lengths count neither sounds nor the images of some families."""
    source, number = at
    kinds = [medium.kind for medium in media(packs.dataset.sources[source].rows[number])]
    return frozenset(kinds), len(kinds) > 1
