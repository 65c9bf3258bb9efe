"""Cheap memory and fewer forks for the process that runs the tests: a third of its time went there, in the kernel."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc use freed memory again; other C libraries go on as they are.

    Because it otherwise returns every large tensor to the kernel, which fills the pages of the next one with zeros.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_TOP_PAD, 1 << 26)


@contextmanager
def maps_in_this_process() -> Iterator[None]:
    """Let `Dataset.map` work in this process where it is given one process, as ms-swift gives it by default.

    Because it would fork a pool of one and a manager for every map, and ms-swift maps a file of rows several times:
    a process with all models of the tests in it takes longer to fork than to map twenty rows.
    """
    from datasets import Dataset

    real = Dataset.map

    @functools.wraps(real)
    def without_a_pool(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("num_proc") == 1:
            options["num_proc"] = None
        return real(self, *args, **options)

    Dataset.map = without_a_pool
    try:
        yield
    finally:
        Dataset.map = real
