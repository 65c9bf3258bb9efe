"""How a batch gets from a dataloader worker to the trainer: through shared memory, or, where that is short, a pipe.

torch moves tensors through /dev/shm, of which containers have 64 MB unless told otherwise. When it is full the thread
that feeds the queue dies, and the trainer waits for a batch that never comes. Here a batch is serialized before it is
queued, so that what goes wrong is known in the worker: no room, and the batch goes as bytes; anything else is an error
with a traceback.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import get_worker_info

from swift_vlpack.feed.collate import Collator

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
_NO_ROOM = "No space left on device"
_is_said = False  # the warning, once in a process


class WorkerCollator(Collator):
    """A collator whose batches find their way out of a worker."""

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Collate; in a worker the result becomes the batch when the trainer's process receives it."""
        return carried(super().__call__(batch))


def carried(batch: Any) -> Any:
    """What a worker shall put into its queue for a batch; outside of a worker the batch itself."""
    worker = get_worker_info()
    if worker is None:
        return batch
    num_bytes = num_bytes_of(batch)
    num_sharing = worker.num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_shared_memory()
    if free is None or free >= num_bytes * (num_sharing + 1):  # each of them may be about to write one
        try:
            return _Serialized(bytes(ForkingPickler.dumps(batch)))
        except (OSError, RuntimeError) as error:
            if _NO_ROOM not in str(error):
                raise
    return _AsBytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL), num_bytes, free or 0)


class _Serialized:
    """Tensors in shared memory, of which the bytes say where."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


class _AsBytes:
    """A whole batch as bytes."""

    def __init__(self, data: bytes, num_bytes: int, free: int) -> None:
        self.data = data
        self.num_bytes = num_bytes
        self.free = free

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.data, self.num_bytes, self.free)


def _received(data: bytes, num_bytes: int, free: int) -> Any:
    """In the trainer's process."""
    global _is_said
    if not _is_said:
        _is_said = True
        logger.warning(
            "%s has %.1f MB free and a batch takes %.1f MB: where it is short, batches of dataloader workers go "
            "through pipes, which is slower. Give the container more (docker run --shm-size 16g, or --ipc host), or "
            "take fewer dataloader_num_workers",
            SHARED_MEMORY, free / 1e6, num_bytes / 1e6,
        )  # fmt: skip
    return pickle.loads(data)


def free_shared_memory() -> int | None:
    """Bytes; None where the system has no such folder, which then shares memory in another way."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except (OSError, AttributeError):
        return None
    return state.f_bavail * state.f_frsize


def num_bytes_of(batch: Any) -> int:
    """The bytes of all tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(map(num_bytes_of, batch.values()))
    return sum(map(num_bytes_of, batch)) if isinstance(batch, (list, tuple)) else 0
