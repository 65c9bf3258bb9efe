"""Find the fullest pack that contains the oldest item (`packing_strategy=exact`).

>>> fill_oldest([6, 3, 5, 4], 10)
[0, 3]

Of equally full packs, the one with the oldest items wins: its newest item is as old as possible, then its second
newest, and so on. So there is exactly one answer. There are three ways to find it, each quick where the others are
slow:

  - `_leaving_out`  takes items in order until they overfill the pack, and finds which of them to leave out. The excess
                    is a few hundred tokens, however large the pack is. For many items in a pack.
  - `_putting_in`   keeps the sums of all subsets up to the size of the pack. For a few items in a pack.
  - `_with_one_long`  tries the few subsets of short items, each with the longest item that still fits. For lengths of
                    which two or three make a pack: mostly no subset fills it, so the others would search all of them.

The sums of subsets are the bits of one integer. One shift adds an item to all subsets at once, and sums that do not fit
are shifted out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

_MOST_OVER = 8
"""Largest excess over the pack, in items of mean length, for which `_leaving_out` is tried."""
_MOST_SHORT, _MOST_SUBSETS = 15, 128
"""Most short items, and most subsets of them, that are tried one by one. With more it is quicker to search all sums."""


def fill_oldest(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return the ascending indices of the fullest pack with item 0; of equally full packs, the one of oldest items."""
    return Shelf(capacity, lengths).fullest()


class Shelf:
    """Waiting lengths, oldest first, among which the fullest pack with the oldest one is found.

    >>> shelf = Shelf(10, [6, 3, 5, 4])
    >>> shelf.take(shelf.fullest())
    >>> shelf.lengths
    [3, 5]
    """

    def __init__(self, capacity: int, lengths: Iterable[int] = ()) -> None:
        self.lengths = list(lengths)
        self._capacity = capacity
        # The lengths in ascending order; kept from a search that finds no full pack until one that finds one.
        self._ascending: list[int] | None = None

    def add(self, lengths: Iterable[int]) -> None:
        """Append lengths, which are newer than all others."""
        at = len(self.lengths)
        self.lengths.extend(lengths)
        if self._ascending is not None:
            for length in islice(self.lengths, at, None):
                insort(self._ascending, length)

    def take(self, indices: Sequence[int], *beside: list[Any]) -> None:
        """Remove the lengths at these ascending indices, and the elements of the lists `beside` at the same indices."""
        if self._ascending is not None:
            for index in indices:
                del self._ascending[bisect_left(self._ascending, self.lengths[index])]
        stop = indices[-1] + 1
        if stop > 4 * len(indices):  # few of many: delete them one by one, otherwise copy the rest
            for index in reversed(indices):  # from the end, so that the other indices stay right
                for values in (self.lengths, *beside):
                    del values[index]
            return
        inside = set(indices)
        left = [index for index in range(stop) if index not in inside]
        for values in (self.lengths, *beside):
            values[:stop] = [values[index] for index in left]

    def put_oldest_last(self) -> None:
        """Make the oldest length the newest one."""
        self.lengths.append(self.lengths.pop(0))

    def fullest(self) -> list[int]:
        """Return the ascending indices of the fullest pack that contains the oldest length."""
        lengths, capacity = self.lengths, self._capacity
        if self._ascending is not None:
            oldest = bisect_left(self._ascending, lengths[0])
            del self._ascending[oldest]
            inside = _with_one_long(lengths, self._ascending, capacity)
            self._ascending.insert(oldest, lengths[0])
            if inside is not None:
                return inside
        inside, is_full = _leaving_out(lengths, capacity) or _putting_in(lengths, capacity)
        if is_full:
            self._ascending = None
        elif self._ascending is None:
            self._ascending = sorted(lengths)
        return inside


def _leaving_out(lengths: Sequence[int], capacity: int) -> tuple[list[int], bool] | None:
    """Return (fullest pack, whether it is full); None if more than a few tokens would have to be left out.

    The pack has the first items, without those that are left out. So it is full if these add up to the excess.
    """
    room = capacity - lengths[0]  # if negative, the excess over the pack
    num_first = 1
    for length in islice(lengths, 1, None):
        room -= length
        num_first += 1
        if room <= 0:
            break
    else:
        return list(range(len(lengths))), False  # all of them fit
    most_over = _MOST_OVER * capacity // num_first
    if most_over >= capacity:
        return None
    sums = 1 << most_over  # bit `most_over - s` is set if some subset has s tokens
    trail = [sums]  # one integer for each item, to walk back from a sum to the items that make it
    append = trail.append
    for length in islice(lengths, 1, num_first):
        sums |= sums >> length
        append(sums)
    others = islice(lengths, num_first, None)
    while room >= -most_over and not (sums >> (most_over + room)) & 1:
        length = next(others, most_over + 1)
        sums |= sums >> length
        append(sums)
        room -= length
    if room < -most_over:
        return None
    index = len(trail)
    inside = list(range(index))
    while room:
        index -= 1
        # Go from the newest: leave an item out if all others that have to be left out can be older.
        rest = room + lengths[index]
        if rest <= 0 and (trail[index - 1] >> (most_over + rest)) & 1:
            del inside[index]
            room = rest
    return inside, True


def _putting_in(lengths: Sequence[int], capacity: int) -> tuple[list[int], bool]:
    """Return (fullest pack, whether it is full), from the sums of all subsets of the other items."""
    room = capacity - lengths[0]
    reachable = 1 << room  # bit r is set if some subset leaves r tokens free
    trail = [reachable]
    append = trail.append
    for length in islice(lengths, 1, None):
        if length <= room:
            reachable |= reachable >> length
        append(reachable)
        if reachable & 1:  # nothing is free, so no later item can do better
            break
    # The lowest set bit is the least room that some subset leaves.
    free = (reachable & -reachable).bit_length() - 1
    is_full = free == 0
    inside = []
    for index in range(len(trail) - 1, 0, -1):
        if not (trail[index - 1] >> free) & 1:  # the sum cannot be reached without this item
            inside.append(index)
            free += lengths[index]
            if free == room:
                break
    inside.append(0)
    inside.reverse()
    return inside, is_full


def _with_one_long(lengths: Sequence[int], ascending: Sequence[int], capacity: int) -> list[int] | None:
    """Return the fullest pack; None if there are too many subsets of short items to try them one by one.

    Two items longer than half of the room do not fit together, so a pack has some short items and at most one long
    item. `ascending` has all lengths but the oldest one.
    """
    room = capacity - lengths[0]
    num_short = bisect_right(ascending, room // 2)
    if num_short > _MOST_SHORT:
        return None
    subsets: list[tuple[int, tuple[int, ...]]] = [(room, ())]  # the room that is left, and the lengths inside
    for length in islice(ascending, num_short):
        subsets += [(left - length, (*inside, length)) for left, inside in subsets if left >= length]
        if len(subsets) > _MOST_SUBSETS:
            return None
    least = room + 1
    fullest: set[tuple[int, ...]] = set()
    for left, inside in subsets:
        at = bisect_right(ascending, left)
        if at > num_short:  # the longest item that still fits
            left, inside = left - ascending[at - 1], (*inside, ascending[at - 1])
        if left <= least:
            if left < least:
                least = left
                fullest.clear()
            fullest.add(inside)
    return [0, *reversed(min(_newest_first(lengths, inside) for inside in fullest))]


def _newest_first(lengths: Sequence[int], inside: Sequence[int]) -> list[int]:
    """Return the indices of the oldest items with these lengths, in descending order. Item 0 is not among them."""
    places: list[int] = []
    for number, length in enumerate(inside):
        # `inside` ascends, so equal lengths follow one another.
        is_again = number and inside[number - 1] == length
        places.append(lengths.index(length, places[-1] + 1 if is_again else 1))
    places.sort(reverse=True)
    return places
