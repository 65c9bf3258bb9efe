"""What `vlpack doctor` saw, for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_vlpack.cli.doctor_advice import STOP, size
from swift_vlpack.words import counted


def doctor_text(report: Mapping[str, Any]) -> str:
    """The report as lines of a label and what is to be said."""
    lines = [*_about_packages(report), *_about_machine(report), *_about_advice(report["advice"])]
    return "\n".join(f"{name:<13} {text}".rstrip() for name, text in lines)


def _about_packages(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    required, optional = report["packages"]["required"], report["packages"]["optional"]
    looked_at = report["imported"]
    swift = required.get("ms-swift", {"version": None, "wanted": "", "fits": False})
    if swift["version"] is None:
        about_swift = "not installed: nothing can be trained here; `vlpack plan --lengths` and `vlpack cache` work"
    else:
        where = {True: "in", False: "not in", None: "to be compared with"}[swift["fits"]]
        about_swift = f"{swift['version']}, {where} the supported range {swift['wanted']}"
    if looked_at.get("swift_problem") is None and "seam" in looked_at:
        about_swift += f"; all {looked_at['seam']} places that packing holds on to are there"
    others = [f"{name} {package['version'] or '-'}" for name, package in required.items() if name != "ms-swift"]
    installed = [f"{name} {package['version']}" for name, package in optional.items() if package["version"]]
    missing = [f"{name} ({package['use']})" for name, package in optional.items() if not package["version"]]
    return [
        ("swift-vlpack", f"{report['version']}, python {'.'.join(map(str, report['python']))}"),
        ("ms-swift", about_swift),
        ("packages", ", ".join(others) or "those that it requires are not known: this copy was not installed"),
        ("optional", ", ".join(installed) or "none"),
        *_listed("missing", missing or ["none"]),
    ]


def _about_machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, looked_at = report["machine"], report["imported"]
    cache, shared, files = machine["cache"], machine["shared_memory"], machine["open_files"]
    devices = [f"{device['name']}, {size(device['memory'])}" for device in looked_at.get("devices", ())]
    memory = "unknown" if machine["memory"] is None else size(machine["memory"])
    free = f", {size(cache['disk']['free'])} free on the disk" if cache["disk"] else ""
    return [
        ("devices", "; ".join(devices) or ("none but the processor" if "torch" in looked_at else "unknown: no torch")),
        (
            "cuda",
            f"{looked_at['cuda'] or 'torch is built without it'}" if "torch" in looked_at else "unknown: no torch",
        ),
        ("processor", f"{counted(machine['cores'], 'core')}, {memory} of memory"),
        ("/dev/shm", "unknown" if shared is None else f"{size(shared['free'])} free of {size(shared['total'])}"),
        ("open files", f"{files['soft'] or 'unlimited'} a process (at most {files['hard'] or 'unlimited'})"),
        ("cache", f"{cache['folder']}: {counted(cache['num_files'], 'file')}, {size(cache['bytes'])}{free}"),
    ]


def _about_advice(advice: list[Mapping[str, str]]) -> list[tuple[str, str]]:
    said = [f"{one['level'].upper() if one['level'] == STOP else one['level']}: {one['text']}" for one in advice]
    return _listed("advice", said or ["none: nothing is in the way of training"])


def _listed(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if not at else "", line) for at, line in enumerate(lines)]
