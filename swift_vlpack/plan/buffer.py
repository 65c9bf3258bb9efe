"""Hold the sizes of the items that wait for a pack, and decide which of them leave together.

>>> buffer = Buffer(PackingConfig(packing_length=10, packing_buffer=3, packing_strategy="best_fit"))
>>> for serial, length in [(1, 6), (2, 5), (3, 4)]:
...     buffer.add(serial, length)
>>> buffer.is_full, buffer.step(), buffer.serials
(True, [[1, 3]], [2])

An item is a serial number, a length and, under caps, what it uses of each cap. So a plan of a million items makes no
object for an item. For a stream, `Packer` keeps the items themselves in addition to a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from swift_vlpack.config import CAPS, PackingConfig
from swift_vlpack.errors import StrategyError
from swift_vlpack.plan.exact import Shelf
from swift_vlpack.plan.registry import strategy_named
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.plan.strategies import Caps, Groups, fill_around_oldest

MAX_CARRY = 4
"""How often an item may be carried over before its group leaves, however full.

A length that fits nothing else must not be held forever, or be dropped as the remainder of a stream. Measured on
100,000 lengths each of captions, a heavy tail and near halves: 4 needs within 0.1 % of the packs that 32 needs, and 0
(never wait) needs up to 1 % more.
"""
MOST_DROPPED = 50
"""`packing_drop_last` drops at most 1/50 of the items: the last pack of a small epoch would be a large share."""


class Buffer:
    """At most `packing_buffer` items that wait for a pack. `seed` orders the packs that leave together."""

    def __init__(self, config: PackingConfig, seed: int = 0) -> None:
        self.config = config
        self.serials: list[int] = []
        self.shortest = config.packing_length
        """The shortest item so far, with which `flush` tells whether anything would have fitted into the last pack."""
        self.num_grouped = 0
        """Number of times that the strategy has grouped the buffer."""
        self.is_in_order = config.packing_strategy == "greedy"
        self._seed = seed
        self._strategy = strategy_named(config.packing_strategy)
        # A strategy that keeps the order has nothing to choose, so it steps with every item. Others need a full buffer.
        self._num_to_step = 1 if self.is_in_order else config.packing_buffer
        self._capacity = config.packing_length
        self._limits = tuple(config.caps.values())
        self._shelf = Shelf(config.packing_length)
        self.lengths = self._shelf.lengths
        self._uses: list[tuple[int, ...]] = []  # what each item uses of the limits; empty without caps
        self._beside: list[list[Any]] = [self.serials, self._uses] if self._limits else [self.serials]
        self._num_carried: dict[int, int] = {}  # serial -> how often the buffer was packed without the item
        self.num_samples: Mapping[int, int] = {}
        """The samples of an item that is several, by its serial number."""

    def __len__(self) -> int:
        return len(self.serials)

    @property
    def is_full(self) -> bool:
        """Tell whether it is time to `step`."""
        return len(self.serials) >= self._num_to_step

    def samples_of(self, serial: int) -> int:
        """Return the number of samples of an item."""
        return self.num_samples.get(serial, 1)

    def add(self, serial: int, length: int, use: tuple[int, ...] = (), num_carried: int = 0) -> None:
        """Add an item. `use` is what it uses of each cap that is set (`use_of_caps`)."""
        self.serials.append(serial)
        self._shelf.add((length,))
        if self._limits:
            self._uses.append(use)
        if num_carried:
            self._num_carried[serial] = num_carried
        self.shortest = min(self.shortest, length)

    def fill(self, serials: Iterable[int], lengths: Iterable[int], uses: Iterable[tuple[int, ...]]) -> bool:
        """Add items from the front of these iterators until the buffer is full. Returns whether it is full."""
        num_more = self._num_to_step - len(self.serials)
        self.serials.extend(islice(serials, num_more))
        self._shelf.add(islice(lengths, num_more))
        if self._limits:
            self._uses.extend(islice(uses, num_more))
        return self.is_full

    def num_carried(self, serial: int) -> int:
        """Return how often the buffer was packed without an item."""
        return self._num_carried.get(serial, 0)

    def step(self) -> Groups:
        """Remove and return the packs that are ready, as serials in order of arrival. Call it on a full buffer."""
        if self.is_in_order:
            return self._step_in_order()
        return self._step_around_oldest() if self.config.packing_strategy == "exact" else self._step_of_all()

    def leave(self) -> Groups:
        """Remove all items and return them as one pack; return nothing from an empty buffer."""
        return self._leaving([list(range(len(self)))]) if self.serials else []

    def flush(self, num_items: int) -> tuple[Groups, list[int]]:
        """End an epoch of `num_items`. Returns (packs of all held items, serials of the remainder that is dropped)."""
        groups, lengths = self._grouped(), self.lengths
        remainder = remainder_to_drop(
            [self._fill(group) for group in groups],
            [self._capacity - sum(lengths[i] for i in group) for group in groups],
            self.shortest,
            self.config,
            counts=[sum(self.samples_of(self.serials[i]) for i in group) for group in groups],
            num_items=num_items,
        )
        dropped = [] if remainder is None else [self.serials[i] for i in groups.pop(remainder)]
        packs = self._packs_of(self._shuffled(groups))
        self._take(range(len(self)))
        return packs, dropped

    # -- steps by kind of strategy -----------------------------------------------------------------------------

    def _step_of_all(self) -> Groups:
        """Group the whole buffer. Groups that are filled, or have waited long enough, leave."""
        groups = self._grouped()
        leaving = [group for group in groups if self._is_filled(group) or self._has_waited(group)]
        packs = self._leaving(self._shuffled(leaving or groups))
        self._num_carried = {serial: self.num_carried(serial) + 1 for serial in self.serials}
        return packs

    def _step_around_oldest(self) -> Groups:
        """Make one pack around the oldest item, as `exact` does; the buffer is refilled after each pack."""
        # Try each item once at most: if each has been the oldest one and none could fill a pack, group them all.
        for _ in range(len(self)):
            group = fill_around_oldest(self._shelf, self._capacity, self._caps())
            if self._is_filled(group) or self._has_waited([0]):
                return self._leaving([group])
            self._put_oldest_last()  # carry it over: its turn comes again after all others
        return self._leaving(self._grouped())

    def _put_oldest_last(self) -> None:
        oldest = self.serials[0]
        self._num_carried[oldest] = self.num_carried(oldest) + 1
        self._shelf.put_oldest_last()
        for values in self._beside:
            values.append(values.pop(0))

    def _step_in_order(self) -> Groups:
        """Let the open pack leave if the newest item does not fit, or if it is exactly full (`greedy`)."""
        num_tokens, caps = sum(self.lengths), self._caps()
        everything = range(len(self))
        if num_tokens > self._capacity or (caps is not None and not caps.fit(everything)):
            # The newest item stays and opens the next pack.
            return self._leaving([list(everything[:-1])])
        return self._leaving([list(everything)]) if num_tokens == self._capacity else []

    # -- leaving groups -----------------------------------------------------------------------------------------

    def _grouped(self) -> Groups:
        """Let the strategy group the buffer. The error of a user's strategy names the buffer."""
        try:
            return self._strategy(self.lengths, self._capacity, self._caps())
        except StrategyError as error:
            buffer = f"buffer {self.num_grouped + 1}, of {len(self)} samples"
            raise StrategyError(f"{error} ({buffer})") from error.__cause__

    def _shuffled(self, groups: Groups) -> Groups:
        self.num_grouped += 1
        if self.is_in_order:
            return groups
        # Shuffle: most strategies list packs by their largest sample, so training would get the long samples of every
        # buffer first. Do not change the word "window" in the seed: it would change the order of every plan.
        return [groups[i] for i in permutation(len(groups), self._seed, "window", self.num_grouped).tolist()]

    def _leaving(self, groups: Groups) -> Groups:
        """Return the packs of these groups, and remove their items."""
        packs = self._packs_of(groups)
        self._take(groups[0] if len(groups) == 1 else sorted(index for group in groups for index in group))
        return packs

    def _packs_of(self, groups: Groups) -> Groups:
        # Sort, because `exact` moves the items that it carries over to the end of the buffer.
        return [sorted([self.serials[index] for index in group]) for group in groups]

    def _take(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        if self._num_carried:
            for index in indices:
                self._num_carried.pop(self.serials[index], None)
        self._shelf.take(indices, *self._beside)

    # -- fill ---------------------------------------------------------------------------------------------------

    def _is_filled(self, group: Sequence[int]) -> bool:
        return self._fill(group) >= self.config.packing_min_fill_ratio

    def _has_waited(self, group: Sequence[int]) -> bool:
        return any(self.num_carried(self.serials[index]) >= MAX_CARRY for index in group)

    def _fill(self, group: Sequence[int]) -> float:
        """Return the largest used share of any capacity: a pack that may take no more images is full, too."""
        lengths = self.lengths
        fill = sum([lengths[index] for index in group]) / self._capacity
        caps = self._caps()
        return fill if caps is None else max(fill, *caps.subset(group).shares())

    def _caps(self) -> Caps | None:
        return Caps(self._limits, self._uses) if self._limits else None


def use_of_caps(samples: Any, images: Any, patches: Any, config: PackingConfig) -> tuple[Any, ...]:
    """Return what items use of each cap that is set; caps can limit samples, images and patches."""
    caps = config.caps
    return tuple(use for name, use in zip(CAPS, (samples, images, patches), strict=True) if name in caps)


def remainder_to_drop(
    fills: Sequence[float],
    rooms: Sequence[int],
    shortest: int,
    config: PackingConfig,
    *,
    counts: Sequence[int],
    num_items: int,
) -> int | None:
    """Return the index of the group that `packing_drop_last` drops as the remainder of an epoch, or None.

    The remainder is the least filled group, if it is underfilled and some item of the epoch would have fitted into it.
    At most one group is dropped: two half-empty groups do not fit together, so neither is a remainder.
    A group with more than 1/`MOST_DROPPED` of the epoch's `num_items` stays. `counts` has the number of samples in each
    group; an item can have several samples.
    """
    if not config.packing_drop_last or not fills:
        return None
    # Take the last one of equally empty groups, because strategies open packs in order and fill up the first ones.
    least = min(range(len(fills)), key=lambda index: (fills[index], -index))
    could_be_filled = rooms[least] >= shortest
    is_small = counts[least] * MOST_DROPPED <= num_items
    return least if fills[least] < config.packing_min_fill_ratio and could_be_filled and is_small else None
