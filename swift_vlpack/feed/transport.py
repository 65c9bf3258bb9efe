"""Bring batches out of dataloader workers: written once, into memory that the trainer's process maps.

    worker     buffer = free or new -> pixels are joined in it -> the other tensors are copied in -> name of the buffer
    trainer    maps the buffer -> tensors -> when the last tensor is gone, the first byte says that it is free again

A worker keeps its buffers, because new memory costs far more than a copy: the system clears every page of it when the
page is first touched. 59 MB of photos take 44 ms of processor time in new shared memory, and 3 ms in memory that was
used before (`benchmarks/loader.py`). Templates join pixels twice, into new memory each time, and torch then moves them
to new shared memory; here the first join writes where the trainer reads, and the others find nothing to do.

The memory is anonymous, so the size of /dev/shm, which containers have 64 MB of, does not limit it. Where the system
has no such memory, a batch travels as bytes through a pipe.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_ALIGNMENT = 64
_HEADER = _ALIGNMENT
"""Bytes before the first tensor; the first of them says whether the trainer's process reads the buffer."""
_FREE, _IN_USE = 0, 1
_SPARE_BYTES = 1 << 24
"""Room beside the tensors of the samples, for those that the template adds; memory that is not touched costs nothing.
"""
_LEAST_JOINED_BYTES = 1 << 18
"""Smaller tensors are joined as always and copied into the buffer: that is faster than to look at them."""
MOST_INLINE_BYTES = 1 << 19
"""Smaller batches, as those of texts are, go through the pipe: handing over a descriptor takes longer (1 to 2 ms)."""
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


class Place(NamedTuple):
    """Where a tensor is in a buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Buffer:
    """Shared memory that a worker writes and the trainer's process reads, one batch at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = anonymous_file()
        self.num_bytes = 0
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Make room. Tensors that were placed before keep the memory as it was mapped for them."""
        os.ftruncate(self.fd, num_bytes)
        self.num_bytes = num_bytes
        self.memory = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)

    @property
    def is_free(self) -> bool:
        """Return whether the trainer's process is done with the batch."""
        return int(self.memory[0]) == _FREE


class Buffers:
    """The buffers of a dataloader worker. As many are made as the trainer's process holds batches at a time."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        keep_freed_memory()

    def sent(self, num_bytes: int, make: Callable[[], Any]) -> Sent | AsBytes:
        """Make a batch, of some `num_bytes`, in a free buffer, and return what the queue of the worker carries."""
        try:
            written = Written(self.take(_HEADER + num_bytes + _SPARE_BYTES))
        except OSError:
            return AsBytes(make())
        with written:
            batch = make()
        return written.sent(batch)

    def take(self, num_bytes: int) -> Buffer:
        """Return a free buffer with room, the smallest that fits; make it or let it grow if there is none."""
        free = sorted((one for one in self._buffers if one.is_free), key=lambda one: one.num_bytes)
        if not free:
            self._buffers.append(made := Buffer(num_bytes))
            return made
        chosen = next((one for one in free if one.num_bytes >= num_bytes), free[-1])
        if chosen.num_bytes < num_bytes:
            chosen.grow(num_bytes)
        return chosen


class Written(TorchFunctionMode):
    """Write one batch into a buffer. Within the block, large tensors are joined in the buffer.

    The result is the same numbers. What joins one tensor that is in the buffer already gets that tensor.
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self._buffer = buffer
        self._end = _HEADER

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _JOINS and (tensors := _joined_by_rows(*args, **(kwargs or {}))):
            if len(tensors) == 1 and self._offset(tensors[0]) is not None:
                return tensors[0]
            shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
            if (made := self._place(shape, tensors[0].dtype)) is not None:
                return torch.cat(tensors, out=made)
        return func(*args, **(kwargs or {}))

    def sent(self, batch: Any) -> Sent:
        """Copy the tensors of a batch that are not in the buffer yet, and return what the queue carries."""
        stream, places = io.BytesIO(), _Places(self)
        pickler = ForkingPickler(stream, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = places.of  # type: ignore[method-assign]
        pickler.dump(batch)
        source: Any = bytearray(self._buffer.memory[: self._end]) if self._end <= MOST_INLINE_BYTES else None
        if source is None:
            self._buffer.memory[0] = _IN_USE
            source = DupFd(self._buffer.fd)
        return Sent(source, self._buffer.num_bytes, tuple(places.known), stream.getvalue())

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Return where a tensor is in the buffer; copy it there first if it is elsewhere."""
        offset = self._offset(tensor) if tensor.is_contiguous() else None
        if offset is None:
            made = self._place(tuple(tensor.shape), tensor.dtype)
            if made is None:
                self._buffer.grow(self._end + tensor.nbytes + _SPARE_BYTES)
                made = self._place(tuple(tensor.shape), tensor.dtype)
                assert made is not None
            offset = self._offset(made.copy_(tensor))
            assert offset is not None
        return Place(offset, tuple(tensor.shape), tensor.dtype)

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an unwritten tensor in the buffer; None if there is no room for it."""
        start, num_bytes = self._end, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if start + num_bytes > self._buffer.num_bytes:
            return None
        self._end = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        return tensor_at(self._buffer.memory, Place(start, shape, dtype))

    def _offset(self, tensor: torch.Tensor) -> int | None:
        at, memory = tensor.data_ptr(), self._buffer.memory
        start = int(memory.ctypes.data)
        return at - start if start <= at and at + tensor.nbytes <= start + memory.nbytes else None


class _Places:
    """Give the tensors of a batch numbers, one for a tensor that the batch has twice."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._numbers: dict[int, int] = {}
        self.known: list[Place] = []

    def of(self, value: Any) -> int | None:
        if not is_plain(value):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.known)
            self.known.append(self._written.place_of(value))
        return self._numbers[id(value)]


class Sent:
    """A batch in a buffer, for the queue of a worker; unpickled, it is the batch itself."""

    def __init__(self, source: Any, num_bytes: int, places: tuple[Place, ...], data: bytes) -> None:
        """Send what is in `source`: the descriptor of a buffer of `num_bytes`, or a copy of what was written in it."""
        self._parts = source, num_bytes, places, data

    def __reduce__(self) -> tuple[Any, ...]:
        return received, self._parts


def received(source: Any, num_bytes: int, places: Sequence[Place], data: bytes) -> Any:
    """Return a batch whose tensors are in the buffer of a worker; the buffer is free when the last of them is gone."""
    memory = np.frombuffer(source, np.uint8) if isinstance(source, bytearray) else _mapped(source, num_bytes)
    tensors = [tensor_at(memory, place) for place in places]
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def _mapped(fd: Any, num_bytes: int) -> Any:
    number = fd.detach()
    try:
        mapped = mmap.mmap(number, num_bytes)
    finally:
        os.close(number)
    memory = np.frombuffer(mapped, np.uint8)
    weakref.finalize(memory, _set_free, mapped, os.getpid()).atexit = False
    return memory


def _set_free(mapped: mmap.mmap, pid: int) -> None:
    # A process that was forked meanwhile drops its copy of the batch, which the trainer may still read.
    if os.getpid() == pid:
        mapped[0] = _FREE


def tensor_at(memory: Any, place: Place) -> torch.Tensor:
    """Return the tensor at a place in a buffer; it keeps the memory alive.

    >>> tensor_at(np.arange(8, dtype=np.uint8), Place(4, (2, 1), torch.int16)).tolist()
    [[1284], [1798]]
    """
    count = int(np.prod(place.shape, dtype=np.int64))
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor with nothing about it but its numbers; others travel as torch sends them."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and value.numel() > 0
    )


def _joined_by_rows(tensors: Any = (), dim: int = 0, **others: Any) -> list[torch.Tensor]:
    """Return the tensors, if they can be joined by laying them end to end and are large; otherwise none."""
    given = list(tensors)
    if others or dim != 0 or not given or not all(map(is_plain, given)):
        return []
    first = given[0]
    is_alike = all(one.dtype is first.dtype and one.dim() and one.shape[1:] == first.shape[1:] for one in given)
    return given if is_alike and sum(one.nbytes for one in given) >= _LEAST_JOINED_BYTES else []


def keep_freed_memory() -> None:
    """Let this worker keep the memory that it frees, where the C library can be told: the next pack needs as much.

    Else the photos of each pack are new memory, which the system clears page by page: 12.0 ms of processor time a photo
    of 640x480 and not 10.0 (`benchmarks/loader.py`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        # Both: whoever sets one of them fixes the other at its low start.
        mallopt(_MMAP_THRESHOLD, 1 << 25)  # more is refused
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def anonymous_file() -> int:
    """Make a file in memory that has no name. Raises `OSError` if the system has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vlpack-batch", _CLOSE_ON_EXEC)
    # A Python that was built for an older C library (conda's, for example) lacks what the machine's library has.
    make = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    number = -1 if make is None else int(make(b"vlpack-batch", _CLOSE_ON_EXEC))
    if number < 0:
        raise OSError(ctypes.get_errno(), "the system has no anonymous files in memory")
    return number


class AsBytes:
    """A batch that travels as bytes, tensors included; unpickled, it is the batch itself."""

    def __init__(self, batch: Any) -> None:
        self._data = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


def num_bytes_of(value: Any) -> int:
    """Add up the bytes of all tensors in a value.

    >>> num_bytes_of([{"pixel_values": torch.zeros(2, 3)}, (torch.zeros(1, dtype=torch.uint8), "text")])
    25
    """
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(num_bytes_of, value.values()))
    # Tokens are lists of thousands of numbers; the first of them tells.
    has_inner = isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float))
    return sum(map(num_bytes_of, value)) if has_inner else 0
