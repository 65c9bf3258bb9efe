"""`vlpack bench`: train a few steps in every way, in turns, and say how fast each is on this machine.

Each run is a process of its own, so that it has its own memory and its own start: this command line again, with
`--phase`, which `bench_run` measures. Turns go on as long as another one fits into `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from swift_vlpack.cli.command import Command, add_packing_flags, add_run_flags
from swift_vlpack.cli.in_run import end_by_signal, in_run, own_command, run_named
from swift_vlpack.cores import num_cores
from swift_vlpack.errors import ConfigError, VLPackError
from swift_vlpack.host.launch import check_launch
from swift_vlpack.host.path_checks import check_file
from swift_vlpack.host.run_flags import given_options
from swift_vlpack.lines import labelled, listed, size, table
from swift_vlpack.words import counted

_ALONE = ("--packing_share", "none")
WAYS = {
    "packs": ("--packing_batch", "packs", *_ALONE),
    "samples": ("--packing_batch", "samples", *_ALONE),
    "share=media": ("--packing_batch", "packs", "--packing_share", "media"),
    "padded": _ALONE,
    "padding_free": _ALONE,
}
"""The packing options of each way to train. The first one has to run: without it there is nothing to compare."""
FIRST = "packs"
FILE, PAGE = Path("bench.json"), Path("bench.md")
MEASURED = ("tokens_per_second", "samples_per_second", "peak_bytes", "seconds_to_step_1", "loading_share")
DEMO_LENGTH = 4096
"""Tokens of a pack of the demo, unless the run names another length."""
DEMO_IMAGES = 240
WORDS = ("the", "small", "red", "house", "near", "a", "street", "shows", "two", "people", "and", "their", "blue", "car")


class PhaseFailed(VLPackError):
    """A process that measures ended without a result; its messages are on stderr."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser, num_ranks=False)
    parser.add_argument("--demo", action="store_true", help="make photos, questions and texts, in place of own data")
    for name, default, text in (
        ("steps", 20, "steps to measure in each run, after two to warm up"),
        ("turns", 3, "most runs of each way"),
        ("minutes", 10, "longest time for all of it"),
        ("rows", 1000, "rows to take from each source, from all over it"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--json", action="store_true", help=f"print what is in {FILE} instead of the report")
    parser.add_argument("--phase", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)  # when the process was started
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # when its last step has to begin
    add_packing_flags(parser, packing_length="the run's --max_length")


def _run(args: argparse.Namespace) -> int:
    if args.phase is not None:
        with in_run(args, needs_gpu=True) as (run, out):
            from swift_vlpack.cli.bench_run import measured

            print(json.dumps(measured(args, run)), file=out)
        return 0
    for name in ("steps", "turns", "minutes", "rows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    for file in (FILE, PAGE):
        check_file("the report", file)
    signal.signal(signal.SIGTERM, end_by_signal)  # exit by an exception, so that `finally` ends the measuring process
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder:
        if args.demo:
            own = _demo_flags(args, Path(folder))
            args.flags, args.argv = [*args.flags, *own], [*args.argv, *own]
        check_launch(run_named(args, needs_gpu=True))
        start = time.time()
        runs = _in_turns(args, start)
        report = bench_report(runs, is_demo=args.demo, num_steps=args.steps, seconds=time.time() - start)
    FILE.write_text(json.dumps(report, indent=1) + "\n")
    PAGE.write_text(bench_page(report))
    print(json.dumps(report) if args.json else bench_text(report))
    return 0


# -- runs -------------------------------------------------------------------------------------------------------------


def _in_turns(args: argparse.Namespace, start: float) -> dict[str, list[dict[str, Any]]]:
    """Return what the runs of each way measured. A way that does not run is tried once."""
    share = 60 * args.minutes / len(WAYS)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(args.turns):
        of_turn = time.time()
        for way in WAYS:
            if turn and "seconds" not in runs[way][0]:
                continue
            try:
                runs[way].append(measured_apart(args.argv, way, share))
            except PhaseFailed as error:
                if way == FIRST:
                    raise
                runs[way].append({"did_not_run": str(error)})
        if 2 * time.time() - of_turn > start + 60 * args.minutes:  # another turn would end too late
            break
    return runs


def measured_apart(argv: Sequence[str], way: str, seconds: float) -> dict[str, Any]:
    """Measure a way in a child process, which is terminated if this process ends. Raises `PhaseFailed`."""
    began = time.time()
    of_phase = ["--phase", way, "--began", str(began), "--until", str(began + seconds)]
    with subprocess.Popen(own_command([*argv, *WAYS[way], *of_phase]), stdout=subprocess.PIPE, text=True) as running:
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
        raise PhaseFailed(f"the {way} run ended with code {running.returncode}; what it said is above")
    found: dict[str, Any] = json.loads(report)
    return found


# -- the data of the demo ---------------------------------------------------------------------------------------------


def _demo_flags(args: argparse.Namespace, folder: Path) -> list[str]:
    """Write the rows of the demo, and return the flags of a run on them."""
    data = folder / "demo.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in demo_rows(folder)))
    flags = ["--dataset", str(data)]
    args.flags = [*args.flags, *([] if args.flags or args.config else flags)]  # so that `run_named` has a run to name
    has_length = "max_length" in given_options(run_named(args).flags)
    return flags if has_length else [*flags, "--max_length", str(DEMO_LENGTH)]


def demo_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Make photos with one to four questions about each, and texts without a photo."""
    from PIL import Image

    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(3, most)))

    for number in range(DEMO_IMAGES):
        path, width, height = folder / f"{number}.jpg", draw.randint(160, 640), draw.randint(160, 640)
        coarse = np.random.default_rng(number).integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height)).save(path, quality=85)
        for _ in range(draw.randint(1, 4)):
            yield {**_row(f"<image>{words(12)}?", words(60)), "images": [str(path)]}
        yield _row(words(60), words(200))


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# -- the report -------------------------------------------------------------------------------------------------------


def bench_report(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], *, is_demo: bool, num_steps: int, seconds: float
) -> dict[str, Any]:
    """Put the runs of each way together: medians of turns. Has no paths, and no names of machines or data."""
    return {
        **runs[FIRST][0]["about"],
        "cores": num_cores(),
        "is_demo": is_demo,
        "steps": num_steps,
        "ways": {way: _of_way(found) for way, found in runs.items()},
        "seconds": round(seconds, 1),
    }


def _of_way(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each number, and what each turn measured; or why the way did not run."""
    if (why := found[0].get("did_not_run")) is not None:
        return {"did_not_run": why}
    turns = [
        {
            "tokens_per_second": round(one["tokens"] / one["seconds"], 1),
            "samples_per_second": round(one["samples"] / one["seconds"], 2),
            "peak_bytes": one["peak_bytes"],
            "seconds_to_step_1": round(one["seconds_to_step_1"], 1),
            "loading_share": round(one["seconds_loading"] / one["seconds"], 3),
            "host_waits": one["host_waits"],
            "steps": one["steps"],
        }
        for one in found
        if "seconds" in one
    ]
    medians = {name: round(statistics.median(one[name] for one in turns), 3) for name in MEASURED}
    return {**medians, "host_waits": turns[-1]["host_waits"], "turns": turns}


def bench_text(report: Mapping[str, Any]) -> str:
    """Write the report for a reader, on one screen: first the versions and the device."""
    device, ways = report["device"], report["ways"]
    memory = f" with {size(device['bytes'])}" if device["bytes"] else ""
    about = [
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("device", f"{device['name']}{memory}, {counted(report['cores'], 'core')}"),
        ("model", "{type}, {parameters:,} parameters, {dtype}, attention {attention}".format(**report["model"])),
        ("data", f"{'the demo, ' if report['is_demo'] else ''}{counted(report['rows'], 'row')}"),
        ("options", ", ".join(f"{name}={value}" for name, value in report["options"].items())),
        ("kernels", "; ".join(_kernel(*one) for one in report.get("kernels", {}).items())),
        *listed("proofs", report["proofs"]),
    ]
    padded = ways["padded"].get("tokens_per_second")
    rows = [(way, *_cells(found, padded)) for way, found in ways.items() if "did_not_run" not in found]
    columns = ("", "tokens/s", "samples/s", "x padded", "peak memory", "to step 1", "loading", "host waits", "turns")
    without = [(way, f"did not run: {found['did_not_run']}") for way, found in ways.items() if "did_not_run" in found]
    ends = [
        ("", f"medians of turns, {counted(report['steps'], 'step')} each at most; tokens as the rows have them alone"),
        ("time", f"{report['seconds']:.0f} s in all; paste {PAGE} into an issue; {FILE} has every number"),
    ]
    return "\n".join(
        filter(None, (labelled(about, columns=120), "", *table(columns, rows), labelled(without), labelled(ends)))
    )


def _kernel(name: str, gaps: Mapping[str, float | str]) -> str:
    """Write how far a kernel is from the reference, as a share of the largest value; or why it does not compute."""
    of_types = (f"{gap:.0e} in {dtype}" if isinstance(gap, float) else gap for dtype, gap in gaps.items())
    return f"{name} {', '.join(dict.fromkeys(of_types))}"


def _cells(found: Mapping[str, Any], padded: float | None) -> tuple[str, ...]:
    tokens = found["tokens_per_second"]
    return (
        f"{tokens:.0f}",
        f"{found['samples_per_second']:.1f}",
        f"{tokens / padded:.2f}" if padded else "-",
        size(found["peak_bytes"]),
        f"{found['seconds_to_step_1']:.1f} s",
        f"{found['loading_share']:.0%}",
        "-" if found["host_waits"] is None else str(found["host_waits"]),
        str(len(found["turns"])),
    )


def bench_page(report: Mapping[str, Any]) -> str:
    """Write the report in Markdown, as an issue takes it: the screen, and every number folded away."""
    title = f"{report['model']['type']} on {report['device']['name']}"
    folded = f"<details><summary>every number</summary>\n\n```json\n{json.dumps(report, indent=1)}\n```\n\n</details>"
    return f"# vlpack bench: {title}\n\n```text\n{bench_text(report)}\n```\n\n{folded}\n"


BENCH = Command(
    name="bench",
    text="measure training on this machine: packed, padded and without padding, in turns",
    usage=(
        "vlpack bench [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft]\n"
        "                    [--demo] [--steps N] [--turns N] [--minutes N] [--rows N] [--json]"
    ),
    description=(
        "Train a few steps of a run on this machine in every way that it can be trained: packs, packs in the steps of "
        "the un-packed run (samples), packs that share media where rows do, padded as ms-swift trains un-packed, and "
        "padded batches without their padding (padding_free). Says what the proofs have shown, tokens and samples a "
        "second, peak memory, the seconds to step 1 and the share of time that waits for data, medians of runs that "
        "take turns. Writes bench.md, to be pasted into an issue, and bench.json: they have no paths and no names of "
        "data. With --demo, --model is all that it needs. Nothing else is saved."
    ),
    add_flags=_add_flags,
    run=_run,
    takes_run_flags=True,
)
