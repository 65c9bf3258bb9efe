"""Videos without frames: the container says how many there are and how large, a tensor without memory stands for them.

qwen_vl_utils reads a video by decord or torchcodec, whichever is installed. Its own code runs here, with a reader that
opens the file and hands out frames on torch's `meta` device, where sampling, resizing and cutting into patches compute
shapes and nothing else.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from swift_vlpack.rows.patches import VIDEO_READERS, Place, SeamMoved, found, replaced

logger = logging.getLogger(__name__)


@contextmanager
def without_frames() -> Iterator[None]:
    """While this is open, video readers decode nothing (decord one frame, to know its size)."""
    with ExitStack() as stack:
        for place, reader in _readers():
            stack.enter_context(replaced(place, reader))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")  # qwen_vl_utils copies its frames
        yield


@cache
def _readers() -> tuple[tuple[Place, type], ...]:
    """Of the readers that are installed. One that has changed decodes what it is asked for: slower, and as right."""
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
    """Frames as either library wraps them."""

    def __init__(self, frames: torch.Tensor) -> None:
        self.data = frames

    def asnumpy(self) -> torch.Tensor:
        """Not numpy's, which has no arrays without memory; `torch.tensor` takes it as well."""
        return self.data
