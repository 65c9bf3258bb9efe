"""Turn the measurements of `vlpack bench` into speeds, advice that names its measurement, and a text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift_vlpack.lines import labelled, listed, size
from swift_vlpack.words import counted

ENOUGH = 1.2
"""Samples that a loader should deliver for each trained one. With fewer, training waits for data now and then."""
NOISY = 0.3
"""Largest distance between the quartiles, as a share of the median, up to which two medians are compared."""
FULL, EMPTY = 0.9, 0.5
"""Shares of a device's memory: above `FULL`, a longer sequence may not fit; below `EMPTY`, a longer pack may."""


class Speed(NamedTuple):
    """Speed of training: medians over its measurements, because a rare pause should count for little."""

    tokens_per_second: float
    samples_per_second: float
    seconds: float
    """Seconds of forward and backward in one measurement."""
    spread: float
    """Distance between the quartiles of tokens a second, as a share of the median."""
    num_measured: int


def speed_of(measurements: Sequence[Mapping[str, float]]) -> Speed | None:
    """Summarize measurements; None if there are none.

    >>> speed_of([{"tokens": 800, "samples": 4, "seconds": seconds} for seconds in (1.0, 2.0, 2.0)])
    Speed(tokens_per_second=400.0, samples_per_second=2.0, seconds=2.0, spread=0.5, num_measured=3)
    """
    if not measurements:
        return None
    tokens = [one["tokens"] / one["seconds"] for one in measurements]
    low, middle, high = np.percentile(tokens, (25, 50, 75)).tolist()
    samples = float(np.median([one["samples"] / one["seconds"] for one in measurements]))
    seconds = float(np.median([one["seconds"] for one in measurements]))
    return Speed(
        round(middle, 1), round(samples, 2), round(seconds, 4), round((high - low) / middle, 3), len(measurements)
    )


def num_cores() -> int:
    """Count the cores that this process may use: a container may have fewer than its machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such limit here, or `max`
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        usable = min(usable, max(1, round(quota / period)))
    return usable


def alone_per_second(measurements: Sequence[Mapping[str, float]]) -> float:
    """Return the median of tokens a second, with a shared prefix counted for each row; 0 without measurements.

    >>> alone_per_second([{"tokens": 300, "tokens_alone": 800, "seconds": 2.0}, {"tokens": 300, "seconds": 1.0}])
    350.0
    """
    speeds = [one.get("tokens_alone", one["tokens"]) / one["seconds"] for one in measurements]
    return float(np.median(speeds)) if speeds else 0.0


def start_of(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds to step 1 by parts, and an estimate of the length pass over all rows at a first start."""
    parts = dict(packed["start"])
    waited = [one["first_batch_seconds"] for one in packed["loader"] if one["workers"] == packed["workers_of_run"]]
    parts["first batch"] = waited[0] or 0.0
    rows, per_second = packed["rows_of_run"], packed["length_pass"]["rows_per_second"]
    return {
        "seconds": round(sum(parts.values()), 2),
        "parts": parts,
        "rows_of_run": rows,
        "lengths_of_run": round(rows / per_second, 1),
    }


def limit_of(report: Mapping[str, Any]) -> str | None:
    """Return what a run waits for: the `loader` or the `step`; None if one of them was not measured."""
    delivered, trained = _delivered_and_trained(report)
    if delivered is None or trained is None:
        return None
    return "step" if delivered >= trained else "loader"


def _delivered_and_trained(report: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the samples a second of the run's own loader, and those of forward and backward."""
    loaders = {one["workers"]: one["samples_per_second"] for one in report["loader"]}
    speed = report["packed"]["speed"]
    return loaders.get(report["workers_of_run"]), None if speed is None else speed["samples_per_second"]


def advice_on(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return advice, each with the measurement that it follows from."""
    of_all = (_on_noise, _on_sharing, _on_workers, _on_length, _on_caps, _on_memory)
    found = [one for about in of_all for one in about(report)]
    return [{"advice": advice, "because": because} for advice, because in found]


def _on_noise(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _ways(report):
        speed = report[name]["speed"]
        if speed is not None and (speed["spread"] > NOISY or speed["num_measured"] < 3):
            yield (
                f"take the {name} speed as a rough one: measure again on a quiet machine, with more --steps",
                f"the quartiles of its {speed['num_measured']} measurements are {100 * speed['spread']:.0f}% apart",
            )


def _on_sharing(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    ratio = report.get("ratio_sharing")
    if ratio is not None and ratio <= 1.0:
        yield (
            "leave packing_share out, unless `vlpack plan` says that more of all rows share than of these",
            f"with packing_share=media the run trains {ratio:.2f} times as many tokens of the rows a second",
        )


def _on_workers(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    speed, loaders = report["packed"]["speed"], report["loader"]
    measured = {one["workers"]: one["samples_per_second"] for one in loaders if one["samples_per_second"]}
    if speed is None or not measured:
        return
    trained, of_run = speed["samples_per_second"], report["workers_of_run"]
    quick = [workers for workers, samples in measured.items() if samples >= ENOUGH * trained]
    needed = f"training takes {trained:.1f} samples a second"
    if not quick:
        best = max(measured, key=measured.__getitem__)
        yield (
            f"set dataloader_num_workers to {best}, and expect to wait for data: more cores, smaller images "
            "(MAX_PIXELS) or a quicker disk",
            f"{needed}, and the loader gives {measured[best]:.1f} at most, with {best} workers",
        )
    elif of_run != (least := min(quick)) and measured.get(of_run, 0.0) < ENOUGH * trained:
        yield (
            f"set dataloader_num_workers to {least} (it is {of_run})",
            f"{needed}; with {least} workers the loader gives {measured[least]:.1f}"
            + (f", with {of_run} only {measured[of_run]:.1f}" if of_run in measured else ""),
        )
    else:
        yield (
            f"leave dataloader_num_workers at {of_run}",
            f"{needed}, and the loader gives {measured.get(of_run, measured[least]):.1f}",
        )


def _on_length(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    plan = report["plan"]
    if plan["packing_length"] > (suggested := plan["suggested_length"]):
        yield (
            f"packing_length {suggested} is enough (it is {plan['packing_length']}): shorter sequences, less memory",
            f"the longest of the rows has {plan['longest']} tokens, the mean {plan['mean_length']:.0f}",
        )
    elif plan["mean_fill"] < 0.9:
        yield (
            "a longer packing_length, or packing_strategy exact, would leave less of a sequence empty",
            f"packs are {100 * plan['mean_fill']:.1f}% full at packing_length {plan['packing_length']}",
        )


def _on_caps(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    patches = report["plan"]["patches_per_pack"]
    if not report["plan"]["has_caps"] and patches["max"] > 2 * max(1, patches["median"]) > 2:
        yield (
            f"packing_max_patches {patches['p95']} would keep the heaviest sequences out (with packing_strategy exact, "
            "first_fit or best_fit)",
            f"a pack has {patches['median']} vision patches in the median and {patches['max']} at most",
        )


def _on_memory(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    peak, total = (report["packed"]["memory"][name] for name in ("peak", "total"))
    if total is None:
        return
    taken = f"training took {size(peak)} of {size(total)}"
    if peak > FULL * total:
        yield "lower packing_length, or turn gradient checkpointing on: a longer sequence may not fit", taken
    elif peak < EMPTY * total and report["plan"]["packing_length"] <= report["plan"]["suggested_length"]:
        yield f"a packing_length of {2 * report['plan']['packing_length']} may fit, and be quicker", taken


def bench_text(report: Mapping[str, Any]) -> str:
    """Write the report for a reader."""
    lines = [
        ("model", f"{report['model']} on {report['device']}, {counted(report['cores'], 'core')}"),
        *_about_data(report),
        *_about_training(report),
        *_about_start(report),
        *_about_limit(report),
        *listed("advice", [f"{one['advice']}: {one['because']}" for one in report["advice"]] or ["none"]),
        ("time", f"{report['seconds']:.0f} s in all, of which {report['seconds_measured']:.0f} s were measured"),
    ]
    return labelled(lines)


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
    lines = [(name, _speed(report[name])) for name in _ways(report)]
    if (ratio := report["ratio"]) is not None:
        other = report.get("ratio_padding_free")
        beside = "" if other is None else f"; padding_free to padded {other:.2f}"
        which = " of the rows alone" if "share" in report["plan"] else ""
        lines.append(("ratio", f"{ratio:.2f} times the tokens a second{which}, packed to padded (of medians){beside}"))
    if (share := report["plan"].get("share")) is not None:
        lines.append(("sharing", _sharing(report["ratio_sharing"], share)))
    return lines


def _sharing(ratio: float | None, share: Mapping[str, Any]) -> str:
    computed = f"{share['num_tokens']} of {share['num_tokens_alone']} tokens of these rows are computed"
    if ratio is None:
        return f"{computed}; packing_share=none could not be measured"
    return (
        f"{ratio:.2f} times the tokens a second of the rows alone, packing_share media to none (of medians); {computed}"
    )


def _ways(report: Mapping[str, Any]) -> list[str]:
    """Name the ways to train that were measured."""
    return [name for name in ("packed", "unshared", "padded", "padding_free") if name in report]


def _about_start(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    start, rows = report["start"], report["length_pass"]["rows"]
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in start["parts"].items())
    lines = [("start", f"{start['seconds']:.1f} s to step 1, with {counted(rows, 'row')}: {parts}")]
    if start["rows_of_run"] > rows:
        lengths = f"lengths of all {start['rows_of_run']} rows: {start['lengths_of_run']:.0f} s at a first start"
        lines.append(("", f"{lengths}; later starts remember them"))
    return lines


def _about_limit(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    delivered, trained = _delivered_and_trained(report)
    if delivered is None or trained is None:
        return [("limit", "not known: the loader with the run's workers, or the step, was not measured")]
    workers = counted(report["workers_of_run"], "worker") if report["workers_of_run"] else "the main process"
    told = f"the loader delivers {delivered:.1f} samples a second ({workers}), the step takes {trained:.1f}"
    if delivered < trained:
        return [("limit", f"the loader is the limit: {told}")]
    return [("limit", f"the step is the limit, the loader is not: {told}")]


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
