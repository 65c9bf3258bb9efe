"""Define items, which go into the packer, and packs, which come out. Also decide which items cannot share a pack.

>>> pack = Pack((Item("a", 6), Item("b", 4)))
>>> pack.ids, pack.num_tokens, pack.boundaries.cu_seqlens
(('a', 'b'), 10, (0, 6, 10))
>>> config = PackingConfig(packing_length=10, packing_max_images=2, packing_strategy="exact")
>>> [must_be_alone(*size, config) for size in ((9, 2, 0), (10, 0, 0))]
[False, True]
>>> [is_single_long(*size, config) for size in ((10, 0, 0), (11, 0, 0), (4, 3, 0))]
[False, True, True]

The rules about sizes work on single numbers, for the packer, and on arrays with an entry for each item, for plans.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.reasons import Reason

ItemId = int | str | tuple[Any, ...]


class Item(NamedTuple):
    """An id with numbers, never a tensor, to be placed in a pack.

    Today an item is a sample. Samples that have to stay together (a prefix with its branches, a chosen and a rejected
    answer) would be one item, with the sum of their sizes.
    """

    id: ItemId
    length: int
    images: int = 0
    patches: int = 0

    def checked(self) -> Item:
        """Return the item with plain integers. Raises `DataError`, which names the item."""
        numbers = [
            _whole(self.length, 1, f"item {self.id!r}: length"),
            _whole(self.images, 0, f"item {self.id!r}: images"),
            _whole(self.patches, 0, f"item {self.id!r}: patches"),
        ]
        return Item(self.id, *numbers)


class Pack(NamedTuple):
    """The items that share one sequence, in the order in which they arrived."""

    items: tuple[Item, ...]
    single_long: bool = False
    """True if the pack is one item that exceeds the capacity."""

    @property
    def ids(self) -> tuple[ItemId, ...]:
        """Return the ids of the items."""
        return tuple(item.id for item in self.items)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of the sequence, without padding."""
        return sum(item.length for item in self.items)

    @property
    def boundaries(self) -> Boundaries:
        """Return the boundaries of the samples in the sequence."""
        return Boundaries(tuple(item.length for item in self.items))


def is_single_long(length: Any, images: Any, patches: Any, config: PackingConfig) -> Any:
    """Tell whether an item exceeds a capacity of a pack. An item of exactly the capacity is simply a full pack."""
    return (length > config.packing_length) | exceeds_a_cap(images, patches, config)


def must_be_alone(length: Any, images: Any, patches: Any, config: PackingConfig) -> Any:
    """Tell whether an item cannot share a pack, because it fills a pack or exceeds a cap."""
    return (length >= config.packing_length) | exceeds_a_cap(images, patches, config)


def is_left_out(length: Any, images: Any, patches: Any, config: PackingConfig) -> Any:
    """Tell whether an item is in no pack: it cannot share one, and `packing_allow_single_long` is off."""
    if config.packing_allow_single_long:
        return length < 0
    if not config.cuts_rows:
        return must_be_alone(length, images, patches, config)
    # A part of exactly `packing_length` is what cutting aims at: a full pack, not a long sample.
    return is_single_long(length, images, patches, config)


def why_alone(length: int, images: int, patches: int, config: PackingConfig) -> Reason | None:
    """Return the reason why an item cannot share a pack; None if it can."""
    if length >= config.packing_length:
        return Reason.OVERSIZE
    return Reason.OVER_CAP if exceeds_a_cap(images, patches, config) else None


def exceeds_a_cap(images: Any, patches: Any, config: PackingConfig) -> Any:
    """Tell whether an item has more images or patches than a whole pack may hold."""
    exceeds: Any = False
    for used, cap in ((images, config.packing_max_images), (patches, config.packing_max_patches)):
        if cap is not None:
            exceeds = exceeds | (used > cap)
    return exceeds


def _whole(value: object, least: int, what: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise DataError(f"{what} must be an integer, got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < least:
        raise DataError(f"{what} must be at least {least}, got {number}")
    return number
