"""Send batches from dataloader workers to the trainer's process through shared memory, which is written only once.

    worker     takes a free or new buffer -> joins pixels in it -> copies the other tensors in -> sends its descriptor
    trainer    maps the buffer -> makes tensors -> when the last tensor is gone, sets the first byte to "free"

A worker keeps its buffers, because new memory costs far more than a copy: the system clears every page of it when the
page is first touched. 59 MB of photos take 44 ms of processor time in new shared memory, and 3 ms in memory that was
used before (`benchmarks/loader.py`). Templates join pixels twice, each time into new memory, and torch then moves them
to new shared memory. Here the first join writes into the buffer, and the other steps have nothing left to do.

The memory is anonymous, so the size of /dev/shm (64 MB in most containers) does not limit it. On a system without such
memory, a batch is sent as bytes through a pipe.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import multiprocessing
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_ALIGNMENT = 64
_HEADER = _ALIGNMENT
"""Bytes before the first tensor. The first byte says whether the trainer's process still reads the buffer."""
_FREE, _IN_USE = 0, 1
_SPARE_BYTES = 1 << 24
"""Room for tensors that the template adds to those of the samples. Memory that is never touched costs nothing."""
_LEAST_JOINED_BYTES = 1 << 18
"""Fewest bytes that are joined in the buffer. Smaller tensors are joined as usual and copied, which is faster."""
MOST_INLINE_BYTES = 1 << 19
"""Most bytes of a batch, such as one of texts, that goes through the pipe: to send a descriptor takes 1 to 2 ms."""
_SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between two looks of a worker at the process that started it."""
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


class Place(NamedTuple):
    """The place of a tensor in a buffer."""

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
        """Enlarge the buffer. Tensors that were placed before keep their mapping of the memory."""
        os.ftruncate(self.fd, num_bytes)
        self.num_bytes = num_bytes
        self.memory = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)

    @property
    def is_free(self) -> bool:
        """Tell whether the trainer's process no longer reads the batch."""
        return int(self.memory[0]) == _FREE


class Buffers:
    """The buffers of a dataloader worker: as many as the trainer's process holds batches at a time."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        keep_freed_memory()

    def sent(self, num_bytes: int, make: Callable[[], Any]) -> Sent | AsBytes:
        """Make a batch of about `num_bytes` in a free buffer. Returns the object for the queue of the worker."""
        try:
            written = Written(self.take(_HEADER + num_bytes + _SPARE_BYTES))
        except OSError:
            return AsBytes(make())
        with written:
            batch = make()
        return written.sent(batch)

    def take(self, num_bytes: int) -> Buffer:
        """Return the smallest free buffer that has room. If there is none, enlarge a free one or make a new one."""
        free = sorted((one for one in self._buffers if one.is_free), key=lambda one: one.num_bytes)
        if not free:
            self._buffers.append(made := Buffer(num_bytes))
            return made
        chosen = next((one for one in free if one.num_bytes >= num_bytes), free[-1])
        if chosen.num_bytes < num_bytes:
            chosen.grow(num_bytes)
        return chosen


class Written(TorchFunctionMode):
    """Write one batch into a buffer. Inside this block, large tensors are joined in the buffer.

    The numbers are the same. To join a single tensor that is in the buffer already returns that tensor.
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
        """Copy the tensors of a batch that are not in the buffer yet. Returns the object for the queue."""
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
        """Return the place of a tensor in the buffer. A tensor that is elsewhere is copied first."""
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
    """Number the tensors of a batch. A tensor that the batch has twice has one number."""

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
    """A batch in a buffer, for the queue of a worker. Unpickling it returns the batch."""

    def __init__(self, source: Any, num_bytes: int, places: tuple[Place, ...], data: bytes) -> None:
        """Send the tensors in `source`: the descriptor of a buffer of `num_bytes`, or a copy of its written bytes."""
        self._parts = source, num_bytes, places, data

    def __reduce__(self) -> tuple[Any, ...]:
        return received, self._parts


def received(source: Any, num_bytes: int, places: Sequence[Place], data: bytes) -> Any:
    """Return a batch whose tensors are in the buffer of a worker. The buffer is free when all of them are gone."""
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
    # Only this process may free the buffer: a process that was forked meanwhile drops only its copy of the batch.
    if os.getpid() == pid:
        mapped[0] = _FREE


def tensor_at(memory: Any, place: Place) -> torch.Tensor:
    """Return the tensor at a place in a buffer. The tensor keeps the memory alive.

    >>> tensor_at(np.arange(8, dtype=np.uint8), Place(4, (2, 1), torch.int16)).tolist()
    [[1284], [1798]]
    """
    count = int(np.prod(place.shape, dtype=np.int64))
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def is_plain(value: Any) -> bool:
    """Tell whether a value is a plain tensor of numbers on the CPU. Other tensors are sent in torch's own way."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and value.numel() > 0
    )


def _joined_by_rows(tensors: Any = (), dim: int = 0, **others: Any) -> list[torch.Tensor]:
    """Return the tensors if they are large and can be joined by laying them end to end; otherwise return none."""
    given = list(tensors)
    if others or dim != 0 or not given or not all(map(is_plain, given)):
        return []
    first = given[0]
    is_alike = all(one.dtype is first.dtype and one.dim() and one.shape[1:] == first.shape[1:] for one in given)
    return given if is_alike and sum(one.nbytes for one in given) >= _LEAST_JOINED_BYTES else []


def keep_freed_memory() -> None:
    """Let this worker keep the memory that it frees, if the C library can do that: the next pack needs as much.

    Otherwise the photos of each pack are in new memory, which the system clears page by page. That takes 12.0 ms of
    processor time for a photo of 640x480, in place of 10.0 (`benchmarks/loader.py`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        # Set both: to set only one of them fixes the other at its low initial value.
        mallopt(_MMAP_THRESHOLD, 1 << 25)  # the largest value that glibc accepts
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def end_with_the_trainer() -> None:
    """End this worker soon after the process that started it, however that process ended.

    The thread that writes batches into the pipe waits for ever if the trainer's process was killed, and torch's worker
    joins that thread at its end. Left over, it would hold copies of the sockets of its rank, so that other ranks wait.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        while os.getppid() == number and (parent is None or parent.is_alive()):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name="vlpack-watch", daemon=True).start()


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
    """A batch that is sent as bytes, tensors included. Unpickling it returns the batch."""

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
    # Look at the first element only: tokens are lists of thousands of numbers.
    has_inner = isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float))
    return sum(map(num_bytes_of, value)) if has_inner else 0
