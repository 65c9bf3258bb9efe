"""Plots as SVG in the text of a page: colours are the page's variables, so they are right in light and dark.

Small on purpose: a plot is as wide as a phone, and two stand side by side where there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

WIDTH, HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 30
_NUM_TICKS = 4
MOST_POINTS = 300
"""Of a line: more than there are places, and a page of a long run would be many MB."""
_DASHES = ("", "6 3", "2 3")
"""Lines are told apart by more than their colour."""


Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """A series by step; None is a gap."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
        span = (self.high - self.low) or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)


def line_chart(
    title: str, lines: Sequence[Line], *, is_share: bool = False, marks: Sequence[tuple[float, str]] = ()
) -> str:
    """Lines over optimizer steps; `marks` are steps with what happened there."""
    lines = [Line(line.name, thinned(line.points)) for line in lines]
    points = [point for line in lines for point in line.points]
    values = [value for _, value in points if value is not None]
    if not values:
        return ""
    steps = [step for step, _ in points]
    x = Scale(min(steps), max(steps), _LEFT, WIDTH - _RIGHT)
    top = 1.0 if is_share else _round_up(max(values))
    y = Scale(0.0, max(top, *values), HEIGHT - _BOTTOM, _TOP)
    parts = [_y_axis(y, is_share), _x_axis(x)]
    parts += [_mark(x(step), said) for step, said in marks]
    for number, line in enumerate(lines):
        parts.append(_line(line, number, x, y, is_share))
    return _figure(title, _legend(lines), "".join(parts), HEIGHT)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """At most so many points: means of neighbours, each at the step of the last of them.

    >>> thinned([(1, 2.0), (2, 4.0), (3, None), (4, 8.0)], most=2)
    [(2, 3.0), (4, 8.0)]
    """
    if len(points) <= most:
        return points
    cuts = [round(at * len(points) / most) for at in range(most + 1)]
    groups = [points[start:end] for start, end in pairwise(cuts)]
    known = [(group[-1][0], [value for _, value in group if value is not None]) for group in groups]
    return [(step, sum(values) / len(values) if values else None) for step, values in known]


def bar_chart(title: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Shares of each name, one bar for each series, lying."""
    if not names:
        return ""
    thick, gap = 14, 26
    rows, parts = len(series), []
    high = len(names) * (rows * thick + gap) + 6
    top = max([value for values in series.values() for value in values if value is not None] or [1.0]) or 1.0
    x = Scale(0.0, top, 4, WIDTH - 60)
    for at, name in enumerate(names):
        above = at * (rows * thick + gap)
        parts.append(f'<text x="4" y="{above + 14}">{escape(_cut(name))}</text>')
        for number, (label, values) in enumerate(series.items()):
            parts.append(_bar(values[at], f"{name}, {label}", x, above + 19 + number * thick, number, thick))
    return _figure(title, _legend([Line(name, ()) for name in series], is_bar=True), "".join(parts), high)


def histogram(title: str, counts: Mapping[int, int]) -> str:
    """How many packs have which fill, in whole per cent."""
    if not counts:
        return ""
    most = -(-max(counts.values()) // _NUM_TICKS) * _NUM_TICKS  # whole packs at every tick
    x, y = Scale(0, 101, _LEFT, WIDTH - _RIGHT), Scale(0, most, HEIGHT - _BOTTOM, _TOP)
    wide = (WIDTH - _RIGHT - _LEFT) / 101
    bars = "".join(
        f'<rect x="{x(fill)}" y="{y(number)}" width="{max(wide - 0.5, 2):.1f}" '
        f'height="{HEIGHT - _BOTTOM - y(number):.1f}" fill="var(--c1)"><title>{fill}%: {number} packs</title></rect>'
        for fill, number in sorted(counts.items())
    )
    ticks = "".join(_x_label(x(at + 0.5), f"{at}%") for at in (0, 25, 50, 75, 100))
    return _figure(title, "", _y_axis(y, is_share=False) + ticks + bars, HEIGHT)


def legs_chart(title: str, legs: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    """One bar for each leg over steps; what was lost behind a checkpoint is hollow, checkpoints are ticks."""
    if not legs:
        return ""
    row, x = 34, Scale(0, max(1, num_steps), 4, WIDTH - _RIGHT)
    parts = []
    for number, leg in enumerate(legs):
        above = number * row
        first, kept, last = (float(leg[name]) for name in ("first", "kept", "last"))
        parts.append(f'<text x="4" y="{above + 12}">{escape(_cut(str(leg["name"])))}</text>')
        parts.append(_segment(x(first), x(kept), above + 17, 'fill="var(--c1)"'))
        hollow = 'fill="none" stroke="var(--c2)" stroke-dasharray="3 2"'
        parts.append(_segment(x(kept), x(last), above + 17, hollow) if last > kept else "")
        parts += [_tick(x(step), above + 14, f"checkpoint-{step}") for step in leg["checkpoints"]]
    high = len(legs) * row + 24
    parts += [_x_label(x(at), f"{at:g}", high) for at in (0, max(1, num_steps))]
    return _figure(title, "", "".join(parts), high)


def _tick(place: float, above: float, said: str) -> str:
    return f'<path d="M{place} {above}v15" stroke="var(--fg)" stroke-width="2"><title>{escape(said)}</title></path>'


def _segment(start: float, end: float, above: float, look: str) -> str:
    return f'<rect x="{start}" y="{above}" width="{max(end - start, 1):.1f}" height="9" {look}></rect>'


def _bar(value: float | None, said: str, x: Scale, above: float, number: int, thick: float) -> str:
    if value is None:
        return ""
    shown = f"{value:.1%}"
    return (
        f'<rect x="4" y="{above}" width="{max(x(value) - 4, 1):.1f}" height="{thick - 2}" fill="var(--c{number + 1})">'
        f"<title>{escape(said)}: {shown}</title></rect>"
        f'<text x="{x(value) + 5}" y="{above + thick - 3}" style="font-size:11px">{shown}</text>'
    )


def _line(line: Line, number: int, x: Scale, y: Scale, is_share: bool) -> str:
    color, dash = f"var(--c{number + 1})", _DASHES[number % len(_DASHES)]
    known = [(step, value) for step, value in line.points if value is not None]
    gaps = {step for step, value in line.points if value is None}
    path = f"M{x(known[0][0])} {y(known[0][1])}" if known else ""
    for (before, _), (step, value) in pairwise(known):
        is_joined = not any(before < gap < step for gap in gaps)
        path += f"{'L' if is_joined else 'M'}{x(step)} {y(value)}"
    dots = "".join(
        f'<circle cx="{x(step)}" cy="{y(value)}" r="{2.5 if len(known) < 60 else 1.2}" fill="{color}">'
        f"<title>{escape(line.name)}, step {step:g}: {_shown(value, is_share)}</title></circle>"
        for step, value in known
    )
    look = f'fill="none" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dash}"'
    return f'<path d="{path}" {look}></path>{dots}'


def _mark(place: float, said: str) -> str:
    return (
        f'<path d="M{place} {_TOP}V{HEIGHT - _BOTTOM}" stroke="var(--muted)" stroke-dasharray="3 3">'
        f"<title>{escape(said)}</title></path>"
    )


def _y_axis(y: Scale, is_share: bool) -> str:
    found = ""
    for number in range(_NUM_TICKS + 1):
        value = y.low + (y.high - y.low) * number / _NUM_TICKS
        found += f'<path d="M{_LEFT} {y(value)}H{WIDTH - _RIGHT}" stroke="var(--line)"></path>'
        found += f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{_shown(value, is_share)}</text>'
    return found


def _x_axis(x: Scale) -> str:
    ends = sorted({x.low, x.high})
    return "".join(_x_label(x(value), f"{'step ' if value == ends[0] else ''}{value:g}") for value in ends)


def _x_label(place: float, said: str, high: float = HEIGHT) -> str:
    anchor = "start" if place < _LEFT + 4 else "end" if place > WIDTH - _RIGHT - 12 else "middle"
    return f'<text x="{place}" y="{high - 10}" text-anchor="{anchor}">{escape(said)}</text>'


def _shown(value: float, is_share: bool) -> str:
    if is_share:
        return f"{value:.0%}" if value in (0, 0.25, 0.5, 0.75, 1) else f"{value:.1%}"
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _round_up(value: float) -> float:
    """The next number with one digit that counts, or with 1.5 or 2.5 before its zeros."""
    scale = 1.0
    while value > 10 * scale:
        scale *= 10
    while 0 < value <= scale:
        scale /= 10
    return next((step * scale for step in (1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if value <= step * scale), value)


def _legend(lines: Sequence[Line], is_bar: bool = False) -> str:
    if len(lines) < 2:
        return ""
    keys = []
    for number, line in enumerate(lines):
        look = f'stroke="var(--c{number + 1})" stroke-width="{8 if is_bar else 2}"'
        dash = "" if is_bar else f' stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
        key = f'<svg width="24" height="10" aria-hidden="true"><path d="M0 5H24" {look}{dash}></path></svg>'
        keys.append(f"<span>{key} {escape(line.name)}</span>")
    return f'<div class="legend">{"".join(keys)}</div>'


def _figure(title: str, legend: str, inside: str, high: float) -> str:
    return (
        f'<figure class="plot"><figcaption>{escape(title)}</figcaption>{legend}'
        f'<svg viewBox="0 0 {WIDTH} {high}" role="img" aria-label="{escape(title)}">{inside}</svg></figure>'
    )


def _cut(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"
