"""Which packs of an epoch are looked at: by number, by a sample in them, by how full they are, or at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.epoch_report import left_out_by
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address
from swift_vlpack.words import counted


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for; at most one of these."""

    pack: int | None = None
    sample: str | None = None
    longest: bool = False
    emptiest: bool = False
    random: int | None = None
    seed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether nothing was chosen."""
        return self.pack is None and self.sample is None and not (self.longest or self.emptiest or self.random)


def chosen(plan: EpochPlan, dataset: FusionCaptionDataset, wish: Wish) -> list[int]:
    """The numbers of the packs, in the order of the epoch; where nothing was chosen, all of them."""
    if wish.pack is not None:
        return [checked_pack(wish.pack, len(plan), plan.epoch)]
    if wish.sample is not None:
        return packs_of_sample(plan, dataset, wish.sample)
    tokens = plan.packs.num_tokens_per_pack
    if wish.longest:
        return [int(tokens.argmax())]
    if wish.emptiest:  # a pack without a sample completes a step and shows nothing
        return [int(np.where(tokens > 0, tokens, np.iinfo(np.int64).max).argmin())]
    if wish.random is not None:
        return sorted(random.Random(wish.seed).sample(range(len(plan)), min(wish.random, len(plan))))
    return list(range(len(plan)))


def checked_pack(number: int, num_packs: int, epoch: int) -> int:
    """The number, if there is such a pack."""
    if not 0 <= number < num_packs:
        raise ConfigError(
            f"--pack {number}: epoch {epoch} has {counted(num_packs, 'pack')}; name one from 0 to {num_packs - 1}"
        )
    return number


def packs_of_sample(plan: EpochPlan, dataset: FusionCaptionDataset, name: str) -> list[int]:
    """The packs of an epoch that have a row, which is named as everywhere: `source:row`."""
    positions = _positions_of(plan, dataset, name)
    places = np.flatnonzero(np.isin(plan.packs.members, positions))
    packs: list[int] = np.unique(np.searchsorted(plan.packs.offsets, places, side="right") - 1).tolist()
    if packs:
        return packs
    why = [one for one in left_out_by(plan, dataset) if str(one.sample_id) == name]
    said = "; ".join(f"{one.reason}{f': {one.detail}' if one.detail else ''}" for one in why)
    raise ConfigError(f"--sample {name}: in no pack of epoch {plan.epoch}: {said or 'the epoch did not draw it'}")


def _positions_of(plan: EpochPlan, dataset: FusionCaptionDataset, name: str) -> np.ndarray:
    source, _, _ = name.rpartition(":")
    names = [one.name for one in dataset.sources]
    if source not in names:
        raise ConfigError(
            f"--sample {name}: no source is called {source or name!r}; there are {', '.join(names)}, and a sample is "
            f"named as {names[0]}:0"
        )
    number = names.index(source)
    rows = range(len(dataset.sources[number].rows))
    # A row is named by its number in the file, which the loader may have shuffled.
    index = next((at for at in rows if str(dataset.sample_id(Address(number, at))) == name), None)
    if index is None:
        raise ConfigError(
            f"--sample {name}: {source} has {counted(len(rows), 'row')} to train on, and none of this number; those "
            "held out for validation or deleted by the loader are not among them"
        )
    return np.flatnonzero((plan.schedule.source == number) & (plan.schedule.row == index))
