"""Mark the rows of a proof that share a prefix, and lay them out in a sequence as training does.

A proof keeps rows whole, with their pixels, because each row is also run alone. A mark says which rows share their
first tokens: neighbours with the same mark are one unit. A proof may leave samples out, reverse or change them; the
sequence is then laid out by the marks that are left.

>>> prefix = Prefix(3)
>>> rows = [{PREFIX: prefix, "length": 5}, {PREFIX: prefix, "length": 4}, {"length": 4}]
>>> boundaries_of(rows)
Boundaries(lengths=(3, 2, 1, 4), parents=(-1, 0, 0, -1))
>>> boundaries_of(rows[1:]).lengths
(4, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from swift_vlpack.feed.collate import UNUSED_COLUMNS
from swift_vlpack.feed.units import SHARED, UnitsOfPack
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.rows.prefixes import without_pixels
from swift_vlpack.rows.samples import Encoded

PREFIX = "prefix_of_proof"
"""The field of a row with the mark of its prefix; absent if it shares none."""


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """The mark of one unit. Compared by identity, because two units may begin with the same tokens."""

    num_tokens: int


def marked(samples: Sequence[Encoded], shared: Sequence[int]) -> list[Encoded]:
    """Mark the samples of a pack; `shared` counts the tokens that each shares with the sample before it."""
    made, prefix = [], None
    for at, sample in enumerate(samples):
        if not any(shared[at : at + 1]):
            prefix = Prefix(shared[at + 1]) if any(shared[at + 1 : at + 2]) else None
        made.append(sample if prefix is None else {**sample, PREFIX: prefix})
    return made


def as_planned(samples: Sequence[Encoded | None], shared: Sequence[int]) -> list[Encoded]:
    """Mark the samples of a planned pack that the reader of packs would join, because they share what was planned.

    None stands for a sample that cannot be encoded.
    """
    shared = (*(shared or (0,) * len(samples)), 0)
    units = UnitsOfPack()
    whole: dict[int, list[Encoded]] = {}  # by the id of a unit, its samples with their pixels
    for at, sample in enumerate(samples):
        if not shared[at]:
            units.close()
        if sample is not None:
            unit = units.add(sample, shared[at] or shared[at + 1])
            whole.setdefault(id(unit), []).append(sample)
    of_units = ((unit.prefix, whole[id(unit)]) for unit in units.units)
    return [sample for prefix, some in of_units for sample in marked(some, [0, *[prefix] * (len(some) - 1)])]


def num_prefix_of(sample: Encoded) -> int:
    """Return how many of its first tokens a sample may share; 0 if it has no mark."""
    return sample[PREFIX].num_tokens if PREFIX in sample else 0


def shared_of(samples: Sequence[Encoded]) -> tuple[int, ...]:
    """Return, for each sample of a sequence, the tokens that it shares with the sample before it."""
    marks: list[Prefix | None] = [sample.get(PREFIX) for sample in samples]
    return tuple(
        0 if mark is None or mark is not before else mark.num_tokens
        for before, mark in zip([None, *marks], marks, strict=False)
    )


def boundaries_of(samples: Sequence[Encoded]) -> Boundaries:
    """Lay samples out in a sequence, each prefix once."""
    return Boundaries.of_samples([int(sample["length"]) for sample in samples], shared_of(samples))


def units_in(samples: Sequence[Encoded]) -> list[list[int]]:
    """Return the indices of the samples of each unit; samples that share with no neighbour are in none."""
    by_mark = groupby(range(len(samples)), lambda at: samples[at].get(PREFIX))
    units = ((mark, list(unit)) for mark, unit in by_mark)
    return [unit for mark, unit in units if mark is not None and len(unit) > 1]


def without_extras(sample: Encoded) -> Encoded:
    """Copy a sample without the columns that the template does not know; the template may change the copy."""
    return {name: value for name, value in sample.items() if name not in (UNUSED_COLUMNS, PREFIX)}


def as_trained(samples: Sequence[Encoded]) -> list[Encoded]:
    """Copy samples as a training pack has them: a branch lacks the pixels of its prefix, and has `SHARED`."""
    return [
        {**without_pixels(without_extras(sample)), SHARED: num_shared} if num_shared else without_extras(sample)
        for sample, num_shared in zip(samples, shared_of(samples), strict=True)
    ]
