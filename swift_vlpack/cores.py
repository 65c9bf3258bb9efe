"""Count the cores that this process may use: a container or a batch system may allow fewer than its machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def num_cores() -> int:
    """Return how many cores this process may use, at least 1: by its affinity, and by the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the cores that each control group around this process allows. Linux has them, in two versions."""
    groups = [line.split(":", 2) for line in _text(OWN_GROUPS).splitlines()]
    for _, controllers, path in (group for group in groups if len(group) == 3):
        root = CGROUPS if not controllers else CGROUPS / "cpu" if "cpu" in controllers.split(",") else None
        # In a container the path may be that of the machine, which is not there: its own group is the root.
        for folder in () if root is None else (root, *(root / part for part in _with_parents(path.strip("/")))):
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            if not period:
                quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            if quota.strip().isdigit() and period.strip().isdigit():  # else it is "max" or -1: no quota
                yield int(quota) / int(period)


def _with_parents(path: str) -> list[Path]:
    return [Path(path), *Path(path).parents][:-1] if path else []


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
