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
The other items stay in the buffer. specs/PACK.md is the contract. Over lengths that are known ahead, `planner.plan`
pushes a whole epoch through (start there, then epoch.py); a stream pushes samples as they are encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from swift_vlpack import envelope
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import StateMismatch, StrategyError
from swift_vlpack.plan.items import Item, Pack, is_left_out, is_single_long, why_alone
from swift_vlpack.plan.parts import NOTHING, Taken
from swift_vlpack.plan.registry import WINDOW, strategy_named
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.plan.strategies import Caps, Groups, fill_oldest
from swift_vlpack.reasons import Reason
from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

MAX_CARRY = 4
"""How often an item may be carried over before its group leaves as it is.

A length that fits nothing else must not be held for ever, or come out as a remainder at the end of a stream. Measured
on 100,000 lengths each of captions, a heavy tail and near halves: 4 needs within 0.1 % of the packs that 32 needs, and
0 (never wait) up to 1 % more.
"""
MOST_DROPPED = 50
"""`packing_drop_last` drops at most 1/50 of the items: in a small epoch the last pack would be a large share."""
NUM_LOUD = 20
"""Items of one kind that are logged loudly; a data set with a million of them would drown every other line."""
_serial = itemgetter(1)  # of a held entry
DropReport = Callable[[Item, Reason], None]
Label = Callable[[Any], str]


class _Held(NamedTuple):
    item: Item
    serial: int  # arrival number, the order inside a pack
    num_carried: int = 0  # how often the buffer was packed without it


_make_held = _Held._make  # takes half the time of the constructor, which shows because it is called for every item


class Packer:
    """Groups items into packs; holds at most `packing_buffer` items; never loses one without a reason and a count.

    `on_drop` is called with every item that is left out and the reason. `seed` orders the packs that leave together.
    `label` makes the name of an item in the log; None keeps the log quiet, for callers that report by themselves.
    """

    def __init__(
        self,
        config: PackingConfig,
        *,
        seed: int = 0,
        on_drop: DropReport | None = None,
        label: Label | None = "item {!r}".format,
    ) -> None:
        self.config = config
        self.num_pushed = 0
        self.num_emitted = 0
        self.num_single_long = 0
        self.num_dropped: dict[str, int] = {}
        self._seed = seed
        self._on_drop = on_drop
        self._label = label
        self._strategy = strategy_named(config.packing_strategy)
        self._is_in_order = config.packing_strategy in ("greedy", WINDOW)
        self._step = self._step_in_order if self._is_in_order else self._pack_buffer
        if config.packing_strategy == "exact":
            self._step = self._pack_around_oldest
        # In order there is nothing to choose, so every item decides at once; the others wait for a full buffer.
        self._num_to_step = 1 if self._is_in_order else config.packing_buffer
        self._capacity = config.packing_length
        self._has_caps = config.has_caps
        self._held: list[_Held] = []
        self._lengths: list[int] = []  # of the held items, in the form in which strategies take them
        self._num_windows = 0  # how often the buffer was packed; the name is that of saved states
        # The shortest item that could share: `flush` asks whether anything would have fitted into the last pack.
        self._shortest = config.packing_length

    def __repr__(self) -> str:
        return (
            f"<Packer by {self.config.packing_strategy}, packs of {self.config.packing_length} tokens: "
            f"{counted(self.num_pushed, 'item')} pushed, {self.num_held} held, {self.num_emitted} packed>"
        )

    @property
    def num_held(self) -> int:
        """Count the items that wait for a pack."""
        return len(self._held)

    @property
    def taken(self) -> Taken:
        """Say what the open pack holds, where packs are filled in order: the next row is cut to what is left of it."""
        most = self.config.packing_max_samples
        if most is not None and self.num_held >= most:
            return NOTHING  # the open pack is full, so the next item opens another one
        media = zip(*(entry.item[2:] for entry in self._held), strict=True) if self._has_caps else ()
        return Taken(sum(self._lengths), *map(sum, media))

    @property
    def held(self) -> tuple[Item, ...]:
        """List the items that wait for a pack."""
        return tuple(entry.item for entry in self._held)

    def push(self, item: Item | tuple[Any, ...]) -> list[Pack]:
        """Take one item, `(id, length[, images[, patches]])`, and return the packs that are ready."""
        return self.push_checked(Item(*item).checked())

    def push_checked(self, item: Item) -> list[Pack]:
        """Do the same as `push` for an item whose numbers are known to be good."""
        self.num_pushed += 1
        length = item.length
        if length >= self._capacity or self._has_caps:  # nearly all items are spared the call
            reason = why_alone(*item[1:], self.config)
            if reason is not None:
                return self._push_too_long(item, reason)
        if length < self._shortest:
            self._shortest = length
        self._held.append(_make_held((item, self.num_pushed, 0)))
        self._lengths.append(length)
        return self._step() if len(self._lengths) >= self._num_to_step else []

    def flush(self) -> list[Pack]:
        """End the epoch. Returns the packs of all held items, without the remainder that `packing_drop_last` drops."""
        groups = self._grouped()
        fills = [self._fill(group) for group in groups]
        room = [self._capacity - sum(self._lengths[i] for i in group) for group in groups]
        counts = [len(group) for group in groups]
        num_items = self.num_emitted + len(self._held)
        remainder = remainder_to_drop(fills, room, self._shortest, self.config, counts=counts, num_items=num_items)
        if remainder is not None:
            # They count as dropped here; `Plan.align` brings them back if a step lacks a pack.
            for index in groups.pop(remainder):
                self._drop(self._held[index].item, Reason.UNDERFILLED)
        packs = self._leave(self._shuffled(groups))
        # After `_leave`, because groups are indices of held items. A flushed packer can be pushed to again.
        self._held.clear()
        self._lengths.clear()
        return packs

    def state(self) -> dict[str, Any]:
        """Return all that a fresh packer needs to have the same future, as JSON."""
        state = {name: getattr(self, name) for name in _COUNTERS}
        state["num_dropped"] = dict(self.num_dropped)
        state["held"] = [[*entry.item, entry.serial, entry.num_carried] for entry in self._held]
        return envelope.seal("packer", self._fingerprint(), state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `StateMismatch` if it was written with another config or seed."""
        saved = envelope.unseal(state, "packer", self._fingerprint(), shape=_STATE)
        # Every item that came in must be somewhere; if the sum is off, somebody edited the file.
        if saved["num_pushed"] != saved["num_emitted"] + len(saved["held"]) + sum(saved["num_dropped"].values()):
            raise StateMismatch("damaged: state.num_pushed is not what was emitted, is held and was dropped")
        for name in _COUNTERS:
            setattr(self, name, saved[name])
        self.num_dropped = dict(saved["num_dropped"])
        self._held = [_Held(Item(_restored(row[0]), *row[1:4]), *row[4:]) for row in saved["held"]]
        self._lengths = [entry.item.length for entry in self._held]

    def _fingerprint(self) -> dict[str, Any]:
        return {**self.config.pack_options(), "seed": self._seed}

    def _grouped(self) -> Groups:
        """Let the strategy group the buffer. If a strategy of the user's fails, the error says in which buffer."""
        try:
            return self._strategy(self._lengths, self._capacity, self._caps())
        except StrategyError as error:
            buffer = f"buffer {self._num_windows + 1}, of {self.num_held} samples"
            raise StrategyError(f"{error} ({buffer})") from error.__cause__

    # -- one step of each kind of strategy ---------------------------------------------------------------------

    def _pack_buffer(self) -> list[Pack]:
        """Group the whole buffer; groups that are filled, or have waited long enough, leave."""
        groups = self._grouped()
        leaving = [group for group in groups if self._is_filled(group) or self._has_waited(group)]
        packs = self._part_with(self._shuffled(leaving or groups))
        self._held = [entry._replace(num_carried=entry.num_carried + 1) for entry in self._held]
        return packs

    def _pack_around_oldest(self) -> list[Pack]:
        """Make one pack around the oldest item, which is how `exact` works; then the buffer is refilled."""
        # One turn for each item at most: after that, all have been the oldest once, and none could fill a pack.
        for _ in range(self.num_held):
            group = fill_oldest(self._lengths, self._capacity, self._caps())
            if self._is_filled(group) or self._has_waited([0]):
                return self._part_with([group])
            oldest = self._held.pop(0)  # carried over: its turn comes again after the others'
            self._held.append(oldest._replace(num_carried=oldest.num_carried + 1))
            self._lengths.append(self._lengths.pop(0))
        return self._part_with(self._grouped())

    def _step_in_order(self) -> list[Pack]:
        """Let the open pack leave if the newest item does not fit, or if it is exactly full (`greedy`, `window`)."""
        num_tokens, caps = sum(self._lengths), self._caps()
        everything = range(self.num_held)
        if num_tokens > self._capacity or (caps is not None and not caps.fit(everything)):
            # The newest item stays and opens the next pack.
            return self._part_with([list(everything[:-1])])
        return self._part_with([list(everything)]) if num_tokens == self._capacity else []

    # -- what leaves, and how -----------------------------------------------------------------------------------

    def _push_too_long(self, item: Item, reason: Reason) -> list[Pack]:
        if is_left_out(*item[1:], self.config):
            self._drop(item, reason)
            return []
        # `greedy` keeps the order of everything, so its open pack has to leave first.
        has_open_pack = self._is_in_order and self._held
        before = self._part_with([list(range(self.num_held))]) if has_open_pack else []
        self.num_emitted += 1
        # An item of exactly the capacity is alone too, but that is simply a full pack: nothing to report.
        is_long = is_single_long(*item[1:], self.config)
        if is_long:
            self.num_single_long += 1
            self._log(self.num_single_long, "alone in its pack", item, reason, loud=logging.INFO)
        return [*before, Pack((item,), is_long)]

    def _part_with(self, groups: Groups) -> list[Pack]:
        """Emit the groups, and remove their items from the buffer."""
        packs = self._leave(groups)
        leaving = groups[0] if len(groups) == 1 else sorted(index for group in groups for index in group)
        for index in reversed(leaving):  # from the end, so that the other indices stay right
            del self._held[index], self._lengths[index]
        return packs

    def _leave(self, groups: Groups) -> list[Pack]:
        packs = []
        for group in groups:
            entries = [self._held[index] for index in group]
            # The buffer need not be in order of arrival: `exact` moves what it carries over to its end.
            entries.sort(key=_serial)
            packs.append(Pack(tuple([entry[0] for entry in entries])))
            self.num_emitted += len(entries)
        return packs

    def _shuffled(self, groups: Groups) -> Groups:
        self._num_windows += 1
        if self._is_in_order:
            return groups
        # Most strategies list packs by their largest sample: unshuffled, training would get the long ones of every
        # buffer first. The word "window" is part of the seed: another word would be another order for every plan.
        return [groups[i] for i in permutation(len(groups), self._seed, "window", self._num_windows).tolist()]

    def _drop(self, item: Item, reason: Reason) -> None:
        self.num_dropped[reason.value] = self.num_dropped.get(reason.value, 0) + 1
        if reason is not Reason.UNDERFILLED:  # a plan may bring it back
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

    # -- how full -----------------------------------------------------------------------------------------------

    def _is_filled(self, group: Sequence[int]) -> bool:
        return self._fill(group) >= self.config.packing_min_fill_ratio

    def _has_waited(self, group: Sequence[int]) -> bool:
        return any(self._held[index].num_carried >= MAX_CARRY for index in group)

    def _fill(self, group: Sequence[int]) -> float:
        """Return the largest share of any capacity: a pack that may take no more images is as full as it gets."""
        fill = sum(self._lengths[index] for index in group) / self._capacity
        if not self._has_caps:
            return fill
        caps = cap_uses([self._held[index].item for index in group], self.config)
        return max(fill, *caps.shares())

    def _caps(self) -> Caps | None:
        return cap_uses(self.held, self.config) if self._has_caps else None


_COUNTERS = ("num_pushed", "num_emitted", "num_single_long", "_num_windows", "_shortest")
_STATE = {
    **dict.fromkeys(_COUNTERS, envelope.Whole()),
    "num_dropped": envelope.Named(envelope.Whole()),
    "held": [(None, envelope.Whole(1), *[envelope.Whole()] * 4)],  # the fields of an item, then of _Held
}


def cap_uses(items: Iterable[Item], config: PackingConfig) -> Caps:
    """Return the caps that are set, and what each item uses of them."""
    limits = (config.packing_max_samples, config.packing_max_images, config.packing_max_patches)
    columns = [column for column, limit in enumerate(limits) if limit is not None]
    uses = ((1, item.images, item.patches) for item in items)
    return Caps(tuple(limit for limit in limits if limit is not None), [tuple(use[c] for c in columns) for use in uses])


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
    A group with more than 1/`MOST_DROPPED` of the epoch's `num_items` stays; `counts` has the items of each group.
    """
    if not config.packing_drop_last or not fills:
        return None
    # Of equally empty groups the last, as the strategies open their packs in order and fill the first ones up.
    least = min(range(len(fills)), key=lambda index: (fills[index], -index))
    could_be_filled = rooms[least] >= shortest
    is_small = counts[least] * MOST_DROPPED <= num_items
    return least if fills[least] < config.packing_min_fill_ratio and could_be_filled and is_small else None


def _restored(key: Any) -> Any:
    """Turn lists into tuples again: JSON knows no tuples, so ids that were tuples come back as lists."""
    return tuple(_restored(part) for part in key) if isinstance(key, list) else key
