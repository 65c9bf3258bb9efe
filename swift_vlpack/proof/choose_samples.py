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
from swift_vlpack.plan.epoch import EpochPlan, Where
from swift_vlpack.plan.packs import Plan
from swift_vlpack.proof.branches import PREFIX, as_planned, units_in
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


def chosen_samples(packs: Packs, is_usable: Callable[[Encoded], bool]) -> list[Encoded]:
    """Choose a few short, usable samples of every kind: one image, several, a video, text.

    Two of each kind with media, so that an exchange of these is seen. But more than one of each kind, and more than
    two in all, are taken only if they fit one pack, because there may be no memory for a longer sequence.
    """
    kinds = [filter(is_usable, kind) for kind in candidates_from(packs)]
    firsts = [(kind, sample) for kind in kinds if (sample := next(kind, None)) is not None]
    chosen = [sample for _, sample in firsts]
    with_media = [kind for kind, sample in firsts if kinds_of_media(sample)]
    seconds = [sample for kind in with_media if (sample := next(kind, None)) is not None]
    # Units stand together, because only neighbours share a prefix.
    chosen += [sample for unit in units_from(packs, is_usable) for sample in unit]
    room = packs.config.packing_length - sum(map(length_of, chosen))
    needed = max(FEWEST, len(chosen) + len(seconds))
    for sample in chain(seconds, _in_turn(kinds)):
        if len(chosen) >= needed or (len(chosen) > 1 and length_of(sample) > room):
            break
        chosen.append(sample)
        room -= length_of(sample)
    return chosen * 2 if len(chosen) == 1 else chosen  # a pack of one sample has no neighbour


def _in_turn(kinds: Sequence[Iterator[Encoded]]) -> Iterator[Encoded]:
    """Yield one sample of each kind, then a second sample of each kind, and so on, until no sample is left."""
    left = list(kinds)
    while left:
        found = [(kind, next(kind, None)) for kind in left]
        left = [kind for kind, sample in found if sample is not None]
        yield from (sample for _, sample in found if sample is not None)


def short_samples(packs: Packs) -> list[Encoded]:
    """Choose a few short samples, with and without images if there are both. Raises `DataError` if there are none."""
    by_length = sorted((sample for kind in candidates_from(packs) for sample in islice(kind, 3)), key=length_of)
    if not by_length:
        raise DataError("not one row could be encoded; the log has the reasons")
    with_images = [sample for sample in by_length if contents_of(sample).images][:2]
    text_only = [sample for sample in by_length if not contents_of(sample).images]
    few = [*with_images, *text_only, *by_length[len(with_images) :]][:3]
    return few if len(few) > 1 else few * 2


def short_of_each_kind(samples: Sequence[Encoded]) -> list[Encoded]:
    """Choose the two shortest samples, the shortest with each kind of media, and two branches of a prefix, in order."""
    by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
    # From the longest to the shortest, because a later sample replaces an earlier sample of its kind.
    of_kinds = {kinds_of_media(samples[at]): at for at in by_length[::-1]}
    branches = next(iter(units_in(samples)), [])[:2]
    return [samples[at] for at in sorted({*by_length[:2], *of_kinds.values(), *branches})]


def candidates_from(packs: Packs) -> list[Iterator[Encoded]]:
    """Return one iterator for each kind of sample in the epoch, short ones first; samples are encoded on demand."""
    plan = packs.epoch_plan
    if plan is None:
        samples = sorted(packs.preview(NUM_STREAMED), key=length_of)
        return [iter(kind) for kind in _grouped(samples, _kind_of_sample)]
    by_length = np.argsort(plan.lengths, kind="stable")
    by_length = by_length[plan.lengths[by_length] > 0]
    # The plan counts images and patches. Other media, such as sounds, are found by opening rows.
    images, patches = plan.images[by_length], plan.patches[by_length]
    kinds = [
        kind
        for is_kind in _counted_kinds(images, patches)
        for kind in _grouped(
            _spread(by_length[is_kind], _LOOKED_AT), lambda position: _kind_of_row(packs, plan.schedule[position])
        )
    ]
    return [_encoded(packs, plan.samples(_spread(np.array(kind), _SPREAD))) for kind in kinds if kind]


def _counted_kinds(images: NDArray[Any], patches: NDArray[Any]) -> list[NDArray[np.bool_]]:
    """Mark the samples with one image, with several, with other media that have patches, and with none."""
    return [images == 1, images > 1, (images == 0) & (patches > 0), (images == 0) & (patches == 0)]


def units_from(packs: Packs, is_usable: Callable[[Encoded], bool]) -> list[list[Encoded]]:
    """Return a short unit of each kind that the epoch has: a prefix with up to `_BRANCHES` of its rows, marked."""
    plan = packs.epoch_plan
    if plan is None:
        return []
    members, shared = plan.packs.members, plan.packs.shared_of_members
    joins = np.flatnonzero(shared > 0)
    firsts = joins[shared[joins - 1] == 0] - 1
    cheap = firsts[np.argsort(_tokens_of_two(plan.lengths[members], shared, firsts), kind="stable")]
    found = []
    for kind in _counted_kinds(plan.images, plan.patches):
        units = (_unit(packs, plan, int(first), is_usable) for first in _spread(cheap[kind[members[cheap]]], _SPREAD))
        unit = next((unit for unit in units if len(unit) > 1), None)
        found += [] if unit is None else [unit]
    return found


def _tokens_of_two(lengths: NDArray[Any], shared: NDArray[Any], firsts: NDArray[Any]) -> NDArray[Any]:
    """Return the tokens of the first two rows of units, with their prefix once."""
    tokens: NDArray[Any] = lengths[firsts] + lengths[firsts + 1] - shared[firsts + 1]
    return tokens


def _unit(packs: Packs, plan: EpochPlan, first: int, is_usable: Callable[[Encoded], bool]) -> list[Encoded]:
    """Encode rows of the unit that begins at a member of the plan's packs until there are enough; mark their prefix."""
    shared = plan.packs.shared_of_members[first : first + packs.config.packing_share_max].tolist()
    num = 1 + next((at for at, num_shared in enumerate(shared[1:]) if not num_shared), len(shared) - 1)
    samples = _encoded(packs, plan.samples(plan.packs.members[first : first + num].tolist()))
    usable = list(islice(filter(is_usable, samples), _BRANCHES))
    unit = as_planned(usable, (0, *[shared[1]] * (len(usable) - 1)) if usable else ())
    return [sample for sample in unit if PREFIX in sample and is_usable(sample)]


def sequences_of_plan(packs: Packs, window: int | None = None) -> list[list[Encoded]]:
    """Choose sequences of the plan: those with the most samples, the most images (or patches), the longest sample.

    For a model with a `window`, add the sequence of the shortest sample that is longer than it. If samples share
    prefixes, add the sequence with the most branches. Of a stream, fill one sequence with its first samples.
    """
    epoch = packs.epoch_plan
    if epoch is None:
        filled = _filled(packs.preview(NUM_STREAMED), packs.config.packing_length)
        return [filled] if filled else []
    plan = epoch.packs
    if not len(plan):
        return []
    chosen: list[int] = []
    for scores in _scores(plan, window):
        most = np.flatnonzero(scores == scores.max())
        if not set(most.tolist()) & set(chosen):
            chosen.append(int(most[0]))
    # Short sequences first: the first is compared in any case, the others only while the budget of tokens lasts. Before
    # them those with a prefix, if samples share any.
    tokens = plan.num_tokens_per_pack
    chosen.sort(key=lambda number: (not plan.shared_in(number), int(tokens[number])))
    sequences = [
        as_planned(_encoded_or_none(packs, epoch.samples(plan[number])), plan.shared_in(number)) for number in chosen
    ]
    return [sequence for sequence in sequences if sequence]


def _scores(plan: Plan, window: int | None) -> Iterator[NDArray[Any]]:
    """Yield one array of scores for each question; for each, a pack with the highest score is compared.

    The longest sample is asked for first, because few packs have a sample of that length. Many packs may have as many
    samples or images.
    """
    pack_of = np.repeat(np.arange(len(plan)), plan.num_samples_per_pack)
    lengths = plan.lengths[plan.members]
    yield _of_packs(np.maximum, pack_of, lengths, len(plan))
    if window and (lengths > window).any():
        shortest = lengths[lengths > window].min()
        yield _of_packs(np.maximum, pack_of, lengths == shortest, len(plan))
    for counts in (plan.images, plan.patches):
        if counts.any():
            yield _of_packs(np.add, pack_of, counts[plan.members], len(plan))
            break
    if plan.config.shares_media:
        yield _of_packs(np.add, pack_of, plan.shared_of_members > 0, len(plan))
    yield plan.num_samples_per_pack


def _of_packs(join: np.ufunc, pack_of: NDArray[np.int64], values: NDArray[Any], num_packs: int) -> NDArray[np.int64]:
    """Join the values of the samples of each pack."""
    joined = np.zeros(num_packs, dtype=np.int64)
    join.at(joined, pack_of, values)
    return joined


def _encoded(packs: Packs, samples: Iterable[Where]) -> Iterator[Encoded]:
    """Yield the samples that can be encoded, when they are asked for."""
    for where in samples:
        yield from filter(None, _encoded_or_none(packs, [where]))


def _encoded_or_none(packs: Packs, samples: Iterable[Where]) -> list[Encoded | None]:
    """Encode samples; None for one that cannot be. Random draws of a template depend on the row alone."""
    encoded: list[Encoded | None] = []
    for where in samples:
        with RandomStream("proof", *where[:2]):
            sample = packs.dataset.sample_or_error(Address(*where))
        encoded.append(None if isinstance(sample, SampleError) else sample)
    return encoded


def _filled(samples: Iterable[Encoded], capacity: int) -> list[Encoded]:
    """Take samples that fit into one sequence."""
    sequence: list[Encoded] = []
    room = capacity
    for sample in samples:
        if length_of(sample) <= room:
            sequence.append(sample)
            room -= length_of(sample)
    return sequence


def _spread(positions: NDArray[np.int64], num: int) -> list[int]:
    """Choose the first positions, then some spread over all of them."""
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
    """Return the kinds of media that a row names. Lengths count neither sounds nor the images of some families."""
    source, number = at
    row = packs.dataset.sources[source].rows[number]
    kinds = [medium.kind for medium in media(row)]
    return frozenset(kinds), len(kinds) > 1
