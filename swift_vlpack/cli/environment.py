"""Describe the environment of a training run: installed packages, the machine, torch and ms-swift.

To import torch and ms-swift takes seconds, and a broken installation can crash the process. So `imported` does it in a
child process: `python -m swift_vlpack.cli.environment` prints one JSON object. Everything else needs Python alone.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_vlpack.errors import VLPackError

OURS = "swift-vlpack"
OPTIONAL = {
    "flash-attn": "--attn_impl flash_attn; packing needs it for nothing else",
    "liger-kernel": "--use_liger_kernel true",
    "decord": "reading videos",
    "torchcodec": "reading videos",
    "deepspeed": "--deepspeed",
    "bitsandbytes": "--quant_method bnb",
    "flash-linear-attention": "quick linear attention, as of Qwen3.5 and Qwen3-Next",
    "causal-conv1d": "quick linear attention, as of Qwen3.5 and Qwen3-Next",
    "tensorboard": "--report_to tensorboard",
    "wandb": "--report_to wandb",
}
"""Packages that training can do without, and what needs them."""
SHARED_MEMORY = Path("/dev/shm")
IMPORTER = "swift_vlpack.cli.environment"
_NAME = re.compile(r"[\w.-]+")
_CGROUP = Path("/sys/fs/cgroup")


def packages() -> dict[str, Any]:
    """Return every required package with its version, range and whether it fits, and every optional one."""
    required = {
        name: {"version": (version := version_of(name)), "wanted": wanted, "fits": fits(version, wanted)}
        for name, wanted in requirements().items()
    }
    optional = {name: {"version": version_of(name), "use": use} for name, use in OPTIONAL.items()}
    return {"required": required, "optional": optional}


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


def machine(cache: Path) -> dict[str, Any]:
    """Return cores, memory, shared memory, open files and disk of this process; sizes in bytes, None if unknown."""
    return {
        "cores": num_cores(),
        "memory": memory(),
        "shared_memory": _room(SHARED_MEMORY),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "cache": {"folder": str(cache), **_size_of_folder(cache), "disk": _room(_existing(cache))},
        "is_cache_writable": os.access(_existing(cache), os.W_OK),
    }


def num_cores() -> int:
    """Count the cores that this process may use: a container may have fewer than its machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(_CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        usable = min(usable, max(1, round(int(quota) / int(period))))
    return usable


def memory() -> int | None:
    """Return the memory of the machine in bytes, or the limit of the container if that is less; None if unknown."""
    sizes = [int(limit) for limit in [_text(_CGROUP / "memory.max")] if limit.isdecimal()]
    with suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)


def _size_of_folder(folder: Path) -> dict[str, int]:
    """Count the files of a folder and their bytes, without its subfolders."""
    sizes = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                sizes += [entry.stat(follow_symlinks=False).st_size] if entry.is_file(follow_symlinks=False) else []
    return {"num_files": len(sizes), "bytes": sum(sizes)}


def _existing(path: Path) -> Path:
    """Return the path if it exists, else the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _room(path: Path) -> dict[str, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _limit(kind: int) -> dict[str, int | None]:
    soft, hard = resource.getrlimit(kind)
    return {name: None if n == resource.RLIM_INFINITY else n for name, n in (("soft", soft), ("hard", hard))}


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def imported() -> dict[str, Any]:
    """Import torch and ms-swift in another process. Returns their versions, the devices, and what failed."""
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
        found = _torch()
    except Exception as error:  # whatever a broken installation raises
        return {"torch_problem": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {**found, **_seam()}


def _torch() -> dict[str, Any]:
    import torch

    cuda = torch.cuda
    devices = [cuda.get_device_properties(at) for at in range(cuda.device_count() if cuda.is_available() else 0)]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [{"name": device.name, "memory": device.total_memory} for device in devices],
    }


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


if __name__ == "__main__":
    print(json.dumps(import_here()))
