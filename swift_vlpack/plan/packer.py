"""Group items into packs: items come in one by one, packs go out. Planning and streaming run the same packer.

>>> packer = Packer(PackingConfig(packing_length=10, packing_buffer=3, packing_strategy="best_fit"))
>>> [pack.ids for item in [("a", 6), ("b", 5), ("c", 4)] for pack in packer.push(item)]
[('a', 'c')]
>>> [pack.ids for item in [("d", 5), ("e", 1)] for pack in packer.push(item)]
[('b', 'd')]
>>> [pack.ids for pack in packer.flush()], packer.num_dropped
([('e',)], {})

The buffer holds up to `packing_buffer` items. When it is full, the strategy groups its items, and a group leaves
  - if it is filled to `packing_min_fill_ratio` of any capacity,
  - or if one of its items has been carried over `MAX_CARRY` times,
  - or if no group could leave otherwise, because then no new item could ever come in.
The other items stay in the buffer. buffer.py chooses by sizes alone. specs/PACK.md is the contract. If all lengths are
known ahead, `planner.plan` runs a whole epoch through the packer (start there, then epoch.py); a stream pushes samples
as they are encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from swift_vlpack import envelope
from swift_vlpack.config import PackingConfig, need_config
from swift_vlpack.plan.buffer import Buffer, use_of_caps
from swift_vlpack.plan.items import Item, Pack, is_left_out, is_single_long, why_alone
from swift_vlpack.reasons import Reason
from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

NUM_LOUD = 20
"""Most items of one kind that are logged at the full level. A million of them would drown every other line."""
DropReport = Callable[[Item, Reason], None]
Label = Callable[[Any], str]


class Packer:
    """Group items into packs. Holds at most `packing_buffer` items, and counts every left-out item with a reason.

    `on_drop` is called with every left-out item and the reason. `seed` orders the packs that leave together. `label`
    returns the name of an item for the log; None logs nothing, for callers that report by themselves.
    """

    def __init__(
        self,
        config: PackingConfig,
        *,
        seed: int = 0,
        on_drop: DropReport | None = None,
        label: Label | None = "item {!r}".format,
    ) -> None:
        need_config(config)
        self.config = config
        self.num_pushed = 0
        self.num_emitted = 0
        self.num_single_long = 0
        self.num_dropped: dict[str, int] = {}
        self.buffer = Buffer(config, seed)
        """The sizes of the waiting items, by serial numbers, which count the items that were pushed."""
        self._items: dict[int, Item] = {}  # the waiting items, by serial number
        self._seed = seed
        self._on_drop = on_drop
        self._label = label
        self._capacity = config.packing_length
        self._has_caps = config.has_caps

    def __repr__(self) -> str:
        return (
            f"<Packer by {self.config.packing_strategy}, packs of {self.config.packing_length} tokens: "
            f"{counted(self.num_pushed, 'item')} pushed, {self.num_held} held, {self.num_emitted} packed>"
        )

    @property
    def num_held(self) -> int:
        """Return the number of items that wait for a pack."""
        return len(self._items)

    @property
    def held(self) -> tuple[Item, ...]:
        """Return the items that wait for a pack."""
        return tuple([self._items[serial] for serial in self.buffer.serials])

    def push(self, item: Item | tuple[Any, ...]) -> list[Pack]:
        """Take one item, `(id, length[, images[, patches]])`, and return the packs that are ready."""
        return self.push_checked(Item(*item).checked())

    def push_checked(self, item: Item) -> list[Pack]:
        """Do the same as `push` for an item whose numbers were checked before."""
        self.num_pushed += 1
        length = item.length
        if length >= self._capacity or self._has_caps:  # nearly all items skip this call
            reason = why_alone(*item[1:], self.config)
            if reason is not None:
                return self._push_too_long(item, reason)
        self._items[self.num_pushed] = item
        self.buffer.add(self.num_pushed, length, self._use_of(item, self.buffer.samples_of(self.num_pushed)))
        return self._emitted(self.buffer.step()) if self.buffer.is_full else []

    def flush(self) -> list[Pack]:
        """End the epoch. Returns the packs of all held items, without the remainder that `packing_drop_last` drops."""
        groups, remainder = self.buffer.flush(self.num_emitted + self.num_held)
        # Count the remainder as dropped. `Plan.align` brings it back if a step lacks a pack.
        for serial in remainder:
            self._drop(self._pop(serial), Reason.UNDERFILLED)
        return self._emitted(groups)

    def state(self) -> dict[str, Any]:
        """Return, as JSON, everything that a new packer needs to make the same packs from here on."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        state |= {name: getattr(self.buffer, of_buffer) for name, of_buffer in _COUNTERS_OF_BUFFER.items()}
        state["num_dropped"] = dict(self.num_dropped)
        waiting = self.buffer.serials
        state["held"] = [[*self._items[serial], serial, self.buffer.num_carried(serial)] for serial in waiting]
        return envelope.seal("packer", self._fingerprint(), state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises `StateMismatch` if it was written with another config or seed."""
        saved = envelope.unseal(state, "packer", self._fingerprint())
        for name in _COUNTERS:
            setattr(self, name, saved[name])
        self.num_dropped = dict(saved["num_dropped"])
        self.buffer, self._items = Buffer(self.config, self._seed), {}
        for key, length, images, patches, serial, num_carried in saved["held"]:
            item = self._items[serial] = Item(_restored(key), length, images, patches)
            self.buffer.add(serial, length, self._use_of(item), num_carried)
        for name, of_buffer in _COUNTERS_OF_BUFFER.items():
            setattr(self.buffer, of_buffer, saved[name])

    def _use_of(self, item: Item, num_samples: int = 1) -> tuple[int, ...]:
        return use_of_caps(num_samples, item.images, item.patches, self.config) if self._has_caps else ()

    def _fingerprint(self) -> dict[str, Any]:
        return {**self.config.pack_options(), "seed": self._seed}

    def _push_too_long(self, item: Item, reason: Reason) -> list[Pack]:
        if is_left_out(*item[1:], self.config):
            self._drop(item, reason)
            return []
        # `greedy` keeps the order of all items, so its open pack has to leave first.
        before = self._emitted(self.buffer.leave()) if self.buffer.is_in_order else []
        self.num_emitted += 1
        # An item of exactly the capacity is alone too, but that is simply a full pack, which needs no report.
        is_long = is_single_long(*item[1:], self.config)
        if is_long:
            self.num_single_long += 1
            self._log(self.num_single_long, "alone in its pack", item, reason, loud=logging.INFO)
        return [*before, Pack((item,), is_long)]

    def _emitted(self, groups: list[list[int]]) -> list[Pack]:
        packs = [Pack(tuple([self._pop(serial) for serial in group])) for group in groups]
        self.num_emitted += sum(map(len, groups))
        return packs

    def _pop(self, serial: int) -> Item:
        return self._items.pop(serial)

    def _drop(self, item: Item, reason: Reason) -> None:
        self.num_dropped[reason.value] = self.num_dropped.get(reason.value, 0) + 1
        if reason is not Reason.UNDERFILLED:  # do not log the remainder, because a plan may bring it back
            self._log(self.num_dropped[reason.value], "left out", item, reason, loud=logging.WARNING)
        if self._on_drop is not None:
            self._on_drop(item, reason)

    def _log(self, num_so_far: int, what: str, item: Item, reason: Reason, *, loud: int) -> None:
        """Log the first `NUM_LOUD` items of a kind at the level `loud`, all others one level below."""
        if self._label is None:
            return
        quiet = loud - 10
        level = loud if num_so_far <= NUM_LOUD else quiet
        logger.log(level, "%s: %s, %d tokens (%s)", what, self._label(item.id), item.length, reason.value)
        if num_so_far == NUM_LOUD:
            name = logging.getLevelName(quiet).lower()
            logger.log(loud, "further items that are %s (%s) are logged at the %s level", what, reason.value, name)


_COUNTERS = ("num_pushed", "num_emitted", "num_single_long")
_COUNTERS_OF_BUFFER = {"_num_windows": "num_grouped", "_shortest": "shortest"}
"""Names in saved states, and the attributes of the buffer that they stand for."""


def _restored(key: Any) -> Any:
    """Turn lists into tuples again: JSON knows no tuples, so ids that were tuples come back as lists."""
    return tuple(_restored(part) for part in key) if isinstance(key, list) else key
