"""`vlpack doctor`: check the environment, and report what would stop training and how to fix it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from swift_vlpack import __version__
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.environment import imported, machine, packages
from swift_vlpack.cli.lines import GB, labelled, listed, size
from swift_vlpack.config import chosen_options
from swift_vlpack.lengths.cache_folder import lengths_folder
from swift_vlpack.words import INSTALL, counted

STOP, WARN, NOTE = "stop", "warn", "note"
"""Levels of advice: training would stop; training may fail or be slow; good to know."""
ENOUGH_SHARED = 2 * GB
"""Shared memory that is enough: a batch with a few large images has about 50 MB, and each worker holds two."""
ENOUGH_FILES = 4096
LEAST_DISK = GB


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _run(args: argparse.Namespace) -> int:
    report = doctor_report()
    print(json.dumps(report) if args.json else doctor_text(report))
    return int(any(advice["level"] == STOP for advice in report["advice"]))


def doctor_report() -> dict[str, Any]:
    """Collect the facts about versions, imports and the machine. Returns them with the advice that follows."""
    cache = lengths_folder(chosen_options(os.environ).get("packing_cache_dir"), os.environ)
    facts = {
        "version": __version__,
        "python": list(sys.version_info[:3]),
        "packages": packages(),
        "imported": imported(),
        "machine": machine(cache),
    }
    return {**facts, "advice": [advice._asdict() for advice in advice_on(facts)]}


class Advice(NamedTuple):
    """A problem, how bad it is, and what to do about it."""

    level: str
    text: str


def advice_on(facts: Mapping[str, Any]) -> list[Advice]:
    """Return the advice that follows from the facts, most severe first."""
    order = {STOP: 0, WARN: 1, NOTE: 2}
    found = (*_on_packages(facts), *_on_imports(facts), *_on_devices(facts), *_on_machine(facts))
    return sorted(found, key=lambda one: order[one.level])


def _on_packages(facts: Mapping[str, Any]) -> Iterator[Advice]:
    if facts["python"] < [3, 10]:
        yield Advice(STOP, "Python 3.10 or newer is needed; make another environment")
    required = facts["packages"]["required"]
    if missing := [name for name, package in required.items() if package["version"] is None]:
        yield Advice(STOP, f"{', '.join(missing)} not installed; {INSTALL} brings all that trains")
    for name, package in required.items():
        if package["version"] is not None and package["fits"] is False:
            wanted = f"{name}{package['wanted']}"
            yield Advice(STOP, f"{name} {package['version']} is not in the supported range; `pip install '{wanted}'`")
    optional = facts["packages"]["optional"]
    if not any(optional[name]["version"] for name in ("decord", "torchcodec")):
        yield Advice(NOTE, "videos cannot be read; `pip install decord` or `pip install torchcodec`, if you have some")


def _on_imports(facts: Mapping[str, Any]) -> Iterator[Advice]:
    found = facts["imported"]
    if found.get("torch_problem"):
        yield Advice(STOP, f"torch cannot be imported: {found['torch_problem']}")
    if found.get("swift_problem"):
        yield Advice(STOP, f"ms-swift does not work with packing here: {found['swift_problem']}")


def _on_devices(facts: Mapping[str, Any]) -> Iterator[Advice]:
    found = facts["imported"]
    if "torch" not in found or found["devices"]:
        return
    if found["cuda"]:
        yield Advice(
            WARN,
            f"torch is built for CUDA {found['cuda']} and sees no GPU: look at `nvidia-smi`, the driver and "
            "CUDA_VISIBLE_DEVICES; in a container, start it with its GPUs (`--gpus all`)",
        )
    else:
        yield Advice(NOTE, "no GPU, and torch is built without one: this trains on the processor, which is slow")


def _on_machine(facts: Mapping[str, Any]) -> Iterator[Advice]:
    machine = facts["machine"]
    shared = machine["shared_memory"]
    if shared is not None and shared["free"] < ENOUGH_SHARED:
        yield Advice(
            WARN,
            f"/dev/shm has {size(shared['free'])} free: batches do not need it, but NCCL joins the GPUs of a machine "
            "through it, and so do dataloaders of torch; give the container more (`docker run --shm-size=16g` or "
            "`--ipc=host`)",
        )
    files = machine["open_files"]["soft"]
    if files is not None and files < ENOUGH_FILES:
        yield Advice(
            WARN,
            f"a process may open {files} files; with many dataloader workers that can be too few (`Too many open "
            f"files`): `ulimit -n {min(65536, machine['open_files']['hard'] or 65536)}` before the run",
        )
    if not machine["is_cache_writable"]:
        yield Advice(
            WARN,
            f"{machine['cache']['folder']} cannot be written: lengths are measured again at every start; name another "
            "folder with packing_cache_dir",
        )
    disk = machine["cache"]["disk"]
    if disk is not None and disk["free"] < LEAST_DISK:
        yield Advice(WARN, f"the disk of {machine['cache']['folder']} has {size(disk['free'])} left; make room there")


def doctor_text(report: Mapping[str, Any]) -> str:
    """Write the report for a reader."""
    return labelled([*_about_packages(report), *_about_machine(report), *_about_advice(report["advice"])], width=13)


def _about_packages(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    required, optional = report["packages"]["required"], report["packages"]["optional"]
    found = report["imported"]
    swift = required.get("ms-swift", {"version": None, "wanted": "", "fits": False})
    if swift["version"] is None:
        about_swift = "not installed: nothing can be trained here; `vlpack plan --lengths` and `vlpack cache` work"
    else:
        where = {True: "in", False: "not in", None: "to be compared with"}[swift["fits"]]
        about_swift = f"{swift['version']}, {where} the supported range {swift['wanted']}"
    if found.get("swift_problem") is None and "seam" in found:
        about_swift += f"; all {found['seam']} places that packing relies on are there"
    others = [f"{name} {package['version'] or '-'}" for name, package in required.items() if name != "ms-swift"]
    installed = [f"{name} {package['version']}" for name, package in optional.items() if package["version"]]
    missing = [f"{name} ({package['use']})" for name, package in optional.items() if not package["version"]]
    return [
        ("swift-vlpack", f"{report['version']}, python {'.'.join(map(str, report['python']))}"),
        ("ms-swift", about_swift),
        ("packages", ", ".join(others) or "required packages are not known: this copy was not installed"),
        ("optional", ", ".join(installed) or "none"),
        *listed("missing", missing or ["none"]),
    ]


def _about_machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, found = report["machine"], report["imported"]
    cache, shared, files = machine["cache"], machine["shared_memory"], machine["open_files"]
    devices = [f"{device['name']}, {size(device['memory'])}" for device in found.get("devices", ())]
    memory = "unknown" if machine["memory"] is None else size(machine["memory"])
    free = f", {size(cache['disk']['free'])} free on the disk" if cache["disk"] else ""
    cuda = f"{found['cuda'] or 'torch is built without it'}" if "torch" in found else "unknown: no torch"
    return [
        ("devices", "; ".join(devices) or ("none but the processor" if "torch" in found else "unknown: no torch")),
        ("cuda", cuda),
        ("processor", f"{counted(machine['cores'], 'core')}, {memory} of memory"),
        ("/dev/shm", "unknown" if shared is None else f"{size(shared['free'])} free of {size(shared['total'])}"),
        ("open files", f"{files['soft'] or 'unlimited'} a process (at most {files['hard'] or 'unlimited'})"),
        ("cache", f"{cache['folder']}: {counted(cache['num_files'], 'file')}, {size(cache['bytes'])}{free}"),
    ]


def _about_advice(advice: list[Mapping[str, str]]) -> list[tuple[str, str]]:
    texts = [f"{one['level'].upper() if one['level'] == STOP else one['level']}: {one['text']}" for one in advice]
    return listed("advice", texts or ["none: nothing is in the way of training"])


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
