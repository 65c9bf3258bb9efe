"""What `make bench-start` and `bench-loader` share: kinds that take turns, and rows beside their limit.

A machine is rarely quiet. So kinds of run take turns, what disturbs one disturbs the others too, and a value is
compared with the limit of its own turn:

>>> print(row("photos, 2 workers", [260.0, 250.0], Limit("0.8 of encoding", [240.0, 264.0], at_least=True)))
| photos, 2 workers | 255 (250-260) | 0.8 of encoding: 252 (240-264) | 1.02 (0.95-1.08) | yes |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
HEADER = "| measure | measured | limit | measured / limit | reached |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Limit:
    """What a measured value has to reach: one number for every turn, from what was measured in that turn."""

    says: str
    values: Sequence[float]
    at_least: bool = False
    """Whether more is better, as of samples a second."""


def in_turns(kinds: Mapping[str, Callable[[], T]], num_turns: int) -> dict[str, list[T]]:
    """Measure every kind once a turn.

    >>> in_turns({"a": lambda: 1, "b": lambda: 2}, 3)
    {'a': [1, 1, 1], 'b': [2, 2, 2]}
    """
    measured: dict[str, list[T]] = {kind: [] for kind in kinds}
    for _ in range(num_turns):
        for kind, measure in kinds.items():
            measured[kind].append(measure())
    return measured


def cell(values: Sequence[float], digits: int | None = None) -> str:
    """Return the median, and the least and the most. Numbers of 100 and more have no digits after the point.

    >>> cell([7.25, 6.0, 9.5]), cell([612.0]), cell([0.913], digits=2), cell([])
    ('7.2 (6.0-9.5)', '612', '0.91', '-')
    """
    if not values:
        return "-"
    middle = statistics.median(values)
    digits = (0 if middle >= 100 else 1) if digits is None else digits
    spread = f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{middle:.{digits}f}{spread}"


def quotients(values: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Return each value over the limit of its turn.

    >>> quotients([9.0, 12.0], [10.0, 10.0])
    [0.9, 1.2]
    """
    return [value / limit for value, limit in zip(values, limits, strict=True)]


def is_reached(values: Sequence[float], limit: Limit) -> bool:
    """Return whether the middle one of the turns reached its limit.

    >>> is_reached([9.0, 12.0, 9.5], Limit("10 s", [10.0, 10.0, 10.0]))
    True
    """
    middle = statistics.median(quotients(values, limit.values))
    return middle >= 1 if limit.at_least else middle <= 1


def row(measure: str, values: Sequence[float], limit: Limit | None = None, digits: int | None = None) -> str:
    """Return a line of the table under `HEADER`; without a limit, the line only says what was measured.

    >>> print(row("un-packed, s", [5.7, 5.9, 6.4]))
    | un-packed, s | 5.9 (5.7-6.4) | - | - | - |
    """
    cells = [measure, cell(values, digits), "-", "-", "-"]
    if limit is not None:
        share = cell(quotients(values, limit.values), digits=2)
        cells[2:] = [f"{limit.says}: {cell(limit.values, digits)}", share, "yes" if is_reached(values, limit) else "no"]
    return f"| {' | '.join(cells)} |"
