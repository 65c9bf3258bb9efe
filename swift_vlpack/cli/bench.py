"""`vlpack bench`: measure how fast a run would be on this machine, packed and padded.

A process each measures packed and padded training, so that each has its own memory. Under `packing_batch=samples` one
more process measures padded batches without their padding, and under `packing_share=media` one more measures packs in
which no rows share. Each process is this command line again, with `--phase`: `bench_run` measures, and prints JSON.
This module starts the processes, and puts their numbers together with advice.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from swift_vlpack.cli.bench_report import (
    advice_on,
    alone_per_second,
    bench_text,
    limit_of,
    num_cores,
    speed_of,
    start_of,
)
from swift_vlpack.cli.command import Command, add_packing_flags, add_run_flags
from swift_vlpack.cli.in_run import end_by_signal, in_run, own_command, run_named
from swift_vlpack.config import SAMPLES
from swift_vlpack.errors import ConfigError, VLPackError
from swift_vlpack.host.launch import check_launch


class PhaseFailed(VLPackError):
    """A process that measures ended without a result; its messages are on stderr."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser, num_ranks=False)
    for name, default, text in (
        ("steps", 10, "sequences to measure, packed and padded each"),
        ("seconds", 60, "longest time to measure sequences, packed and padded each"),
        ("rows", 1000, "rows to take from each source, from all over it"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument("--phase", choices=("packed", "unshared", "padded", "padding_free"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens_of_pack", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)  # when the process was started
    add_packing_flags(parser, packing_length="the run's --max_length")


def _run(args: argparse.Namespace) -> int:
    if args.phase is not None:
        with in_run(args, needs_gpu=True) as (run, out):
            from swift_vlpack.cli.bench_run import measured

            print(json.dumps(measured(args, run)), file=out)
        return 0
    for name in ("steps", "seconds", "rows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    check_launch(run_named(args, needs_gpu=True))
    signal.signal(signal.SIGTERM, end_by_signal)  # exit by an exception, so that `finally` ends the measuring process
    start = time.perf_counter()
    packed = measured_apart(args.argv, "packed")
    found = {}
    if "share" in packed["plan"]:
        found["unshared"] = _beside(args.argv, "unshared", tokens_of_pack=0)
    for phase in ("padded", *(("padding_free",) if packed["plan"]["packing_batch"] == SAMPLES else ())):
        found[phase] = _beside(args.argv, phase, tokens_of_pack=packed["plan"]["packing_length"])
    report = bench_report(packed, **found, seconds=time.perf_counter() - start)
    print(json.dumps(report) if args.json else bench_text(report))
    return 0


def _beside(argv: Sequence[str], phase: str, *, tokens_of_pack: int) -> dict[str, Any]:
    """Measure another way to train, or return why that failed: padded batches may not fit into memory, for example."""
    try:
        return measured_apart(argv, phase, tokens_of_pack=tokens_of_pack)
    except PhaseFailed as error:
        return {"problem": str(error), "measurements": [], "memory": None, "seconds": 0.0}


def measured_apart(argv: Sequence[str], phase: str, *, tokens_of_pack: int = 0) -> dict[str, Any]:
    """Measure a phase in a child process, which is terminated if this process ends. Raises `PhaseFailed`."""
    of_phase = ["--phase", phase, "--tokens_of_pack", str(tokens_of_pack), "--began", str(time.time())]
    command = own_command([*argv, *of_phase])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            report, _ = running.communicate()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                running.wait(10)  # a terminal interrupts it too, and another signal would disturb its cleaning up
            raise
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait()
    if running.returncode or not report:
        raise PhaseFailed(f"the {phase} run ended with code {running.returncode}; what it said is above")
    found: dict[str, Any] = json.loads(report)
    return found


def bench_report(
    packed: Mapping[str, Any],
    padded: Mapping[str, Any],
    padding_free: Mapping[str, Any] | None = None,
    unshared: Mapping[str, Any] | None = None,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Put the numbers of the phases together, with ratios and advice. `padding_free` and `unshared` are optional."""
    given = {"packed": packed, "unshared": unshared, "padded": padded, "padding_free": padding_free}
    phases = {phase: found for phase, found in given.items() if found is not None}
    training = {phase: _training(found) for phase, found in phases.items()}
    of_padding_free, of_unshared = training.get("padding_free"), training.get("unshared")
    report = {
        **{name: packed[name] for name in ("model", "device", "attention", "length_pass", "plan", "loader")},
        "workers_of_run": packed["workers_of_run"],
        "start": start_of(packed),
        "cores": num_cores(),
        **training,
        "ratio": _ratio(training["packed"], training["padded"]),
        "ratio_padding_free": _ratio(of_padding_free, training["padded"]) if of_padding_free else None,
        **({"ratio_sharing": _ratio(training["packed"], of_unshared)} if of_unshared else {}),
        "seconds": round(seconds, 1),
        "seconds_measured": round(sum(found["seconds"] for found in phases.values()), 1),
    }
    return {**report, "limit": limit_of(report), "advice": advice_on(report)}


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Return the tokens a second of one phase over those of another; None if one was not measured.

    Counts the tokens of the rows alone, because rows that share a prefix are all trained on it, but compute it once.
    """
    speeds = [alone_per_second(phase["measurements"]) for phase in (one, other)]
    if not all(speeds):
        return None
    return round(speeds[0] / speeds[1], 3)


def _training(found: Mapping[str, Any]) -> dict[str, Any]:
    measurements = found["measurements"]
    speed = speed_of(measurements)
    pauses = [one["between"] / one["batches"] for one in measurements]
    return {
        "speed": None if speed is None else speed._asdict(),
        "between": round(float(np.median(pauses)), 4) if pauses else None,
        "memory": found["memory"],
        "measurements": measurements,
        "problem": found.get("problem"),
    }


BENCH = Command(
    name="bench",
    text="measure the length pass, the loader and training, packed and padded, on this machine",
    usage=(
        "vlpack bench [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft]\n"
        "                    [--steps N] [--seconds N] [--rows N] [--json]"
    ),
    description=(
        "Measure a run on this machine and its own data: rows a second of the length pass, samples a second of the "
        "loader by workers, tokens a second of forward and backward on the real model, packed and as ms-swift trains "
        "them un-packed (under packing_batch=samples without padding, too; under packing_share=media also packed "
        "without sharing), and memory; what the seconds to step 1 go to, and whether a run waits for its loader or for "
        "its steps; with advice, each with the measurement it comes from. Looks at --rows rows of each source. Takes a "
        "start of ms-swift with the model for each way to train, one proof, 5 s for each number of workers, and at "
        "most --seconds for each way (two sequences to warm up and at least one more are always trained). Nothing is "
        "saved."
    ),
    add_flags=_add_flags,
    run=_run,
    takes_run_flags=True,
)
