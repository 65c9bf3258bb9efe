"""Collate packs into batches for the trainer.

A pack becomes one sequence (sequence.py), a list of rows becomes a padded batch. One run can have both with one
template.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.utils.data import get_worker_info

from swift_vlpack.attention.packed_sequence import Bounds, boundaries_of, known_bounds
from swift_vlpack.attention.prepare import check_ready, have_targets, known_targets
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.feed.transport import Buffers, end_with_the_trainer, num_bytes_of
from swift_vlpack.rows.contents import NO_LABEL, num_vision_tokens
from swift_vlpack.rows.encoder import RowEncoder, Targets, Template
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, PackedSamples, PackRecord

logger = logging.getLogger(__name__)

NOT_FOR_THE_MODEL = ("loss_scale", "channel", "text_position_ids")
"""Fields that templates add for ms-swift's trainer, which removes them again. No model's forward takes them."""
UNUSED_COLUMNS = "_extra_kwargs"
"""Field with the columns that a template does not know, which it adds to a batch without `remove_unused_columns`."""


class Batch(dict[str, Any]):
    """The inputs of one forward, for `model(**batch)`, with the record of the pack as an attribute.

    Loaders, trainers and accelerators rebuild a batch on its way to the model, nearly all with `type(batch)(...)`,
    which loses the attributes of an instance. So `batch_of` gives every batch a class of its own, whose attributes
    survive.
    """

    record: ClassVar[PackRecord | None] = None
    """The samples of the pack; None for a padded batch."""
    beside: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields that the template made for a trainer, not for the model. They stay on the CPU."""
    bounds: ClassVar[Bounds | None] = None
    """Boundaries of the samples, which stay on the host: attention needs their numbers. None for a padded batch."""
    has_targets: ClassVar[bool | None] = None
    """True if there is a token to predict; None without labels."""

    def __init__(self, *inputs: Any) -> None:
        super().__init__(*inputs)
        # Say of tensors that have moved what is known, because their device would have to be waited for.
        known_bounds.has_moved(self.get("cu_seq_lens_q"), self.bounds)
        known_targets.has_moved(self.get("labels"), self.has_targets)

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Move the tensors to a device."""
        return type(self)(on_device(self, device, non_blocking))

    def __reduce__(self) -> tuple[Any, ...]:
        return batch_of, (dict(self), self.record, dict(self.beside))


def batch_of(inputs: Mapping[str, Any], record: PackRecord | None, beside: Mapping[str, Any]) -> Batch:
    """Make a batch of model inputs, with a record and with fields that are not for the model (`beside`)."""
    known: dict[str, Any] = {"record": record, "beside": beside}
    if isinstance(ends := inputs.get("cu_seq_lens_q"), torch.Tensor):
        known["bounds"] = boundaries_of(ends)
    if isinstance(labels := inputs.get("labels"), torch.Tensor):
        known["has_targets"] = known_targets[labels] = have_targets(labels)
    made: Batch = type("Batch", (Batch,), known)(inputs)
    return made


def on_device(inputs: Mapping[str, Any], device: Any, non_blocking: bool = False) -> dict[str, Any]:
    """Move tensors to a device; keep other values."""
    return {
        name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


class Collator:
    """Collate a pack into one sequence, or rows into a padded batch. A pack is a list, a row is not.

    `for_model` keeps only the inputs of the model's forward. ms-swift's own trainer removes other fields by itself.
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
        if record is None:  # samples that no `PackingDataset` has looked at
            pack = list(map(RowEncoder(self.template, Targets()).handed_through, pack))
        name = str(record or "the pack")
        with RandomStream(self.seed, name):
            multiple = 1 if record is None else record.sequence_multiple
            sequence = packed_sequence(self.template, self._copies(pack), name, multiple=multiple)
        if record is not None:
            num_vision = num_vision_tokens(self.template, sequence)
            num_targets = int((sequence["labels"][..., 1:] != NO_LABEL).sum())  # nothing predicts the first token
            record = record.in_sequence_of(sequence["input_ids"].shape[-1], num_vision, num_targets)
        return self._batch(sequence, record)

    def _copies(self, samples: Sequence[Encoded]) -> list[Encoded]:
        """Copy samples, because the template adds and removes fields, and the caller may use the samples again."""
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


class WorkerCollator(Collator):
    """A collator that writes batches into memory that the trainer's process reads (`transport.py`)."""

    _buffers: Buffers | None = None  # the buffers of this worker

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Collate. In a worker, return an object that becomes the batch when the trainer's process receives it."""
        collate = partial(super().__call__, batch)
        if get_worker_info() is None:
            return collate()
        if self._buffers is None:
            end_with_the_trainer()
            self._buffers = Buffers()
        return self._buffers.sent(num_bytes_of(batch), collate)
