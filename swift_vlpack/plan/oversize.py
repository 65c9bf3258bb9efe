"""Which items are alone in their pack, and which of these exceed it: one definition for plan, packer and report.

>>> config = PackingConfig(packing_length=10, packing_max_images=2, packing_strategy="exact")
>>> [is_single_long(*size, config) for size in ((10, 0, 0), (11, 0, 0), (4, 3, 0))]
[False, True, True]
>>> [must_be_alone(*size, config) for size in ((9, 2, 0), (10, 0, 0))]
[False, True]

Both take single numbers as well as arrays of them, one entry an item; None is a column that nobody has counted.
"""

from __future__ import annotations

from typing import Any

from swift_vlpack.config import PackingConfig
from swift_vlpack.reasons import Reason


def is_single_long(length: Any, images: Any, patches: Any, config: PackingConfig) -> Any:
    """Whether an item exceeds a capacity of a pack; one that fills it exactly is simply a full pack."""
    return (length > config.packing_length) | exceeds_a_cap(images, patches, config)


def must_be_alone(length: Any, images: Any, patches: Any, config: PackingConfig) -> Any:
    """Whether an item cannot share a pack: without `packing_allow_single_long` it is left out."""
    return (length >= config.packing_length) | exceeds_a_cap(images, patches, config)


def is_left_out(length: Any, images: Any, patches: Any, config: PackingConfig) -> Any:
    """Whether an item is in no pack, as it cannot share one and `packing_allow_single_long` is off.

    Where rows are cut, one of exactly `packing_length` is what cutting made, and simply a full pack.
    """
    if config.packing_allow_single_long:
        return length < 0
    if not config.cuts_rows:
        return must_be_alone(length, images, patches, config)
    return is_single_long(length, images, patches, config)


def why_alone(length: int, images: int, patches: int, config: PackingConfig) -> Reason | None:
    """Why an item cannot share a pack, if it cannot."""
    if length >= config.packing_length:
        return Reason.OVERSIZE
    return Reason.OVER_CAP if exceeds_a_cap(images, patches, config) else None


def exceeds_a_cap(images: Any, patches: Any, config: PackingConfig) -> Any:
    """Whether an item has more images or patches than a whole pack may hold."""
    exceeds: Any = False
    for used, cap in ((images, config.packing_max_images), (patches, config.packing_max_patches)):
        if cap is not None and used is not None:
            exceeds = exceeds | (used > cap)
    return exceeds
