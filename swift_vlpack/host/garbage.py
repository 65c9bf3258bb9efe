"""Let garbage collection pass over what lives as long as the process: 600,000 objects of the libraries it imports.

A full collection looks at every object and writes to it. That takes 0.3 s, four times before the first step, and costs
memory too: processes share theirs after a fork until one of them writes to it, and the objects of a run take 170 MB.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def pass_over_imports() -> None:
    """Let no collection look at what exists now, if this process was started to train and nothing else.

    Only then: in a notebook there may be a model that nobody needs any more and only a collection frees.
    """
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if Path(file).parts[-3:-1] == ("swift", "cli"):
        gc.freeze()
        # Else torch's bindings print these objects as leaked when the process ends.
        atexit.register(gc.unfreeze)


@contextmanager
def shared_with_forks() -> Iterator[None]:
    """Let no collection in a process that is forked here look at what it shares with this one; this one may look."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back_memory() -> None:
    """Give the system what was freed, where the C library can: of the proof it keeps 100 MB, in the first step too."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc
        trim(0)
