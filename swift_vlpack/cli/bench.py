"""`vlpack bench`: how fast a run would be on this machine, packed and padded, by `cli.bench_run`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from swift_vlpack.cli.become import add_config_flag, is_quiet, never, run_flags
from swift_vlpack.cli.bench_advice import advice_on, speed_of
from swift_vlpack.cli.bench_text import bench_text
from swift_vlpack.cli.command import Command, Parser
from swift_vlpack.cli.machine import num_cores
from swift_vlpack.cli.packing_flags import add_packing_flags
from swift_vlpack.errors import ConfigError, VLPackError
from swift_vlpack.host.launch import RunLaunch, check_launch, run_launch


class PhaseFailed(VLPackError):
    """A process that measures ended without a result; what it said is on stderr."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    _add_own_flags(parser)
    add_packing_flags(parser, packing_length="the run's --max_length")


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    for name, default, text in (
        ("steps", 10, "rows that are measured, packed and padded"),
        ("seconds", 60, "that measuring rows may take at most, packed and padded each"),
        ("rows", 1000, "rows of each source that are looked at, from all over it"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _bench(argv: Sequence[str]) -> int:
    parser = Parser(prog="vlpack bench", add_help=False, allow_abbrev=False)
    _add_own_flags(parser)
    args, command, flags = run_flags(parser, argv)
    for name in ("steps", "seconds", "rows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    launch = run_launch(flags, os.environ, needs_gpu=True)
    check_launch(launch)
    signal.signal(signal.SIGTERM, _stop)
    start = time.perf_counter()
    settings = {"steps": args.steps, "seconds": args.seconds, "num_rows": args.rows, "is_quiet": is_quiet(args)}
    packed = measured({**settings, "phase": "packed"}, command, launch)
    settings["tokens_of_pack"] = packed["plan"]["packing_length"]
    try:
        padded = measured({**settings, "phase": "padded"}, command, launch)
    except PhaseFailed as error:  # what is packed is known, and padded may be what does not fit
        padded = {"problem": str(error), "rows": [], "memory": None, "seconds": 0.0}
    report = bench_report(packed, padded, seconds=time.perf_counter() - start)
    print(json.dumps(report) if args.json else bench_text(report))
    return 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # and not at once: the process that measures has to end, too


def measured(settings: Mapping[str, Any], command: str, launch: RunLaunch) -> dict[str, Any]:
    """What a process of its own finds; what it prints goes to stderr, and it ends when this one does."""
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder:
        report = Path(folder) / "report.json"
        own = json.dumps({**settings, "report": str(report)})
        process = [sys.executable, "-m", "swift_vlpack.cli.process", "bench", own, command, *launch.flags]
        running = subprocess.Popen(process, env=launch.environ, stdout=sys.stderr)
        try:
            code = running.wait()
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait()
        if code or not report.exists():
            raise PhaseFailed(f"the {settings['phase']} run ended with code {code}; what it said is above")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def bench_report(packed: Mapping[str, Any], padded: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
    """Both together, the ratio, and what follows."""
    of_packed, of_padded = _training(packed), _training(padded)
    speeds = [one["speed"] for one in (of_packed, of_padded)]
    known = all(speeds)
    report = {
        **{name: packed[name] for name in ("model", "device", "attention", "length_pass", "plan", "loader")},
        "workers_of_run": packed["workers_of_run"],
        "cores": num_cores(),
        "packed": of_packed,
        "padded": of_padded,
        "ratio": round(speeds[0]["tokens_per_second"] / speeds[1]["tokens_per_second"], 3) if known else None,
        "seconds": round(seconds, 1),
        "seconds_measured": round(packed["seconds"] + padded["seconds"], 1),
    }
    return {**report, "advice": advice_on(report)}


def _training(found: Mapping[str, Any]) -> dict[str, Any]:
    rows = found["rows"]
    speed = speed_of(rows)
    return {
        "speed": None if speed is None else speed._asdict(),
        "between": round(float(np.median([row["between"] / row["batches"] for row in rows])), 4) if rows else None,
        "memory": found["memory"],
        "measurements": rows,
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
        "them un-packed, and memory; with advice, each with the measurement it comes from. Looks at --rows rows of "
        "each source. Takes two starts of ms-swift with the model, 5 s for each number of workers, and at most "
        "--seconds for each of packed and padded (two rows to warm up and at least one are always trained). Nothing "
        "is saved."
    ),
    add_flags=_add_flags,
    run=never,
    is_of_a_run=lambda argv: True,
    run_of=_bench,
)
