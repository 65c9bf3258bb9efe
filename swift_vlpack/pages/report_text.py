"""The report in a terminal, by rich: in colour on a terminal, plain in a file or a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from itertools import pairwise
from typing import IO, Any

from swift_vlpack.pages.sections import Report, Section, sections

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_BLOCKS = 60
_WIDTH_OF_NO_TERMINAL = 120


def print_report(report: Report, file: IO[str]) -> None:
    """Write it."""
    from rich.console import Console

    if file.isatty():
        _print(Console(file=file, highlight=False, markup=False), report)
        return
    plain = StringIO()
    _print(Console(file=plain, highlight=False, markup=False, width=_WIDTH_OF_NO_TERMINAL, color_system=None), report)
    # rich fills every line up to its width.
    file.write("".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines()))


def _print(console: Any, report: Report) -> None:
    for section in sections(report):
        console.print(section.title, style="bold")
        _print_lines(console, section)
        if section.title == "Trained":
            _print_curves(console, report["series"])
        if section.rows:
            console.print(_table(section))
        console.print()


def _print_lines(console: Any, section: Section) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=12, style="cyan")
    grid.add_column(overflow="fold")
    for label, text in section.lines:
        grid.add_row(Text(f"  {label}"), Text(text))
    if section.lines:
        console.print(grid)


def _print_curves(console: Any, series: Sequence[Report]) -> None:
    """The course of some numbers, a block for each note, or for several."""
    for name, key in (("fill", "fill"), ("tokens/s", "tokens_per_second"), ("loss", "loss")):
        values = [point[key] for point in series if point[key] is not None]
        if len(values) > 1:
            curve = sparkline(values)
            console.print(f"  {name:<10} {curve}  {min(values):,.4g} to {max(values):,.4g}", style="dim")


def sparkline(values: Sequence[float], most: int = _MOST_BLOCKS) -> str:
    """Values as blocks of eight heights, the least the lowest; where there are too many, means of neighbours.

    >>> sparkline([0, 1, 2, 7]), sparkline([1, 1, 7, 7], most=2), sparkline([3, 3])
    ('▁▂▃█', '▁█', '▁▁')
    """
    num = min(most, len(values))
    cuts = [round(at * len(values) / num) for at in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round((mean - low) / span * 7) if span else 0] for mean in means)


def _table(section: Section) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for at, name in enumerate(section.columns):
        table.add_column(name, justify="left" if at < section.num_texts else "right", overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table
