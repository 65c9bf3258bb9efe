"""Draw the plots of a report with matplotlib, as SVG elements for the page.

A plot is as wide as a phone; a wider window shows two side by side. Colours become the variables of `page.css`, so that
one drawing is right in the light and the dark theme. Texts stay texts, in the font of the page.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import pairwise
from typing import Any, Literal
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from swift_vlpack.pages.safe_text import visible

WIDTH, HEIGHT = 420, 220
"""Size of a plot in its own units; the page scales it to its column."""
MOST_POINTS, NUM_MEANS = 300, 100
"""A line of more than `MOST_POINTS` would be a smear. It is drawn pale, with `NUM_MEANS` means of neighbours on top.
The pale line still shows what means hide, such as a single spike."""
MOST_DOTS = 60
"""Most points of a line for which each point gets a dot."""
LOG_FROM = 20.0
"""Ratio of the highest to the lowest loss from which the axis is logarithmic: on a linear axis up to 2, halving a loss
of 0.1 would move the curve by 2.5 % of the height."""

# matplotlib wants real colours; each is replaced by its variable when the drawing is put into the page.
_VARIABLES = ("fg", "muted", "line", "bad", "c1", "c2", "c3")
_COLORS = {name: f"#0000{number:02x}" for number, name in enumerate(_VARIABLES, 1)}
_SERIES = ("c1", "c2", "c3")
_ROUND = (1, 2, 2.5, 5, 10)
"""Steps between ticks, times a power of ten."""
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
"""Dash patterns, so that lines differ by more than their colour."""
_SETTINGS: Any = {
    # Start from matplotlib's defaults, not the user's: with `text.usetex` in a matplotlibrc every plot would need
    # LaTeX.
    **{name: value for name, value in mpl.rcParamsDefault.items() if not name.startswith("backend")},
    "svg.fonttype": "none",
    "text.parse_math": False,  # `$` in the name of a source is a dollar
    "font.size": 12,
    "text.color": _COLORS["fg"],
    "axes.labelcolor": _COLORS["muted"],
    "axes.edgecolor": _COLORS["line"],
    "grid.color": _COLORS["line"],
    "xtick.color": _COLORS["line"],
    "ytick.color": _COLORS["line"],
    "xtick.labelcolor": _COLORS["fg"],
    "ytick.labelcolor": _COLORS["fg"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}

Point = tuple[float, float | None]
Axis = Literal["share", "rate", "loss"]


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (step, value); None in place of a value is a gap."""

    name: str
    points: Sequence[Point]


@mpl.rc_context(_SETTINGS)
def line_chart(
    title: str, lines: Sequence[Line], axis: Axis, *, span: Sequence[float] = (), resumes: Sequence[float] = ()
) -> str:
    """Draw lines over optimizer steps, at least over the steps of `span`. Returns "" if there is no value.

    The axis of a "share" goes from 0 % to 100 %, that of a "rate" from zero, that of a "loss" over its values. A gap in
    a loss is a step whose loss is no number; a cross at the foot of the plot marks it.
    """
    values = [value for line in lines for _, value in line.points if value is not None]
    if not values:
        return ""
    figure, axes = _empty()
    for number, line in enumerate(lines):
        _draw_line(axes, line, number, label=line.name if len(lines) > 1 else None)
    gaps = [step for line in lines for step, value in line.points if value is None] if axis == "loss" else []
    if gaps:
        foot = axes.get_xaxis_transform()  # x in steps, y in shares of the height
        cross: Any = {"marker": "x", "linestyle": "", "color": _COLORS["bad"], "clip_on": False}
        axes.plot(gaps, [0.0] * len(gaps), transform=foot, label="no number", **cross)
    for at, step in enumerate(resumes):
        label = None if at else "resumed"
        axes.axvline(step, color=_COLORS["muted"], linewidth=1, linestyle=(0, (3, 3)), label=label)
    _limit(axes, axis, values)
    axes.update_datalim([(step, values[0]) for step in span], updatey=False)
    _count(axes.xaxis)
    num_points = max(len(line.points) for line in lines)
    pale = f" (pale: all {num_points:,}; line: means of about {round(num_points / NUM_MEANS):,})"
    axes.set_xlabel("step" + (pale if num_points > MOST_POINTS else ""))
    if len(lines) > 1 or gaps or len(resumes):
        figure.legend(loc="outside upper left", ncols=3)
    return _figure(title, figure, "; ".join(_told(line, axis) for line in lines))


def _draw_line(axes: Axes, line: Line, number: int, label: str | None) -> None:
    color, style = _COLORS[_SERIES[number]], _DASHES[number]
    if len(line.points) > MOST_POINTS:
        axes.plot(*_arrays(line.points), color=color, linewidth=0.8, alpha=0.35, clip_on=False)
    steps, values = _arrays(means(line.points))
    known = [False, *(not math.isnan(value) for value in values), False]
    alone = [at for at in range(len(values)) if known[at + 1] and not known[at] and not known[at + 2]]
    dots = None if len(values) <= MOST_DOTS else alone  # a point between two gaps has no line
    look: Any = {"linewidth": 1.8, "linestyle": style, "marker": "o", "markersize": 3, "markevery": dots}
    # Do not clip: a line along the edge of its axes, such as a fill of 100 %, would be cut in half.
    look["clip_on"] = False
    axes.plot(steps, values, color=color, label=label, **look)


def _arrays(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [math.nan if value is None else value for _, value in points]


def means(points: Sequence[Point]) -> Sequence[Point]:
    """Reduce more than `MOST_POINTS` points to `NUM_MEANS` means of neighbours, each at the step of its last point.

    >>> means([(1, 2.0), (2, None)])
    [(1, 2.0), (2, None)]
    >>> means([(step, float(step)) for step in range(1000)])[:2]
    [(9, 4.5), (19, 14.5)]
    """
    if len(points) <= MOST_POINTS:
        return points
    cuts = [round(at * len(points) / NUM_MEANS) for at in range(NUM_MEANS + 1)]
    groups = [points[start:end] for start, end in pairwise(cuts)]
    known = [(group[-1][0], [value for _, value in group if value is not None]) for group in groups]
    return [(step, sum(values) / len(values) if values else None) for step, values in known]


def _limit(axes: Axes, axis: Axis, values: Sequence[float]) -> None:
    """Choose the limits and ticks of the value axis. Tick labels are exact, never rounded (`_number`)."""
    low, high = min(values), max(values)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=_ROUND))
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    if axis == "share":
        axes.set_ylim(min(0.0, low), max(1.0, high))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    elif axis == "rate":
        axes.set_ylim(min(0.0, low), high * 1.05 or 1.0)
    elif low > 0 and high > LOG_FROM * low:
        axes.set_yscale("log")
        axes.set_ylabel("logarithmic")
        # Up to three decades, powers of ten alone would be too few ticks.
        few = high < 1000 * low
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_number))


def _told(line: Line, axis: Axis) -> str:
    """Describe a line in words, for screen readers."""
    known = [(step, value) for step, value in line.points if value is not None]
    (first, start), (last, end) = known[0], known[-1]
    values = [value for _, value in known]
    shown = _percent if axis == "share" else _rounded
    return (
        f"{line.name} {shown(start)} at step {first:g} and {shown(end)} at step {last:g}, "
        f"between {shown(min(values))} and {shown(max(values))}"
    )


@mpl.rc_context(_SETTINGS)
def bar_chart(title: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Draw a horizontal bar for each name and series, with the share in numbers."""
    if not names:
        return ""
    thick = 14.0
    high = thick * (len(series) + 1.7)
    figure, axes = _empty(len(names) * high + 30)
    for at, name in enumerate(names):
        axes.text(0, at * high + thick / 2, _cut(name), va="center")
    for number, (label, shares) in enumerate(series.items()):
        places = [at * high + (number + 1.5) * thick for at in range(len(names))]
        lengths = [share or 0.0 for share in shares]
        bars = axes.barh(places, lengths, height=thick - 2, color=_COLORS[_SERIES[number]], label=label)
        said = ["" if share is None else f"{share:.1%}" for share in shares]
        axes.bar_label(bars, said, padding=4, fontsize=11)
    most = max((share for shares in series.values() for share in shares if share is not None), default=1.0)
    axes.set_xlim(0, 1.18 * most or 1.0)  # leave room for the number after the longest bar
    axes.set_ylim(len(names) * high, 0)
    axes.set_axis_off()
    figure.legend(loc="outside upper left", ncols=3)
    return _figure(title, figure, "the table of sources has these numbers")


@mpl.rc_context(_SETTINGS)
def histogram(title: str, counts: Mapping[int, int]) -> str:
    """Draw the number of packs by fill in whole per cent."""
    if not counts:
        return ""
    figure, axes = _empty()
    axes.bar(list(counts), list(counts.values()), width=0.9, color=_COLORS["c1"])
    axes.set_xlim(-1, 101)
    axes.set_xticks((0, 25, 50, 75, 100), ("0%", "25%", "50%", "75%", "100%"))
    _count(axes.yaxis)
    most = max(counts, key=lambda fill: counts[fill])
    total = sum(counts.values())
    return _figure(title, figure, f"most often {most}%, {counts[most]:,} of {total:,} packs")


@mpl.rc_context(_SETTINGS)
def segments_chart(title: str, segments: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    """Draw a bar of steps for each segment. Steps that a resume lost are hollow; checkpoints are ticks."""
    if not segments:
        return ""
    high = 34.0
    figure, axes = _empty(len(segments) * high + 40)
    axes.grid(visible=False)
    for number, segment in enumerate(segments):
        above = number * high
        first, kept, last = (float(segment[name]) for name in ("first", "kept", "last"))
        axes.text(0, above + 8, _cut(str(segment["name"])), va="center")
        axes.barh(above + 22, kept - first, left=first, height=10, color=_COLORS["c1"])
        if last > kept:
            hollow: Any = {"facecolor": "none", "edgecolor": _COLORS["c2"], "linestyle": (0, (3, 2))}
            axes.barh(above + 22, last - kept, left=kept, height=10, **hollow)
        axes.vlines(segment["checkpoints"], above + 14, above + 30, color=_COLORS["fg"], linewidth=2)
    axes.set_ylim(len(segments) * high, 0)
    axes.set_xlim(0, max(1, num_steps))
    axes.set_yticks([])
    axes.set_xlabel("step")
    _count(axes.xaxis)
    return _figure(title, figure, "the timeline has these steps")


def _empty(high: float = HEIGHT) -> tuple[Figure, Axes]:
    """Make an empty figure. Not by pyplot, which keeps every figure in memory until it is closed."""
    figure = Figure(figsize=(WIDTH / 72, high / 72), layout="constrained", facecolor="none")
    FigureCanvasSVG(figure)
    axes: Axes = figure.add_subplot(facecolor="none")
    axes.grid(axis="y")
    return figure, axes


def _count(axis: XAxis | YAxis) -> None:
    """Put ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(6, steps=_ROUND, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(_number))


def _number(value: float, _: Any = None) -> str:
    """Write a number as it is: two ticks are never rounded to the same text.

    >>> _number(0.1 + 0.2), _number(12500.0), _number(2.3025)
    ('0.3', '12,500', '2.3025')
    """
    return f"{value:,.10g}"


def _rounded(value: float) -> str:
    return f"{value:,.4g}"


def _percent(value: float, _: Any = None) -> str:
    return f"{_rounded(100 * value)}%"


def _figure(title: str, figure: Figure, told: str) -> str:
    with warnings.catch_warnings():
        # matplotlib's own font lacks some characters. It is used to measure texts only; the page has its own font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        text = StringIO()
        # Salt the ids of elements by the title, not by chance, so that equal reports give equal pages.
        with mpl.rc_context({"svg.hashsalt": title}):
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    label = escape(f"{title}: {told}")
    return (
        f'<figure class="plot"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {figure.get_figheight() * 72:g}" role="img" aria-label="{label}">'
        f"{_inside(text.getvalue())}</svg></figure>"
    )


def _inside(svg: str) -> str:
    """Return a drawing's elements for the page, with the page's colours and font, rounded to a tenth of a pixel."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: _of_page(value) for name, value in element.attrib.items()}
        if element.tag == "g":
            attributes.pop("id", None)  # the same in every drawing, and nothing refers to it
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        element.attrib.clear()
        element.attrib.update(attributes)
        if element.tag != "text":
            element.text = None
        element.tail = None
    # Leave out the drawing's style sheet: inside the page it would apply to every element of the page.
    parts = [part for part in root if part.tag == "g" or (part.tag == "defs" and part.find("style") is None)]
    return "".join(ElementTree.tostring(part, encoding="unicode") for part in parts)


def _of_page(value: str) -> str:
    """Rewrite an attribute for the page. No attribute holds a text of the run, so nothing needs escaping."""
    value = re.sub(r" ?font-family: [^;]*;", "", value)
    for name, color in _COLORS.items():
        value = value.replace(color, f"var(--{name})")
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), " ".join(value.split()))


def _cut(text: str, most: int = 48) -> str:
    """Shorten a name by its beginning, where names of files are alike, and escape what XML cannot hold."""
    text = visible(text).encode(errors="backslashreplace").decode()
    return text if len(text) <= most else f"...{text[3 - most :]}"
