"""What travels through the core: items in, packs out, a reason for everything that is left behind."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

from swift_vlpack.errors import DataError
from swift_vlpack.plan.boundaries import Boundaries

ItemId = int | str | tuple[Any, ...]


class Item(NamedTuple):
    """One sample as the packer sees it: a name and numbers, never a tensor."""

    id: ItemId
    length: int
    images: int = 0
    patches: int = 0

    def checked(self) -> Item:
        """Return the item with plain integers, or raise an error that names it."""
        numbers = [
            _whole(self.length, 1, f"item {self.id!r}: length"),
            _whole(self.images, 0, f"item {self.id!r}: images"),
            _whole(self.patches, 0, f"item {self.id!r}: patches"),
        ]
        return Item(self.id, *numbers)


class Pack(NamedTuple):
    """The items that share one row, in the order in which they arrived."""

    items: tuple[Item, ...]
    single_long: bool = False
    """One item that exceeds the capacity, alone in its pack."""

    @property
    def ids(self) -> tuple[ItemId, ...]:
        """The items' ids."""
        return tuple(item.id for item in self.items)

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, without padding."""
        return sum(item.length for item in self.items)

    @property
    def boundaries(self) -> Boundaries:
        """Where the samples start."""
        return Boundaries(tuple(item.length for item in self.items))


def _whole(value: object, least: int, what: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise DataError(f"{what} must be an integer, got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < least:
        raise DataError(f"{what} must be at least {least}, got {number}")
    return number
