"""Patch torch and video readers inside a `with` block, for two needs that they have no public interface for.

`no_worker` replaces the variable by which torch tells code that it runs in a dataloader worker. `without_frames`
replaces the readers of videos, so that a thread that needs only sizes decodes no frames. Each place is checked before
it is replaced: if a version of the package moved it, the user is told, and nothing is patched blindly. `host/seam.py`
has the parts of ms-swift that packing depends on.
"""

from __future__ import annotations

import importlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
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
"""The variable in which torch stores the dataloader worker of a process. `get_worker_info` returns it, and no public
function sets it. Streams that split themselves among workers (`datasets`, webdataset) read it."""


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
    """Return the module of a place; None if it cannot be imported, for example because FFmpeg is missing.

    Raises `SeamMoved` if the value at the place lacks an attribute in `place.needs`.
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
    # Use a unique object, because the place may already hold a worker or None.
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
# The container of a video says how many frames there are, and how large they are. So the reader opens the file, but
# returns frames on torch's `meta` device, which have a shape and no content. The code of qwen_vl_utils runs unchanged:
# on that device, sampling, resizing and cutting into patches compute shapes only.


class _OfThread(threading.local):
    decodes = True


_of_thread = _OfThread()


@contextmanager
def without_frames() -> Iterator[None]:
    """Let video readers of this thread decode no frames inside the block, except one for its size under decord.

    Other threads decode as before, because a replaced reader looks at the flag of its own thread.
    """
    with _replacement:
        before, _of_thread.decodes = _of_thread.decodes, False
        try:
            yield
        finally:
            _of_thread.decodes = before


class _Replacement:
    """Replaces the readers of the process while any thread is inside; the last thread to leave restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                for place, reader in _readers():
                    self._undo.enter_context(replaced(place, reader))
                self._undo.enter_context(warnings.catch_warnings())
                # qwen_vl_utils copies its frames.
                warnings.filterwarnings("ignore", message="To copy construct from a tensor")
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._undo.close()


_replacement = _Replacement()


@cache
def _readers() -> tuple[tuple[Place, type], ...]:
    """Return the installed readers with their replacements.

    A reader that changed in a new version is not replaced. Then measuring takes longer, but the lengths are as right.
    """
    readers = []
    for place, without in VIDEO_READERS.items():
        try:
            module = found(place)
        except SeamMoved as error:
            logger.warning("videos are decoded to measure their lengths, which takes longer: %s", error)
            continue
        if module is not None:
            readers.append((place, without(getattr(module, place.name))))
    return tuple(readers)


def _without_frames_by_decord(reader: Any) -> type:
    class Reader(reader):  # type: ignore[misc]
        def get_batch(self, indices: Any) -> Any:
            if _of_thread.decodes:
                return super().get_batch(indices)
            return _Batch(torch.empty((len(indices), *self[0].shape), dtype=torch.uint8, device="meta"))

    return Reader


def _without_frames_by_torchcodec(decoder: Any) -> type:
    class Decoder(decoder):  # type: ignore[misc]
        def get_frames_at(self, indices: Any) -> Any:
            if _of_thread.decodes:
                return super().get_frames_at(indices)
            shape = (len(indices), 3, self.metadata.height, self.metadata.width)
            return _Batch(torch.empty(shape, dtype=torch.uint8, device="meta"))

    return Decoder


class _Batch:
    """Frames, with the attributes that both libraries give them."""

    def __init__(self, frames: torch.Tensor) -> None:
        self.data = frames

    def asnumpy(self) -> torch.Tensor:
        """Return the tensor itself: numpy has no arrays without memory, and `torch.tensor` accepts it as well."""
        return self.data


VIDEO_READERS: dict[Place, Callable[[Any], type]] = {
    Place("decord", "VideoReader", ("get_batch", "__getitem__")): _without_frames_by_decord,
    Place("torchcodec.decoders", "VideoDecoder", ("get_frames_at",)): _without_frames_by_torchcodec,
}
"""The classes with which qwen_vl_utils reads a video, each with the function that makes its replacement. qwen_vl_utils
imports them inside its functions, so a patch takes effect."""
