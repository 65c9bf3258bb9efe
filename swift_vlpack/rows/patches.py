"""Replace parts of other packages for a time, where they have no public way for it.

Two things are replaced: the note by which torch tells code that it runs in a dataloader worker (`no_worker`), and the
readers of videos, so that a length pass decodes no frames (`without_frames`). Each place is looked at before it is
replaced: if a version moved it, that is said, and nothing is patched blindly. The parts of ms-swift that packing holds
on to are in `host/seam.py`.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from swift_vlpack.errors import VLPackError

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """An attribute of a module, and the attributes that its value must have."""

    module: str
    name: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


WORKER = Place("torch.utils.data._utils.worker", "_worker_info")
"""Where torch notes which dataloader worker a process is. `get_worker_info` reads it and nothing public writes it.
Streams that split themselves among workers (`datasets`, webdataset) ask for it."""
VIDEO_READERS = {
    "decord": Place("decord", "VideoReader", ("get_batch", "__getitem__")),
    "torchcodec": Place("torchcodec.decoders", "VideoDecoder", ("get_frames_at",)),
}
"""The classes by which qwen_vl_utils reads a video; it takes them from these modules in the middle of its own code."""


class SeamMoved(VLPackError):
    """A version of another package moved something that we replace for a time."""


@contextmanager
def replaced(place: Place, value: Any) -> Iterator[None]:
    """Put another value in a place, in this process, while this is open."""
    module = importlib.import_module(place.module)
    before = getattr(module, place.name)
    setattr(module, place.name, value)
    try:
        yield
    finally:
        setattr(module, place.name, before)


def found(place: Place) -> Any:
    """Return the module of a place; None if it cannot be imported, for which another library may be missing (FFmpeg).

    Raises `SeamMoved` if the place lacks what is needed.
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
    """Raise unless torch believes that there is no worker when its note is empty."""
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
    """While this is open, code that asks torch for its dataloader worker hears that there is none."""
    with replaced(WORKER, None):
        yield


# -- videos without frames --------------------------------------------------------------------------------------------
#
# The container of a video says how many frames there are and how large. qwen_vl_utils then runs its own code with a
# reader that opens the file and hands out frames on torch's `meta` device, where sampling, resizing and cutting into
# patches compute shapes and nothing else.


@contextmanager
def without_frames() -> Iterator[None]:
    """While this is open, video readers decode nothing; decord one frame, to know its size."""
    with ExitStack() as stack:
        for place, reader in _readers():
            stack.enter_context(replaced(place, reader))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")  # qwen_vl_utils copies its frames
        yield


@cache
def _readers() -> tuple[tuple[Place, type], ...]:
    """Return the installed readers with their replacements. A reader that changed stays: slower, and as right."""
    made = (("decord", _without_frames_by_decord), ("torchcodec", _without_frames_by_torchcodec))
    readers = []
    for name, without in made:
        place = VIDEO_READERS[name]
        try:
            module = found(place)
        except SeamMoved as error:
            logger.warning("videos are decoded to learn their lengths, which takes longer: %s", error)
            continue
        if module is not None:
            readers.append((place, without(getattr(module, place.name))))
    return tuple(readers)


def _without_frames_by_decord(reader: Any) -> type:
    class Reader(reader):  # type: ignore[misc]
        def get_batch(self, indices: Any) -> Any:
            return _Batch(torch.empty((len(indices), *self[0].shape), dtype=torch.uint8, device="meta"))

    return Reader


def _without_frames_by_torchcodec(decoder: Any) -> type:
    class Decoder(decoder):  # type: ignore[misc]
        def get_frames_at(self, indices: Any) -> Any:
            shape = (len(indices), 3, self.metadata.height, self.metadata.width)
            return _Batch(torch.empty(shape, dtype=torch.uint8, device="meta"))

    return Decoder


class _Batch:
    """Frames, as either library wraps them."""

    def __init__(self, frames: torch.Tensor) -> None:
        self.data = frames

    def asnumpy(self) -> torch.Tensor:
        """Return the tensor itself, because numpy has no arrays without memory; `torch.tensor` takes it as well."""
        return self.data
