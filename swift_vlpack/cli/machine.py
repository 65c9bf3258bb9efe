"""What the system gives a process: processors, memory, shared memory, open files, room on disks."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
_CGROUP = Path("/sys/fs/cgroup")


def machine(cache: Path) -> dict[str, Any]:
    """Plain numbers, sizes in bytes; null where the system does not say."""
    return {
        "cores": num_cores(),
        "memory": memory(),
        "shared_memory": _room(SHARED_MEMORY),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "cache": {"folder": str(cache), **size_of_folder(cache), "disk": _room(_existing(cache))},
        "is_cache_writable": os.access(_existing(cache), os.W_OK),
    }


def num_cores() -> int:
    """Those that this process may use, which in a container can be fewer than there are."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(_CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        usable = min(usable, max(1, round(int(quota) / int(period))))
    return usable


def memory() -> int | None:
    """What a process can have: of the machine, or of its container where that is less."""
    sizes = [int(limit) for limit in [_text(_CGROUP / "memory.max")] if limit.isdecimal()]
    with suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)


def size_of_folder(folder: Path) -> dict[str, int]:
    """Files and bytes right inside of a folder."""
    sizes = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                sizes += [entry.stat(follow_symlinks=False).st_size] if entry.is_file(follow_symlinks=False) else []
    return {"num_files": len(sizes), "bytes": sum(sizes)}


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
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
