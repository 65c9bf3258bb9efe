"""Counts as a reader expects them.

>>> counted(1, "pack"), counted(2, "pack"), counted(0, "pack cut in two", "packs cut in two")
('1 pack', '2 packs', '0 packs cut in two')
>>> by_reason({"oversize": 2, "file_missing": 1}), by_reason({})
('oversize 2, file_missing 1', 'none')
"""

from __future__ import annotations

from collections.abc import Mapping


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with what it counts."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def by_reason(counts: Mapping[str, int]) -> str:
    """Reasons with how often."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"
