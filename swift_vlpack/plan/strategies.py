"""Define the strategies, which decide which samples share a pack, as pure functions `(lengths, capacity) -> groups`.

>>> best_fit([5, 7, 5, 3], 10)
[[1, 3], [0, 2]]
>>> greedy([5, 7, 5, 3], 10)
[[0], [1], [2, 3]]
>>> exact([5, 7, 3, 2], 10)
[[0, 2, 3], [1]]

Equal input gives equal groups on every rank, because ties go to the lower index. Indices inside a group ascend, which
keeps the order of arrival. Every length must be at most the capacity: longer items never reach a strategy (packer.py).
docs/strategies.md helps to choose a strategy; registry.py finds built-in and user strategies by name.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.plan.exact import Shelf

Groups = list[list[int]]


@dataclass(frozen=True, slots=True)
class Caps:
    """The capacities of a pack other than tokens (samples, images, patches), and what every item uses of them."""

    limits: tuple[int, ...]
    uses: Sequence[tuple[int, ...]]  # a tuple for each item, with a number for each limit

    def after(self, used: tuple[int, ...], index: int) -> tuple[int, ...] | None:
        """Return what is used after item `index` joins; None if it does not fit."""
        total = tuple(a + b for a, b in zip(used, self.uses[index], strict=True))
        return total if all(a <= b for a, b in zip(total, self.limits, strict=True)) else None

    def fit(self, group: Sequence[int]) -> bool:
        """Tell whether the items of `group` fit together."""
        return all(sum(self.uses[i][k] for i in group) <= limit for k, limit in enumerate(self.limits))

    def shares(self) -> list[float]:
        """Return the share of each cap that all items together use; 1.0 is the whole cap."""
        return [sum(use[k] for use in self.uses) / limit for k, limit in enumerate(self.limits)]

    def subset(self, indices: Sequence[int]) -> Caps:
        """Return the same limits over some of the items."""
        return Caps(self.limits, [self.uses[i] for i in indices])


class Strategy(Protocol):
    """The signature of all strategies."""

    def __call__(self, lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
        """Group the indices of `lengths` so that no group exceeds `capacity` or a cap."""


def binpack(lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
    """Group as ms-swift's `calculate_matched_group` does: largest first, each into the emptiest pack that has room.

    ms-swift's own function looks at every pack for every item. Here only the emptiest pack is looked at: if any pack
    has room, the emptiest one has.
    """
    if caps is not None:
        raise ValueError("binpack has no caps; PackingConfig refuses the combination")
    groups: Groups = []
    packs: list[tuple[int, int]] = []  # a heap of (tokens, group), so that ties go to the oldest pack
    for index in _largest_first(lengths):
        length = lengths[index]
        if packs and packs[0][0] + length <= capacity:
            num_tokens, group = packs[0]
            heapreplace(packs, (num_tokens + length, group))
        else:
            group = len(groups)
            groups.append([])
            heappush(packs, (length, group))
        groups[group].append(index)
    return _sorted_groups(groups)


def greedy(lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
    """Fill one pack in order, and open the next one when an item does not fit (next fit). Keeps the order of items."""
    groups: Groups = []
    free, used = -1, None
    for index, length in enumerate(lengths):
        used = caps.after(used, index) if caps and used is not None else None
        if length > free or (caps and used is None):
            groups.append([])
            free = capacity
            used = caps.uses[index] if caps else None
        groups[-1].append(index)
        free -= length
    return groups


def first_fit(lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
    """Put items, largest first, into the first pack that has room, in O(n log n) by a tree over the room of packs."""
    order = _largest_first(lengths)
    if caps is not None:
        return _any_fit(lengths, order, capacity, caps, best=False)
    groups: Groups = []
    num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * num_leaves)  # a node has the most room below it; a pack that is not open yet is empty
    for index in order:
        length = lengths[index]
        node = 1
        while node < num_leaves:
            node *= 2
            # Go left unless the left child lacks room: that finds the first pack with room.
            if room[node] < length:
                node += 1
        # Leaves are in the order in which packs are opened, so a leaf after the last pack is a new one.
        if node - num_leaves == len(groups):
            groups.append([])
        groups[node - num_leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            room[node] = left if left > right else right
    return _sorted_groups(groups)


def best_fit(lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
    """Put items, largest first, into the fullest pack that has room, in O(n log n)."""
    if caps is not None:
        return _any_fit(lengths, _largest_first(lengths), capacity, caps, best=True)
    if not len(lengths):
        return []
    pack_of, num_packs = best_fit_assignment(np.asarray(lengths, dtype=np.int32), capacity)
    groups: Groups = [[] for _ in range(num_packs)]
    for index, pack in enumerate(pack_of.tolist()):
        groups[pack].append(index)
    return groups


def best_fit_assignment(lengths: NDArray[Any], capacity: int) -> tuple[NDArray[np.int32], int]:
    """Run best-fit decreasing over arrays. Returns (the pack of every item, the number of packs).

    Items of equal length are placed together: the fullest packs with room, which are all equally full, each take as
    many items as fit. So the time depends on the distinct (length, room) pairs that meet, not on the number of items.
    """
    # Use int32: it halves the memory of ten million items, and no epoch has 2^31 of them.
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    descending = lengths[order]
    firsts = np.flatnonzero(np.diff(descending, prepend=0))  # the first place of each length
    distinct = descending[firsts].tolist()
    del descending
    ends = [*firsts[1:].tolist(), len(order)]
    pack_of_rank = np.empty(len(order), dtype=np.int32)
    packs = _PacksByRoom()
    num_packs = 0
    for length, first, end in zip(distinct, firsts.tolist(), ends, strict=True):
        while first < end:
            room = packs.least_room_for(length)
            if room is None:
                room = capacity
                each = capacity // length
                num_new = -(-(end - first) // each)
                chosen = list(range(num_packs, num_packs + num_new))
                num_packs += num_new
            else:
                each = room // length
                chosen = packs.take(room, -(-(end - first) // each))
            last_each = min(each, end - first - each * (len(chosen) - 1))
            stop = first + each * (len(chosen) - 1) + last_each
            pack_of_rank[first:stop] = np.repeat(np.array(chosen, dtype=np.int32), each)[: stop - first]
            if last_each < each:
                packs.add(room - last_each * length, [chosen.pop()])
            if chosen:
                packs.add(room - each * length, chosen)
            first = stop
    pack_of = np.empty_like(pack_of_rank)
    pack_of[order] = pack_of_rank
    return pack_of, num_packs


class _PacksByRoom:
    """Packs in classes of equal room.

    Best fit drains the smallest class that fits. So a class grows only while it is empty, or while items are still
    larger than its room, and it is enough to sort it once, when the first pack is taken from it.
    """

    def __init__(self) -> None:
        self._rooms: list[int] = []  # rooms of the classes that have packs, ascending
        self._packs: dict[int, list[int]] = {}  # room -> packs, descending once sorted: the lowest pack is taken first
        self._is_sorted: set[int] = set()

    def least_room_for(self, length: int) -> int | None:
        at = bisect_left(self._rooms, length)
        return self._rooms[at] if at < len(self._rooms) else None

    def take(self, room: int, num_packs: int) -> list[int]:
        packs = self._packs[room]
        if room not in self._is_sorted:
            packs.sort(reverse=True)
            self._is_sorted.add(room)
        taken = packs[-num_packs:]
        del packs[-num_packs:]
        if not packs:
            del self._packs[room]
            del self._rooms[bisect_left(self._rooms, room)]
            self._is_sorted.discard(room)
        taken.reverse()
        return taken

    def add(self, room: int, packs: list[int]) -> None:
        # A full pack is never taken again, and would only lengthen every search.
        if room == 0:
            return
        if room not in self._packs:
            self._packs[room] = []
            insort(self._rooms, room)
        self._packs[room].extend(packs)
        self._is_sorted.discard(room)


def exact(lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
    """Open each pack with the oldest item, and fill it to the last token if some subset of the others can."""
    shelf, left = Shelf(capacity, lengths), list(range(len(lengths)))
    groups: Groups = []
    while left:
        inside = fill_around_oldest(shelf, capacity, caps and caps.subset(left))
        groups.append([left[i] for i in inside])
        shelf.take(inside, left)
    return groups


def fill_around_oldest(shelf: Shelf, capacity: int, caps: Caps | None) -> list[int]:
    """Return the fullest pack with the oldest item. If that exceeds a cap, return another pack that does not."""
    inside = shelf.fullest()
    if caps is None or caps.fit(inside):
        return inside
    inside, free, used = [0], capacity - shelf.lengths[0], caps.uses[0]
    for index in _largest_first(shelf.lengths):
        length = shelf.lengths[index]
        total = caps.after(used, index) if index > 0 and length <= free else None
        if total is not None:
            inside.append(index)
            free -= length
            used = total
    return sorted(inside)


def _any_fit(lengths: Sequence[int], order: Sequence[int], capacity: int, caps: Caps, *, best: bool) -> Groups:
    """Run first fit or best fit under caps, by a scan over the open packs: O(items x packs)."""
    groups: Groups = []
    rooms: list[tuple[int, int]] = []  # (free, pack), in order of packs or, for best fit, by `free`
    used: list[tuple[int, ...]] = []
    for index in order:
        length = lengths[index]
        for at in range(bisect_left(rooms, (length, -1)) if best else 0, len(rooms)):
            free, pack = rooms[at]
            total = caps.after(used[pack], index) if free >= length else None
            if total is not None:
                break
        else:
            at, free, pack, total = len(rooms), capacity, len(groups), caps.uses[index]
            groups.append([])
            used.append(total)
            rooms.append((free, pack))
        groups[pack].append(index)
        used[pack] = total
        rooms[at] = (free - length, pack)
        if best:
            rooms.sort()
    return _sorted_groups(groups)


def _largest_first(lengths: Sequence[int]) -> list[int]:
    # Of equal items, older ones come first, so that they leave first. A stable sort keeps that order in reverse, too.
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _sorted_groups(groups: Groups) -> Groups:
    for group in groups:
        group.sort()
    return groups


STRATEGIES: dict[str, Strategy] = {
    "binpack": binpack,
    "greedy": greedy,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "exact": exact,
}


def lower_bound(lengths: Sequence[int] | NDArray[Any], capacity: int) -> int:
    """Return a number of packs that no strategy can go below.

    It is `max(ceil(sum / capacity), Martello-Toth L2)` of the items that fit, plus one pack for every longer item.

    >>> lower_bound([6, 6, 6], 10)  # the tokens would fit into two packs, but the items do not
    3
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    fits = sizes <= capacity
    return _martello_toth(np.bincount(sizes[fits], minlength=capacity + 1), capacity) + int((~fits).sum())


def _martello_toth(count: NDArray[Any], capacity: int) -> int:
    """Compute L2 over all thresholds; `count[w]` items have length w. Threshold 0 gives ceil(sum / capacity)."""
    num_up_to = np.concatenate(([0], np.cumsum(count)))  # [w]: items shorter than w
    sum_up_to = np.concatenate(([0], np.cumsum(count * np.arange(capacity + 1))))
    half = capacity // 2
    threshold = np.arange(half + 1)
    # Items longer than capacity - threshold are alone. Other items above one half have a pack each, and the room that
    # they leave can only be used by items of at least the threshold.
    top = capacity - threshold
    num_alone = num_up_to[-1] - num_up_to[top + 1]
    num_large = num_up_to[top + 1] - num_up_to[half + 1]
    free = num_large * capacity - (sum_up_to[top + 1] - sum_up_to[half + 1])
    small = sum_up_to[half + 1] - sum_up_to[threshold]
    extra = np.maximum(0, -((free - small) // capacity))  # ceil((small - free) / capacity)
    return int((num_alone + num_large + extra).max())
