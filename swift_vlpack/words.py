"""Put counts into words, and suggest a known name for a mistyped one.

>>> counted(1, "pack"), counted(2, "pack"), counted(0, "pack cut in two", "packs cut in two")
('1 pack', '2 packs', '0 packs cut in two')
>>> by_reason({"oversize": 2, "file_missing": 1}), by_reason({})
('oversize 2, file_missing 1', 'none')
>>> did_you_mean("lorra", ("full", "lora")), did_you_mean("x", ("full", "lora"))
('; did you mean lora?', '')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

INSTALL = "`pip install .` in a checkout of swift_vlpack"
"""How to install, from a checkout: the package is on no index yet, where anybody could take its name."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number and a noun, in singular or plural."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def by_reason(counts: Mapping[str, int]) -> str:
    """Return reasons with their counts, or `none`."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the end of an error about a mistyped name: the closest known name, or nothing if none is close."""
    close = get_close_matches(str(given), sorted(set(known)), n=1)
    return f"; did you mean {close[0]}?" if close else ""
