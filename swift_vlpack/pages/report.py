"""Put the report of a run (`runlog/report.py`) into words, and print it in a terminal.

`sections` turns the report into labelled lines and tables. A terminal prints them as they are; `report_page.py` adds
three lines over steps. rich is imported inside of functions, because `vlpack --help` imports this module and has to be
quick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from itertools import pairwise
from typing import IO, Any

from swift_vlpack.words import by_reason, counted

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_BLOCKS = 60
_WIDTH_OF_NO_TERMINAL = 120
_NARROW = 80
Report = dict[str, Any]
Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report with a title: labelled lines, then a table."""

    title: str
    lines: Sequence[Line] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    num_texts: int = 1
    """Number of leading columns that are texts; the other columns are numbers, aligned to the right."""


def sections(report: Report) -> list[Section]:
    """Return the parts of a report, with all numbers as texts."""
    return [
        Section("Run", tuple(_run(report))),
        Section("Trained", tuple(_trained(report))),
        Section("Padding saved", tuple(_unpacked(report["unpacked"], shares=bool(report["trained"]["shared"])))),
        _sources(report),
        _left_out(report["left_out"]),
        _epochs(report["epochs"]),
    ]


def _run(report: Report) -> Iterator[Line]:
    run = report["run"]
    yield "folder", report["folder"]
    yield "state", state(report)
    if run["model"]:
        yield "model", run["model"]
    yield "ranks", ", then ".join(map(str, run["num_ranks"]))
    yield "packs", f"of {run['packing_length']} tokens by {run['packing_strategy']}, {run['mode']}"
    if run["attention"]:
        yield "attention", run["attention"].removeprefix("attention ")
    yield "proof", run["proof"] or "none on record"
    for note in report["notes"]:
        yield "note", note


def state(report: Report) -> str:
    """Say at which step the run is, and whether it has ended."""
    run = report["run"]
    of = f" of {run['num_steps']}" if run["num_steps"] else ""
    where = f"step {run['step']}{of}"
    if run["has_ended"]:
        return f"ended at {where}, {clock(run['last_sign'])}"
    return f"at {where}, still running or stopped from outside; last sign {clock(run['last_sign'])}"


def _trained(report: Report) -> Iterator[Line]:
    trained, balance = report["trained"], report["balance"]
    packs, samples = counted(trained["num_packs"], "pack"), counted(trained["num_samples"], "sample")
    yield "packs", f"{packs}, {samples}, {grouped(trained['num_tokens'])} tokens, {trained['num_images']} images"
    yield "fill", f"{percent(trained['fill_mean'])} mean, {trained['samples_per_pack']} samples a pack"
    if trained["num_padding"]:
        yield "padding", f"{grouped(trained['num_padding'])} tokens after the samples of packs (packing_pad_to)"
    if shared := trained["shared"]:
        yield from _shared(trained, shared)
    yield "single-long", f"{counted(trained['num_single_long'], 'sample')} too large for a pack, alone in a sequence"
    yield "vision", f"{percent(trained['vision_share'])} of the tokens"
    if trained["seconds"]:
        speed = f"{grouped(trained['tokens_per_second'])} tokens and {trained['samples_per_second']:g} samples a second"
        yield "speed", f"{speed} over {duration(trained['seconds'])}, without evaluation and saving"
    if balance["trained"] is not None:
        planned = f"; planned {balance['planned']:.3f} by cost" if balance["planned"] is not None else ""
        yield "balance", f"the slowest rank of a step has {balance['trained']:.3f} x the mean rank's tokens{planned}"


def _shared(trained: Report, shared: Report) -> Iterator[Line]:
    units, alone = counted(shared["num_units"], "unit"), grouped(shared["num_tokens_alone"])
    less = 1 - trained["num_tokens"] / max(1, shared["num_tokens_alone"])
    yield "shared", f"{grouped(shared['num_in_units'])} samples in {units}, {grouped(shared['num_alone'])} alone"
    yield "", f"{grouped(trained['num_tokens'])} of {alone} tokens computed, {percent(less)} less"
    if shared["num_apart"]:
        apart = counted(shared["num_apart"], "sample was", "samples were")
        yield "", f"{apart} planned to share and, once encoded, did not; the log names them"


def _unpacked(unpacked: Report, *, shares: bool) -> Iterator[Line]:
    yield "against", unpacked["reference"]
    saved, tokens = unpacked["num_padding_saved"], grouped(unpacked["num_tokens"])
    if saved <= 0:
        more = f"packs have {grouped(-saved)} more (packing_pad_to)" if saved else "packs have as many"
        before = ", before what samples share" if shares else ""
        yield "tokens", f"none are saved: {tokens} un-packed, and {more}{before}"
        return
    yield "tokens", f"{grouped(saved)} of {tokens} are saved, {percent(unpacked['padding_saved'])}"
    of_time, all_of_it = duration(unpacked["seconds_saved_estimated"]), duration(unpacked["seconds_estimated"])
    yield "time", f"about {of_time} of {all_of_it}, if padding took as long as other tokens do in this run"


def _sources(report: Report) -> Section:
    left_out = report["left_out"]["sources"]
    rows = [
        (
            name,
            _or_dash(source["rows"]),
            _or_dash(source["ratio"]),
            percent(source["asked_share"]),
            percent(source["share_of_samples"]),
            percent(source["share_of_tokens"]),
            str(source["num_samples"]),
            str(left_out.get(name, 0)),
        )
        for name, source in report["sources"].items()
    ]
    asked = f"asked by {report['ratio_by']}" if report["ratio_by"] else "asked"
    columns = ("source", "rows", "ratio", asked, "of samples", "of tokens", "samples", "left out")
    return Section("Sources", (), columns, rows)


def _left_out(left_out: Report) -> Section:
    lines = [("rows", f"{left_out['num_rows']}, {counted(left_out['num_lines'], 'time')} over all epochs")]
    if left_out["file"]:
        lines.append(("listed in", left_out["file"]))
    if left_out["not_listed"]:
        lines.append(("not listed", f"{by_reason(left_out['not_listed'])}: counted in epoch reports only"))
    rows = [
        (reason, about["meaning"], about["remedy"] or "repair or remove the rows", str(about["num_rows"]))
        for reason, about in left_out["reasons"].items()
    ]
    return Section("Left out", lines, ("reason", "what it is", "what to do", "rows"), rows, num_texts=3)


def _epochs(epochs: Sequence[Report]) -> Section:
    rows = [
        (
            f"{epoch['epoch']}" + ("" if epoch["is_finished"] else f", up to {epoch['as_of']}"),
            str(epoch["num_packs"]),
            str(epoch["num_samples"]),
            grouped(epoch["num_tokens"]),
            percent(epoch["fill_mean"]),
            ", ".join(str(epoch[f"fill_p{p}"]) for p in (5, 50, 95)) if "fill_p5" in epoch else "-",
            str(epoch["num_single_long"]),
            str(sum(epoch["num_dropped"].values())) if "num_dropped" in epoch else "-",
        )
        for epoch in epochs
    ]
    columns = ("epoch", "packs", "samples", "tokens", "fill", "p5, p50, p95", "single-long", "left out")
    lines = [(f"epoch {epoch['epoch']}", epoch["account"]) for epoch in epochs if epoch["is_finished"]]
    return Section("Epochs", lines, columns, rows)


# -- numbers in words -------------------------------------------------------------------------------------------------


def percent(part: float | None) -> str:
    """Write a share; a dash if it is not known."""
    return "-" if part is None else f"{part:.1%}"


def grouped(number: float) -> str:
    """Write a large number with separators."""
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Write seconds as a person says them.

    >>> duration(42.3), duration(600), duration(7800)
    ('42.3 s', '10 min', '2 h 10 min')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def clock(when: str) -> str:
    """Write the time of an event, to the second."""
    return datetime.fromisoformat(when).strftime("%Y-%m-%d %H:%M:%S")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


# -- in a terminal ----------------------------------------------------------------------------------------------------


def print_report(report: Report, file: IO[str]) -> None:
    """Print a report: in colour on a terminal, plain in a file or a pipe."""
    from rich.console import Console

    if file.isatty():
        _print(Console(file=file, highlight=False, markup=False), report)
        return
    plain = StringIO()
    _print(Console(file=plain, highlight=False, markup=False, width=_WIDTH_OF_NO_TERMINAL, color_system=None), report)
    # rich pads every line to the full width. Strip that, because a diff of two reports would show it.
    file.write("".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines()))


def _print(console: Any, report: Report) -> None:
    for section in sections(report):
        console.print(section.title, style="bold")
        _print_lines(console, section)
        if section.title == "Trained":
            _print_curves(console, report["series"])
        if section.rows:
            console.print(_table(section, is_narrow=console.width < _NARROW))
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
    """Draw fill, speed and loss over steps as lines of blocks."""
    for name, key in (("fill", "fill"), ("tokens/s", "tokens_per_second"), ("loss", "loss")):
        values = [point[key] for point in series if point[key] is not None]
        if len(values) > 1:
            limits = f"{min(values):,.4g} to {max(values):,.4g}"
            curve = sparkline(values, min(_MOST_BLOCKS, console.width - len(limits) - 15))
            console.print(f"  {name:<10} {curve}  {limits}", style="dim")


def sparkline(values: Sequence[float], most: int = _MOST_BLOCKS) -> str:
    """Draw values as blocks of eight heights. More than `most` values are reduced to means of neighbours.

    >>> sparkline([0, 1, 2, 7]), sparkline([1, 1, 7, 7], most=2), sparkline([3, 3])
    ('▁▂▃█', '▁█', '▁▁')
    """
    num = min(most, len(values))
    cuts = [round(at * len(values) / num) for at in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round((mean - low) / span * 7) if span else 0] for mean in means)


def _table(section: Section, *, is_narrow: bool) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if is_narrow else 1))
    for at, name in enumerate(section.columns):
        if at < section.num_texts:
            table.add_column(name, overflow="fold")
        else:  # no number is broken
            longest = max(len(row[at]) for row in section.rows)
            table.add_column(name, justify="right", overflow="fold", min_width=longest)
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table
