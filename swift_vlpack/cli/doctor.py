"""`vlpack doctor`: what is installed, what the machine is like, and what stands in the way of training."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from swift_vlpack import __version__
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.doctor_advice import STOP, advice_on
from swift_vlpack.cli.doctor_text import doctor_text
from swift_vlpack.cli.machine import machine
from swift_vlpack.cli.packages import packages
from swift_vlpack.config import chosen_options
from swift_vlpack.lengths.cache_folder import lengths_folder

LOOKER = "swift_vlpack.cli.doctor_imports"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _run(args: argparse.Namespace) -> int:
    report = doctor_report()
    print(json.dumps(report) if args.json else doctor_text(report))
    return int(any(advice["level"] == STOP for advice in report["advice"]))


def doctor_report() -> dict[str, Any]:
    """All that was seen, and what to do about it."""
    cache = lengths_folder(chosen_options(os.environ).get("packing_cache_dir"), os.environ)
    facts = {
        "version": __version__,
        "python": list(sys.version_info[:3]),
        "packages": packages(),
        "imported": imported(),
        "machine": machine(cache),
    }
    return {**facts, "advice": [advice._asdict() for advice in advice_on(facts)]}


def imported() -> dict[str, Any]:
    """What has to be imported to be known, in a process of its own: a broken torch can end the one it is in."""
    if find_spec("torch") is None:
        return {}
    print("importing torch and ms-swift, which takes a while ...", file=sys.stderr)
    done = subprocess.run([sys.executable, "-m", LOOKER], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"torch_problem": f"the process that imported it ended with code {done.returncode}: {last}"}
    return found


DOCTOR = Command(
    name="doctor",
    text="look at versions, packages, devices, memory and limits, and say what is in the way",
    usage="vlpack doctor [--json]",
    description=(
        "Look at what training needs: versions and whether packing works with this ms-swift, what is installed and "
        "what is missing, devices, memory, shared memory, open files, the cache of lengths; with advice. Exit code 0, "
        "or 1 if something would stop training. Works without ms-swift, too."
    ),
    add_flags=_add_flags,
    run=_run,
)
