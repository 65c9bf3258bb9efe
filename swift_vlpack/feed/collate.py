"""Collate packs into batches for the trainer, and bring them out of dataloader workers.

A pack becomes one sequence (sequence.py), anything else a padded batch; one run can have both through one template.

torch moves tensors through /dev/shm, of which containers have 64 MB unless told otherwise. When it is full, the thread
that feeds the queue dies, and the trainer waits for a batch that never comes. So a worker serializes a batch before it
is queued (`carried`): without room the batch travels as bytes, and any other error has its traceback.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.utils.data import get_worker_info

from swift_vlpack.attention.prepare import check_ready
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.rows.contents import num_vision_tokens
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, PackedSamples, PackRecord

logger = logging.getLogger(__name__)

NOT_FOR_THE_MODEL = ("loss_scale", "channel", "text_position_ids")
"""Fields that templates add for ms-swift's trainer, which takes them out again; no model's forward knows them."""
UNUSED_COLUMNS = "_extra_kwargs"
"""Columns of a row that the template does not know; without `remove_unused_columns` it adds them to a batch."""
SHARED_MEMORY = "/dev/shm"
_NO_ROOM = "No space left on device"
_has_warned_of_memory = False  # once in a process


class Batch(dict[str, Any]):
    """The inputs of one forward, for `model(**batch)`. What is not for the model travels beside them.

    Loaders, trainers and accelerators rebuild a batch on its way to the model, nearly all by `type(batch)(...)`, which
    loses the attributes of an instance. So `batch_of` gives every batch a type of its own, which has them.
    """

    record: ClassVar[PackRecord | None] = None
    """The samples of the pack; None for a padded batch."""
    beside: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields that the template made for a trainer and not for the model; they stay on the CPU."""

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Move the tensors to a device."""
        return batch_of(on_device(self, device, non_blocking), self.record, self.beside)

    def __reduce__(self) -> tuple[Any, ...]:
        return batch_of, (dict(self), self.record, dict(self.beside))


def batch_of(inputs: Mapping[str, Any], record: PackRecord | None, beside: Mapping[str, Any]) -> Batch:
    """Make a batch that carries a record, and fields beside the inputs of the model."""
    own_type = type("Batch", (Batch,), {"record": record, "beside": beside})
    made: Batch = own_type(inputs)
    return made


def on_device(inputs: Mapping[str, Any], device: Any, non_blocking: bool = False) -> dict[str, Any]:
    """Move tensors to a device; other values stay as they are."""
    return {
        name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


class Collator:
    """Collate a pack into one sequence, and rows into a padded batch; the type of the first item tells which it is.

    `for_model` leaves only what the model's forward takes; ms-swift's own trainer takes the rest out by itself.
    """

    def __init__(
        self, template: Template, padding_to: int | None = None, *, for_model: bool = True, seed: int = 0
    ) -> None:
        check_ready(template, needs_model=for_model)
        self.template = template
        self.seed = seed
        self.padding_to = padding_to
        self.for_model = for_model
        self._has_warned = False

    def __repr__(self) -> str:
        return f"<Collator by {type(self.template).__name__}, for_model={self.for_model}, padding_to={self.padding_to}>"

    def __call__(self, batch: Sequence[Any]) -> Batch:
        """Collate a list of one pack, or of encoded rows to be padded."""
        if not isinstance(batch[0], list):
            copies = self._copies(batch)
            with layout(self.template, packed=False):
                padded = self.template.data_collator(copies, padding_to=self.padding_to)  # type: ignore[call-arg]
            return self._batch(padded, None)
        if len(batch) > 1:
            raise ConfigError(f"{len(batch)} packs in a batch; one sequence is one pack, so set the batch size to 1")
        return self.sequence(batch[0])

    def sequence(self, pack: list[Encoded]) -> Batch:
        """Collate the samples of a pack into one sequence."""
        record = pack.record if isinstance(pack, PackedSamples) else None
        name = str(record or "the pack")
        with RandomStream(self.seed, name):
            multiple = 1 if record is None else record.sequence_multiple
            sequence = packed_sequence(self.template, self._copies(pack), name, multiple=multiple)
        if record is not None:
            num_vision = num_vision_tokens(self.template, sequence)
            record = record.in_sequence_of(sequence["input_ids"].shape[-1], num_vision)
        return self._batch(sequence, record)

    def _copies(self, samples: Sequence[Encoded]) -> list[Encoded]:
        """Copy samples, because the template adds fields and takes some out, and the caller may want them again."""
        hidden = (UNUSED_COLUMNS,) if self.for_model else ()
        return [{name: value for name, value in sample.items() if name not in hidden} for sample in samples]

    def _batch(self, made: dict[str, Any], record: PackRecord | None) -> Batch:
        beside = {name: made.pop(name) for name in NOT_FOR_THE_MODEL if name in made} if self.for_model else {}
        if "loss_scale" in beside and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the template weighs tokens and the model's own loss does not: weigh it with batch.beside['loss_scale']"
            )
        return batch_of(made, record, beside)


# -- out of a worker --------------------------------------------------------------------------------------------------


class WorkerCollator(Collator):
    """A collator whose batches leave a worker even if shared memory is short."""

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Collate; in a worker the result turns into the batch when the trainer's process receives it."""
        return carried(super().__call__(batch))


def carried(batch: Any) -> Any:
    """Serialize a batch for the queue of a worker. Outside of a worker, return the batch itself."""
    worker = get_worker_info()
    if worker is None:
        return batch
    num_bytes = num_bytes_of(batch)
    num_sharing = worker.num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_shared_memory()
    if free is None or free >= num_bytes * (num_sharing + 1):  # every other worker may be about to write a batch
        try:
            return _Serialized(bytes(ForkingPickler.dumps(batch)))
        except (OSError, RuntimeError) as error:
            if _NO_ROOM not in str(error):
                raise
    return _AsBytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL), num_bytes, free or 0)


class _Serialized:
    """A batch whose tensors are in shared memory; the bytes say where."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


class _AsBytes:
    """A batch that travels as bytes, tensors included."""

    def __init__(self, data: bytes, num_bytes: int, free: int) -> None:
        self.data = data
        self.num_bytes = num_bytes
        self.free = free

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.data, self.num_bytes, self.free)


def _received(data: bytes, num_bytes: int, free: int) -> Any:
    """Restore a batch in the trainer's process, and warn once that it came the slow way."""
    global _has_warned_of_memory
    if not _has_warned_of_memory:
        _has_warned_of_memory = True
        logger.warning(
            "%s has %.1f MB free and a batch takes %.1f MB: where it is short, batches of dataloader workers go "
            "through pipes, which is slower. Give the container more (docker run --shm-size 16g, or --ipc host), or "
            "take fewer dataloader_num_workers",
            SHARED_MEMORY, free / 1e6, num_bytes / 1e6,
        )  # fmt: skip
    return pickle.loads(data)


def free_shared_memory() -> int | None:
    """Return the free bytes; None if the system has no such folder and shares memory in another way."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except (OSError, AttributeError):
        return None
    return state.f_bavail * state.f_frsize


def num_bytes_of(batch: Any) -> int:
    """Add up the bytes of all tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(map(num_bytes_of, batch.values()))
    return sum(map(num_bytes_of, batch)) if isinstance(batch, (list, tuple)) else 0
