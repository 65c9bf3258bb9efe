"""Videos without frames: the container says how many there are and how large, a tensor without memory stands for them.

qwen_vl_utils reads a video by decord or torchcodec, whichever is installed. Its own code runs here, with a reader that
opens the file and hands out frames on torch's `meta` device, where sampling, resizing and cutting into patches compute
shapes and nothing else.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def without_frames() -> Iterator[None]:
    """While this is open, video readers decode nothing (decord one frame, to know its size)."""
    with ExitStack() as stack:
        for module, name, reader in _readers():
            stack.enter_context(patch.object(module, name, reader))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")  # qwen_vl_utils copies its frames
        yield


def _readers() -> Iterator[tuple[Any, str, type]]:
    for module, name, without in (
        ("decord", "VideoReader", _without_frames_by_decord),
        ("torchcodec.decoders", "VideoDecoder", _without_frames_by_torchcodec),
    ):
        if (loaded := _loaded(module)) is not None:
            yield loaded, name, without(getattr(loaded, name))


@cache
def _loaded(module: str) -> Any:
    """A library that is installed may still miss another one, such as FFmpeg; then nobody can read by it."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return None


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
