"""Write the report of a run as an HTML page: numbers first, then plots, then the lines and tables of `report.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_vlpack.pages.page import page, subject
from swift_vlpack.pages.report import Report, Section, grouped, percent, sections, state
from swift_vlpack.pages.safe_text import without_home
from swift_vlpack.words import INSTALL

STYLE = """
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.plot { margin: 0; padding: .6rem .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.plot svg[role] { display: block; width: 100%; }
.plot figcaption { font-weight: 600; margin-bottom: .3rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; }
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
    report = _without_place(report, f"{folder.parent}/" if folder.parent.name else "")
    parts = [f"<p>{escape(state(report))}</p>", _tiles(report), _plots(report)]
    parts += [_section(section) for section in sections(report)]
    return page(f"Report: {name} ({folder.name})" if name else f"Report: {folder.name}", "\n".join(parts), STYLE)


def _without_place(value: Any, above: str) -> Any:
    """Remove the path above the run's folder from every text of the report, and write home folders as `~`."""
    if isinstance(value, str):
        return without_home(value.replace(above, ""))
    if isinstance(value, Mapping):
        return {name: _without_place(one, above) for name, one in value.items()}
    return [_without_place(one, above) for one in value] if isinstance(value, (list, tuple)) else value


def _tiles(report: Report) -> str:
    trained, unpacked = report["trained"], report["unpacked"]
    shared = trained["shared"]
    tiles = [
        ("fill", percent(trained["fill_mean"])),
        ("padding saved", percent(unpacked["padding_saved"]) if unpacked else "-"),
        *([("tokens saved by sharing", grouped(shared["num_shared_tokens"]))] if shared else []),
        ("tokens a second", grouped(trained["tokens_per_second"]) if trained["tokens_per_second"] else "-"),
        ("tokens", grouped(trained["num_tokens"])),
        ("samples", grouped(trained["num_samples"])),
        ("rows left out", grouped(report["left_out"]["num_rows"])),
    ]
    inside = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in tiles)
    return f'<div class="tiles">{inside}</div>'


def _plots(report: Report) -> str:
    try:
        # matplotlib takes a quarter of a second to import, which only pages need.
        from swift_vlpack.pages.charts import Line, bar_chart, histogram, line_chart, segments_chart
    except ModuleNotFoundError as error:
        return (
            f'<p class="muted">No plots: {escape(str(error.name))} is not installed; {escape(INSTALL)} brings it.</p>'
        )
    series = report["series"]
    # Give all plots the same range of steps: the loss may be logged more rarely than the other numbers.
    steps: dict[str, Any] = {
        "span": [point["step"] for point in (*series[:1], *series[-1:])],
        "resumes": _resumes(series),
    }
    no_number = set(report["steps_without_loss"])

    def line(name: str, key: str) -> Line:
        return Line(name, [(point["step"], point[key]) for point in series])

    logged = [point for point in series if point["loss"] is not None or point["step"] in no_number]
    loss = Line("loss", [(point["step"], point["loss"]) for point in logged])
    fills: Counter[int] = Counter()
    for epoch in report["epochs"]:
        fills.update({int(fill): number for fill, number in epoch.get("fill_histogram", {}).items()})
    shares = [line("vision tokens", "vision_share")]
    if any(point["padding_saved"] for point in series):
        shares.insert(0, line("padding saved", "padding_saved"))
    titled = " and ".join(one.name for one in shares).capitalize()  # "padding saved" is no line if none was saved
    plots = [
        line_chart("Fill of packs", [line("fill", "fill")], "share", **steps),
        line_chart("Tokens a second", [line("tokens a second", "tokens_per_second")], "rate", **steps),
        line_chart(f"{titled}, shares of tokens", shares, "share", **steps),
        line_chart("Loss", [loss], "loss", **steps),
        histogram("Packs by fill, all epochs", fills),
        bar_chart("Shares of sources", list(report["sources"]), _shares(report["sources"])),
        segments_chart("Segments of the run, by steps (hollow: lost)", _segments(report), report["run"]["step"]),
    ]
    return f'<div class="plots">{"".join(plots)}</div>'


def _resumes(series: Sequence[Report]) -> list[float]:
    """Return the first step of every segment that was resumed."""
    starts = {point["leg"]: point["step"] for point in reversed(series)}
    return [step for segment, step in sorted(starts.items()) if segment]


def _shares(sources: Report) -> dict[str, list[float | None]]:
    series = {
        "asked": [source["asked_share"] for source in sources.values()],
        "of samples": [source["share_of_samples"] for source in sources.values()],
        "of tokens": [source["share_of_tokens"] for source in sources.values()],
    }
    if all(share is None for share in series["asked"]):
        del series["asked"]
    return series


def _segments(report: Report) -> list[dict[str, Any]]:
    """Return a bar for each segment: its first step, its last step that was kept, and its last step."""
    segments: list[dict[str, Any]] = []
    for entry in report["timeline"]:
        if entry["event"] in ("start", "resume"):
            segments.append({"name": entry["said"], "first": entry["step"], "kept": entry["step"], "checkpoints": []})
        segment = segments[-1]
        segment["last"] = entry["step"]
        if entry["is_kept"]:
            segment["kept"] = entry["step"]
        if entry["event"] == "checkpoint":
            segment["checkpoints"].append(entry["step"])
    for segment, after in pairwise(segments):
        segment["kept"] = min(segment["last"], after["first"])
    return segments


def _section(section: Section) -> str:
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in section.lines)
    parts = [f"<h2>{escape(section.title)}</h2>", f'<dl class="facts">{facts}</dl>' if facts else ""]
    if section.rows:
        parts.append(_table(section))
    elif section.columns:
        parts.append('<p class="muted">none</p>')
    return "".join(parts)


def _table(section: Section) -> str:
    kinds = ["" if at < section.num_texts else ' class="n"' for at in range(len(section.columns))]
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
