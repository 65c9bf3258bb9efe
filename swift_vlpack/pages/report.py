"""Put the report of a run (`runlog/report.py`) into words: labelled lines and tables.

A terminal shows them as they are (`cli/report.py`); `report_page.py` adds three lines over steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from swift_vlpack.words import by_reason, counted

Report = dict[str, Any]
Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report with a title: labelled lines, then a table of a name and numbers."""

    title: str
    lines: Sequence[Line] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


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
    if logged := [point for point in report["series"] if point["loss"] is not None]:
        yield "loss", ", ".join(f"{point['loss']:.4g} at step {point['step']}" for point in (logged[0], logged[-1]))
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
    for reason, about in left_out["reasons"].items():
        remedy = about["remedy"] or "repair or remove the rows"
        lines.append((reason, f"{counted(about['num_rows'], 'row')}: {about['meaning']}; {remedy}"))
    return Section("Left out", lines)


def _epochs(epochs: Sequence[Report]) -> Section:
    rows = [
        (
            str(epoch["epoch"]),
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
    lines = [
        (f"epoch {one['epoch']}", one["account"] if one["is_finished"] else f"up to {one['as_of']}") for one in epochs
    ]
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
