"""What of other packages is put out of the way for a time, where they have no public way for it.

Each place is named here and looked at before it is relied on: a version that moved it is told so, and none is patched
blindly. What packing holds on to of ms-swift is in `host/seam.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from swift_vlpack.errors import VLPackError


class Place(NamedTuple):
    """An attribute of a module, and what the value there has to have."""

    module: str
    name: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


WORKER = Place("torch.utils.data._utils.worker", "_worker_info")
"""Where torch notes which dataloader worker a process is. `get_worker_info` reads it, nothing public writes it, and
streams that split themselves among workers (`datasets`, webdataset) ask for it."""
VIDEO_READERS = {
    "decord": Place("decord", "VideoReader", ("get_batch", "__getitem__")),
    "torchcodec": Place("torchcodec.decoders", "VideoDecoder", ("get_frames_at",)),
}
"""What qwen_vl_utils reads a video by: it takes the class from the module in the middle of its own code."""


class SeamMoved(VLPackError):
    """A version of another package has moved something that is replaced for a time."""


@contextmanager
def replaced(place: Place, value: Any) -> Iterator[None]:
    """Have another value there, in this process, as long as this is open."""
    module = importlib.import_module(place.module)
    before = getattr(module, place.name)
    setattr(module, place.name, value)
    try:
        yield
    finally:
        setattr(module, place.name, before)


def found(place: Place) -> Any:
    """The module, if it can be imported and has what is replaced; None where it is not installed, or misses a part.

    A library that is installed may still miss another one, such as FFmpeg.
    """
    try:
        module = importlib.import_module(place.module)
    except (ImportError, OSError, RuntimeError):
        return None
    value = getattr(module, place.name, None)
    if missing := [name for name in place.needs if not hasattr(value, name)]:
        raise SeamMoved(f"{place} has no {', '.join(missing)}")
    return module


@cache
def check_worker() -> None:
    """Raise unless torch hears that there is no worker when its place is empty."""
    import torch

    # An object that nothing else can be: torch may have a worker here, or None.
    mark: Any = object()
    try:
        with replaced(WORKER, mark):
            is_heard = get_worker_info() is mark
    except (ImportError, AttributeError):
        is_heard = False
    if not is_heard:
        raise SeamMoved(
            f"torch {torch.__version__} no longer notes its dataloader workers in {WORKER}, so a stream that splits "
            "itself among them would lose rows. Tested with torch 2.4 to 2.15; install one of these, or give data with "
            "a length (streaming false)"
        )


@contextmanager
def no_worker() -> Iterator[None]:
    """Code that asks torch for its dataloader worker hears that there is none."""
    with replaced(WORKER, None):
        yield
