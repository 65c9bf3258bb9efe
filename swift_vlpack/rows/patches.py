"""Patch torch and video readers for the time of a `with` block, where they have no public way for it.

Two things are replaced: the variable from which torch tells code that it runs in a dataloader worker (`no_worker`), and
the readers of videos, so that a length pass decodes no frames (`without_frames`). Each place is checked before it is
replaced: if a version of the package moved it, the user is told, and nothing is patched blindly. The parts of ms-swift
that packing depends on are in `host/seam.py`.
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
"""Where torch stores which dataloader worker a process is. `get_worker_info` reads it, and nothing public writes it.
Streams that split themselves among workers (`datasets`, webdataset) read it."""
VIDEO_READERS = {
    "decord": Place("decord", "VideoReader", ("get_batch", "__getitem__")),
    "torchcodec": Place("torchcodec.decoders", "VideoDecoder", ("get_frames_at",)),
}
"""The classes with which qwen_vl_utils reads a video; it imports them inside its functions, so a patch takes effect."""


class SeamMoved(VLPackError):
    """A version of another package moved or changed something that we patch."""


@contextmanager
def replaced(place: Place, value: Any) -> Iterator[None]:
    """Put another value in a place, in this process, until the block ends."""
    module = importlib.import_module(place.module)
    before = getattr(module, place.name)
    setattr(module, place.name, value)
    try:
        yield
    finally:
        setattr(module, place.name, before)


def found(place: Place) -> Any:
    """Return the module of a place; None if it cannot be imported, as when a library it needs (FFmpeg) is missing.

    Raises `SeamMoved` if the value at the place lacks an attribute that it needs.
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
    """Raise `SeamMoved` unless torch reads its worker from the place that `no_worker` patches."""
    # A unique object, because the place may hold a worker or None already.
    mark: Any = object()
    try:
        with replaced(WORKER, mark):
            is_read = get_worker_info() is mark
    except (ImportError, AttributeError):
        is_read = False
    if not is_read:
        raise SeamMoved(
            f"torch {torch.__version__} no longer stores its dataloader workers in {WORKER}, so a stream that splits "
            "itself among them would lose rows. Tested with torch 2.4 to 2.15; install one of these, or give data with "
            "a length (streaming false)"
        )


@contextmanager
def no_worker() -> Iterator[None]:
    """Let `get_worker_info` return None until the block ends."""
    with replaced(WORKER, None):
        yield


# -- videos without frames --------------------------------------------------------------------------------------------
#
# The container of a video says how many frames there are and how large they are. qwen_vl_utils runs its own code, with
# a reader that opens the file and returns frames on torch's `meta` device, where sampling, resizing and cutting into
# patches compute shapes and nothing else.


@contextmanager
def without_frames() -> Iterator[None]:
    """Let video readers decode nothing until the block ends; decord decodes one frame, to know its size."""
    with ExitStack() as stack:
        for place, reader in _readers():
            stack.enter_context(replaced(place, reader))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")  # qwen_vl_utils copies its frames
        yield


@cache
def _readers() -> tuple[tuple[Place, type], ...]:
    """Return the installed readers with their replacements.

    A reader that changed in a new version is not replaced: lengths take longer then, and are as right.
    """
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
    """Frames, with the attributes that both libraries give them."""

    def __init__(self, frames: torch.Tensor) -> None:
        self.data = frames

    def asnumpy(self) -> torch.Tensor:
        """Return the tensor itself, because numpy has no arrays without memory; `torch.tensor` takes it as well."""
        return self.data
