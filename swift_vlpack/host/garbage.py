"""Keep garbage collection away from the 600,000 objects of imported libraries, and give freed memory back.

A full collection looks at every object and writes to it. That takes 0.3 s, four times before the first step, and forked
processes share memory only until one of them writes to it: 170 MB of a run.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from pathlib import Path


def pass_over_imports() -> None:
    """Exclude all objects that exist now, if this process was started only to train.

    In a notebook, these objects may include a model that is no longer needed, which only a collection would free.
    """
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if Path(file).parts[-3:-1] == ("swift", "cli"):
        gc.freeze()
        # Otherwise torch's bindings report these objects as leaked when the process ends.
        atexit.register(gc.unfreeze)


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can: otherwise 100 MB of the proof stay through step 1."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc
        trim(0)
