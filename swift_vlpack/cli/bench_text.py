"""What `vlpack bench` measured, for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_vlpack.cli.doctor_advice import size
from swift_vlpack.words import counted


def bench_text(report: Mapping[str, Any]) -> str:
    """The report as lines of a label and what is to be said."""
    lines = [
        ("model", f"{report['model']} on {report['device']}, {counted(report['cores'], 'core')}"),
        *_about_data(report),
        *_about_training(report),
        *_about_advice(report["advice"]),
        ("time", f"{report['seconds']:.0f} s in all, of which {report['seconds_measured']:.0f} s were measured"),
    ]
    return "\n".join(f"{name:<12} {text}".rstrip() for name, text in lines)


def _about_data(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    lengths, plan = report["length_pass"], report["plan"]
    rows = counted(lengths["rows"], "row")
    processes = counted(lengths["processes"], "process", "processes")
    lines = [
        ("length pass", f"{lengths['rows_per_second']:.0f} rows a second in {processes} ({rows}, as at a first start)"),
        ("packs", f"{plan['packs']} of {plan['packing_length']} tokens, {100 * plan['mean_fill']:.1f}% full"),
        ("loader", f"{'workers':>7}  {'samples/s':>9}  {'tokens/s':>9}  {'first batch':>11}"),
    ]
    for one in report["loader"]:
        numbers = [one["samples_per_second"], one["tokens_per_second"]]
        samples, tokens = ("-" if number is None else f"{number:.1f}" for number in numbers)
        first = "-" if one["first_batch_seconds"] is None else f"{one['first_batch_seconds']:.2f} s"
        mark = "  <- the run's" if one["workers"] == report["workers_of_run"] else ""
        lines.append(("", f"{one['workers']:>7}  {samples:>9}  {tokens:>9}  {first:>11}{mark}"))
    if any(one["samples_per_second"] is None for one in report["loader"]):
        lines.append(("", "-: too few packs to say; give more rows with --rows"))
    return lines


def _about_training(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [(name, _speed(report[name])) for name in ("packed", "padded")]
    if (ratio := report["ratio"]) is not None:
        lines.append(("ratio", f"{ratio:.2f} times the tokens a second, packed to padded (of medians)"))
    return lines


def _speed(measured: Mapping[str, Any]) -> str:
    if measured.get("problem"):
        return f"could not be measured: {measured['problem']}"
    speed = measured["speed"]
    if speed is None:
        return "nothing was measured in this time; give more --seconds"
    between = f"; {measured['between']:.2f} s between two (data, optimizer)"
    return (
        f"{speed['tokens_per_second']:.0f} tokens a second, {speed['samples_per_second']:.1f} samples (forward and "
        f"backward, median of {speed['num_measured']}, quartiles {100 * speed['spread']:.0f}% apart{between}), "
        f"{size(measured['memory']['peak'])} at most"
    )


def _about_advice(advice: list[Mapping[str, str]]) -> list[tuple[str, str]]:
    lines = [f"{one['advice']}: {one['because']}" for one in advice] or ["none"]
    return [("advice" if not at else "", line) for at, line in enumerate(lines)]
