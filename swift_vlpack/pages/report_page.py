"""Write the report of a run as an HTML page: tiles of numbers, lines over steps, facts and tables of `report.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from swift_vlpack.pages.page import page, subject
from swift_vlpack.pages.report import Report, Section, grouped, percent, sections, state
from swift_vlpack.pages.safe_text import texts_changed, without_home

Point = tuple[float, float | None]
WIDTH, LEFT, TOP, BOTTOM = 420, 66, 12, 132
"""Places of a drawing in its own units; the page scales it to its column."""
STYLE = """
.lines { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.line { margin: 0; padding: .6rem .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.line svg { display: block; width: 100%; }
.line figcaption { font-weight: 600; margin-bottom: .3rem; }
.line path { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line text { font-size: 14px; }
.line .axis { stroke: var(--line); stroke-width: 1; }
.line .values { stroke: var(--c1); }
.line .cross { stroke: var(--bad); }
.tiles { display: grid; gap: .8rem; margin: 1rem 0; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }
.tile { padding: .6rem .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0; }
dl.facts dt { color: var(--muted); }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll td:not(.n) { overflow-wrap: break-word; min-width: 6rem; }
@media (max-width: 30rem) { dl.facts { grid-template-columns: 1fr; gap: 0; } dl.facts dd { margin-bottom: .4rem; } }
"""


def report_page(report: Report) -> str:
    """Return the page. Paths are relative to the run's parent folder, because pages are read on other machines."""
    folder = Path(report["folder"]).resolve()
    name = subject(report["run"]["model"], report["sources"])
    above = f"{folder.parent}/" if folder.parent.name else ""
    report = texts_changed(report, lambda text: without_home(text.replace(above, "")))
    parts = [f"<p>{escape(state(report))}</p>", _tiles(report), _lines(report)]
    parts += [_section(section) for section in sections(report)]
    return page(f"Report: {name} ({folder.name})" if name else f"Report: {folder.name}", "\n".join(parts), STYLE)


def _tiles(report: Report) -> str:
    trained, unpacked = report["trained"], report["unpacked"]
    shared = trained["shared"]
    tiles = [
        ("fill", percent(trained["fill_mean"])),
        ("padding saved", percent(unpacked["padding_saved"])),
        *([("tokens saved by sharing", grouped(shared["num_shared_tokens"]))] if shared else []),
        ("tokens a second", grouped(trained["tokens_per_second"]) if trained["tokens_per_second"] else "-"),
        ("tokens", grouped(trained["num_tokens"])),
        ("samples", grouped(trained["num_samples"])),
        ("rows left out", grouped(report["left_out"]["num_rows"])),
    ]
    inside = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in tiles)
    return f'<div class="tiles">{inside}</div>'


# -- lines ------------------------------------------------------------------------------------------------------------


def _lines(report: Report) -> str:
    """Draw fill, speed and loss over the same steps."""
    series, without_loss = report["series"], set(report["steps_without_loss"])
    if not series:
        return ""
    steps = series[0]["step"], series[-1]["step"]
    fills = [(point["step"], point["fill"]) for point in series if point["fill"] is not None]
    speeds = [(point["step"], point["tokens_per_second"]) for point in series]
    logged = [point for point in series if point["loss"] is not None or point["step"] in without_loss]
    losses = [(point["step"], point["loss"]) for point in logged]
    drawn = (
        line("Fill of packs", fills, steps, percent, within=(0.0, 1.0)),
        line("Tokens a second", speeds, steps, grouped, within=(0.0,)),
        line("Loss", losses, steps, "{:,.4g}".format),
    )
    return f'<div class="lines">{"".join(drawn)}</div>'


def line(
    title: str,
    points: Sequence[Point],
    steps: tuple[float, float],
    shown: Callable[[float], str],
    *,
    within: Sequence[float] = (),
) -> str:
    """Draw values over steps, with the values of `within` on the axis. Returns "" if no value is known.

    None in place of a value is a gap with a cross at its step: the value is no number.
    """
    values = [value for _, value in points if value is not None]
    if not values:
        return ""
    low, high = min((*values, *within)), max((*values, *within))
    first, last = steps

    def x(step: float) -> str:
        return f"{LEFT + (step - first) / ((last - first) or 1) * (WIDTH - LEFT - 8):.1f}"

    def y(value: float) -> str:
        return f"{BOTTOM - (value - low) / ((high - low) or 1) * (BOTTOM - TOP):.1f}"

    path, is_gap = [], True
    for step, value in points:
        if value is not None:
            # The step of no length draws a dot, where both neighbours are gaps.
            path.append(f"M{x(step)} {y(value)}h0" if is_gap else f"L{x(step)} {y(value)}")
        is_gap = value is None
    gaps = [step for step, value in points if value is None]
    crosses = "".join(f"M{x(step)} {BOTTOM}m-3-3l6 6m0-6l-6 6" for step in gaps)
    told = f"{shown(values[0])}, at last {shown(values[-1])}, from {shown(min(values))} to {shown(max(values))}"
    texts = (
        (LEFT - 6, TOP + 4, "end", shown(high)),
        (LEFT - 6, BOTTOM + 4, "end", shown(low)),
        (LEFT, BOTTOM + 20, "start", f"step {first}"),
        (WIDTH - 8, BOTTOM + 20, "end", f"{last}"),
    )
    labels = "".join(f'<text x="{at}" y="{on}" text-anchor="{side}">{text}</text>' for at, on, side, text in texts)
    return (
        f'<figure class="line"><figcaption>{title}{" (x: no number)" if gaps else ""}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {BOTTOM + 28}" role="img" aria-label="{title}: {told}">'
        f'<path class="axis" d="M{LEFT} {TOP}H{WIDTH - 8}M{LEFT} {BOTTOM}H{WIDTH - 8}"/>{labels}'
        f'<path class="cross" d="{crosses}"/><path class="values" d="{"".join(path)}"/></svg></figure>'
    )


# -- sections ---------------------------------------------------------------------------------------------------------


def _section(section: Section) -> str:
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in section.lines)
    parts = [f"<h2>{escape(section.title)}</h2>", f'<dl class="facts">{facts}</dl>' if facts else ""]
    if section.rows:
        parts.append(_table(section))
    elif section.columns:
        parts.append('<p class="muted">none</p>')
    return "".join(parts)


def _table(section: Section) -> str:
    kinds = ["", *[' class="n"'] * (len(section.columns) - 1)]
    head = "".join(
        f'<th{kind} scope="col">{escape(name)}</th>' for name, kind in zip(section.columns, kinds, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in section.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(section.title)}"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )
