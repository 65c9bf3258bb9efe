"""Processes in a namespace of their own, where mounts can be what a test wants them to be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def with_shared_memory_of(size: str, *argv: Any, timeout_seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python in a namespace where /dev/shm is that small; the machine's own stays as it is."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, *map(str, argv)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_seconds, check=False)


def why_no_namespace() -> str | None:
    """What keeps a process here from having mounts of its own."""
    if shutil.which("unshare") is None:
        return "there is no unshare on this system"
    done = with_shared_memory_of("1m", "-c", "")
    return f"no mount in a namespace of one's own: {done.stderr}" if done.returncode else None
