"""`vlpack doctor`: check versions, and whether packing works with this ms-swift; say what to install.

To import torch and ms-swift takes seconds, and a broken installation can crash the process. So `imported` does it in a
child process: `python -m swift_vlpack.cli.doctor` prints one JSON object. Everything else needs Python alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from swift_vlpack import __version__
from swift_vlpack.cli.command import Command
from swift_vlpack.errors import VLPackError
from swift_vlpack.lines import labelled, listed
from swift_vlpack.words import INSTALL

OURS = "swift-vlpack"
IMPORTER = "swift_vlpack.cli.doctor"
_NAME = re.compile(r"[\w.-]+")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _run(args: argparse.Namespace) -> int:
    report: dict[str, Any] = {
        "version": __version__,
        "python": list(sys.version_info[:3]),
        "packages": packages(),
        "imported": imported(),
    }
    report["advice"] = list(advice_on(report))
    print(json.dumps(report) if args.json else doctor_text(report))
    return int(bool(report["advice"]))


# -- versions ---------------------------------------------------------------------------------------------------------


def packages() -> dict[str, Any]:
    """Return every required package with its version, its range, and whether it fits."""
    return {
        name: {"version": (version := version_of(name)), "wanted": wanted, "fits": fits(version, wanted)}
        for name, wanted in requirements().items()
    }


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, str]:
    """Return the range of versions of every package that an install brings; empty if this copy was not installed."""
    try:
        return ranges(metadata.requires(OURS) or [])
    except metadata.PackageNotFoundError:
        return {}


def ranges(lines: Iterable[str]) -> dict[str, str]:
    """Split requirements as metadata writes them into name and range; leave out what an extra adds.

    >>> ranges(["ms-swift<4.7,>=4.5.3", "torchvision", "pytest>=8; extra == 'test'"])
    {'ms-swift': '<4.7,>=4.5.3', 'torchvision': ''}
    """
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra ==" not in marker and (name := _NAME.match(requirement)):
            found[name[0]] = requirement[name.end() :].strip()
    return found


def fits(version: str | None, wanted: str) -> bool | None:
    """Tell whether a version is in a range; None if `packaging`, which knows the rules, is not installed.

    >>> fits("4.6.0", ">=4.5.3,<4.7"), fits("4.7.0", ">=4.5.3,<4.7"), fits(None, ""), fits("2.15.0+cpu", ">=2.4")
    (True, False, False, True)
    >>> fits("1.30", "~=1.26"), fits("2.0", "~=1.26")
    (True, False)
    """
    if version is None:
        return False
    try:
        # Not at the top: `vlpack doctor` has to answer where nothing but numpy is installed.
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:
        return None
    # A nightly build of a later version is in the range: its user knows that it is one.
    return SpecifierSet(wanted).contains(version, prereleases=True)


# -- imports ----------------------------------------------------------------------------------------------------------


def imported() -> dict[str, Any]:
    """Import torch and ms-swift in another process. Returns the version of torch, and what failed."""
    if find_spec("torch") is None:
        return {}
    print("importing torch and ms-swift, which takes a while ...", file=sys.stderr)
    done = subprocess.run([sys.executable, "-m", IMPORTER], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"torch_problem": f"the process that imported it ended with code {done.returncode}: {last}"}
    return found


def import_here() -> dict[str, Any]:
    """Import torch and ms-swift in this process. Returns what was found; a failed import is a text in the result."""
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        return {"torch_problem": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {"torch": torch.__version__, **_seam()}


def _seam() -> dict[str, Any]:
    try:
        from swift_vlpack.host.seam import SEAM, check_seam

        check_seam()
    except ModuleNotFoundError as error:
        return {} if error.name == "swift" else {"swift_problem": str(error)}
    except VLPackError as error:
        return {"swift_problem": str(error)}
    except Exception as error:  # of an import of ms-swift
        return {"swift_problem": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {"seam": len(SEAM), "swift_problem": None}


# -- advice -----------------------------------------------------------------------------------------------------------


def advice_on(facts: Mapping[str, Any]) -> Iterator[str]:
    """Say what would stop training, and what to do about it."""
    if facts["python"] < [3, 10]:
        yield "Python 3.10 or newer is needed; make another environment"
    packages, found = facts["packages"], facts["imported"]
    if missing := [name for name, package in packages.items() if package["version"] is None]:
        yield f"{', '.join(missing)} not installed; {INSTALL} brings all that trains"
    for name, package in packages.items():
        if package["version"] is not None and package["fits"] is False:
            wanted = f"{name}{package['wanted']}"
            yield f"{name} {package['version']} is not in the supported range; `pip install '{wanted}'`"
    if found.get("torch_problem"):
        yield f"torch cannot be imported: {found['torch_problem']}"
    if found.get("swift_problem"):
        yield f"ms-swift does not work with packing here: {found['swift_problem']}"


# -- text -------------------------------------------------------------------------------------------------------------


def doctor_text(report: Mapping[str, Any]) -> str:
    """Write the report for a reader."""
    found = report["imported"]
    shown = [
        f"{name} {package['version'] or 'is missing'}" + (f" ({package['wanted']})" if package["wanted"] else "")
        for name, package in report["packages"].items()
    ]
    seams = f"all {found['seam']} places in ms-swift that packing relies on are there" if found.get("seam") else "-"
    lines = [
        ("swift-vlpack", f"{report['version']}, python {'.'.join(map(str, report['python']))}"),
        ("packages", ", ".join(shown) or "required packages are not known: this copy was not installed"),
        ("seams", seams),
        *listed("in the way", report["advice"] or ["nothing"]),
    ]
    return labelled(lines)


DOCTOR = Command(
    name="doctor",
    text="look at versions, and say what is in the way of training",
    usage="vlpack doctor [--json]",
    description=(
        "Look at what training needs: versions, and whether packing works with this ms-swift; say what is in the way. "
        "Exit code 0, or 1 if something would stop training. Works without ms-swift, too."
    ),
    add_flags=_add_flags,
    run=_run,
)

if __name__ == "__main__":
    print(json.dumps(import_here()))
