"""Record which environment variables some code reads, in whatever way: `os.getenv`, an alias, `in`, a default.

While the code runs, the class of `os.environ` is replaced by one that records the names that are read.

>>> with noted_reads() as reads:
...     language = os.environ.get("MY_LANGUAGE", "en")
>>> reads.names
{'MY_LANGUAGE'}
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

_OF_RANKS = re.compile(
    r"((LOCAL|NODE|GROUP|ROLE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME|NPROC_PER_NODE|NNODES"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|SLURM|OMPI|PMI|PMIX|LSB|PBS|KUBERNETES|RAY)_\w+"
)
"""Variables by which launchers tell processes apart. They differ between the ranks of a run, but lengths do not."""
_OF_THE_MACHINE = re.compile(
    r"(NCCL|GLOO|CUDA|TORCH_NCCL|PYTEST|TQDM)_\w+|PYTHON[A-Z]+|(OMP|MKL|OPENBLAS)_NUM_THREADS|\w*VERBOSITY"
    r"|\w*LOG_?LEVEL|HOSTNAME|HOME|USER|LOGNAME|PATH|PWD|TMPDIR|TMP|TEMP|TERM|COLUMNS|LINES|LANG|LC_\w+|XDG_\w+"
    r"|HF_(HOME|TOKEN|ENDPOINT|ASSETS_CACHE|(HUB|DATASETS|XET)_\w+)|MODELSCOPE_\w+"
)
"""Variables about logs and the machine. They differ from start to start, and libraries read them for other purposes."""
_READERS_OF_THEIR_OWN = frozenset(
    ("swift_vlpack", "tqdm", "accelerate", "huggingface_hub", "modelscope", "requests", "urllib3", "torch.distributed",
     "swift.utils.logger", "swift.utils.env", "transformers.utils.logging", "datasets.utils.logging")
) | (sys.stdlib_module_names - {"os", "posixpath", "__main__"})  # fmt: skip
"""Modules whose reads are ignored, because they read the same variables whoever calls them. `posixpath` is not among
them: it expands the variables in a path for its caller."""
_WAYS = ("os", "collections.abc", "_collections_abc")
"""Modules of the frames between the code that reads and `_Noting`."""


@dataclass(slots=True)
class Reads:
    """Environment variables that were read."""

    names: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    """Places, as `file:line`, that read the whole environment at once: it is unknown which variables they use."""

    def add(self, other: Reads) -> None:
        """Add the reads of another object to these."""
        self.names |= other.names
        self.whole |= other.whole


_lock = threading.Lock()
_open: list[Reads] = []


@contextmanager
def noted_reads() -> Iterator[Reads]:
    """Record what all threads of this process read while the context is open."""
    reads = Reads()
    with _lock:
        _open.append(reads)
        _exchange(_Noting)
    try:
        yield reads
    finally:
        with _lock:
            # Compare by identity, because two empty `Reads` are equal.
            _open[:] = [other for other in _open if other is not reads]
            if not _open:
                _exchange(os._Environ)


def _forget() -> None:
    """Give a forked process a new lock and the plain environment. The lock may have been held at the fork."""
    global _lock
    _lock = threading.Lock()
    _open.clear()
    _exchange(os._Environ)


def has_whole_environment(value: Any) -> bool:
    """Tell whether a value is a copy of the environment: a dict with more than half of its names."""
    if not isinstance(value, dict):
        return False
    names = set(os.environ)
    return 2 * len(names & {os.fsdecode(name) for name in value if isinstance(name, (str, bytes))}) > len(names)


class _OfAll(str):
    """A name got by iterating the whole environment; reading its value does not count as reading that variable."""

    __slots__ = ()


class _Noting(os._Environ):  # type: ignore[type-arg]
    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, _OfAll):
            _note(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[Any]:
        if (reader := _reader()) is not None:
            where = f"{reader.f_code.co_filename}:{reader.f_lineno}"
            for reads in tuple(_open):
                reads.whole.add(where)
        return (_OfAll(name) if isinstance(name, str) else name for name in super().__iter__())


def _exchange(kind: type) -> None:
    for environment in (os.environ, getattr(os, "environb", None)):
        if isinstance(environment, os._Environ):
            environment.__class__ = kind


def _note(name: Any) -> None:
    if not isinstance(name, (str, bytes)):
        return
    text = os.fsdecode(name)
    # Skip known names first: a few names are read very often.
    new = [reads for reads in tuple(_open) if text not in reads.names]
    if new and not is_of_launchers(text) and _reader() is not None:
        for reads in new:
            reads.names.add(text)


@cache
def is_of_launchers(name: str) -> bool:
    """Tell whether a variable only says where and how a process runs, judging by its name."""
    return is_of_ranks(name) or _OF_THE_MACHINE.fullmatch(name) is not None


@cache
def is_of_ranks(name: str) -> bool:
    """Tell whether launchers set a variable to a different value for each rank or start, judging by its name."""
    return _OF_RANKS.fullmatch(name) is not None


def _reader() -> FrameType | None:
    """Return the frame that reads the environment; None if it is in one of `_READERS_OF_THEIR_OWN`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in (*_WAYS, __name__):
        frame = frame.f_back
    if frame is None or _reads_for_itself(str(frame.f_globals.get("__name__", ""))):
        return None
    return frame


@cache
def _reads_for_itself(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:num]) in _READERS_OF_THEIR_OWN for num in range(1, len(parts) + 1))


os.register_at_fork(after_in_child=_forget)
