"""Packs and padded batches through one template: the row is made by the template, the boundaries are checked here."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from swift_vlpack.attention.prepare import check_ready
from swift_vlpack.errors import BoundaryError, ConfigError
from swift_vlpack.feed.join import completed
from swift_vlpack.feed.padding import padded, placeholder
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.rows.contents import num_vision_tokens
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, PackedSamples, PackRecord

logger = logging.getLogger(__name__)

NOT_FOR_THE_MODEL = ("loss_scale", "channel", "text_position_ids")
"""What templates put into a row for ms-swift's trainer, which takes it out again; no model's forward knows it."""
UNUSED_COLUMNS = "_extra_kwargs"
"""Columns of the row that the template does not know; without `remove_unused_columns` it adds them to a batch."""


class Batch(dict[str, Any]):
    """The inputs of one step, for `model(**batch)`. What is not for the model travels beside them.

    Loaders, trainers and accelerators rebuild a batch on its way to the model, nearly all by `type(batch)(...)`, which
    loses what an instance has beside its items. So every batch has a type of its own, made by `batch_of`, that has it.
    """

    record: ClassVar[PackRecord | None] = None
    """What the pack is made of; none for a padded batch."""
    beside: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What the template made for a trainer and not for the model, by name; stays on the CPU."""

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The batch on a device."""
        return batch_of(on_device(self, device, non_blocking), self.record, self.beside)

    def __reduce__(self) -> tuple[Any, ...]:
        return batch_of, (dict(self), self.record, dict(self.beside))


def batch_of(inputs: Mapping[str, Any], record: PackRecord | None, beside: Mapping[str, Any]) -> Batch:
    """A batch with a record."""
    own_type = type("Batch", (Batch,), {"record": record, "beside": beside})
    made: Batch = own_type(inputs)
    return made


def on_device(inputs: Mapping[str, Any], device: Any, non_blocking: bool = False) -> dict[str, Any]:
    """The same with its tensors on a device."""
    return {
        name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


class Collator:
    """A pack becomes one row, anything else a padded batch; the type of the batch tells, so one run can have both.

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
        """Collate a list of one pack, or of rows to be padded."""
        if not isinstance(batch[0], list):
            copies = self._copies(batch)
            with layout(self.template, packed=False):
                padded = self.template.data_collator(copies, padding_to=self.padding_to)  # type: ignore[call-arg]
            return self._batch(padded, None)
        if len(batch) > 1:
            raise ConfigError(f"{len(batch)} packs in a batch; one row is one pack, so set the batch size to 1")
        return self.row(batch[0])

    def row(self, pack: list[Encoded]) -> Batch:
        """One row from the samples of a pack."""
        record = pack.record if isinstance(pack, PackedSamples) else None
        name = str(record or "the pack")
        with RandomStream(self.seed, name):
            multiple = 1 if record is None else record.sequence_multiple
            row = packed_row(self.template, self._copies(pack), name, multiple=multiple)
        if record is not None:
            record = record.of_sequence(row["input_ids"].shape[-1], num_vision_tokens(self.template, row))
        return self._batch(row, record)

    def _copies(self, samples: Sequence[Encoded]) -> list[Encoded]:
        """The template adds to the samples and takes from them; the caller may want them again."""
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


def packed_row(
    template: Template, samples: list[Encoded], name: str = "the pack", *, multiple: int = 1
) -> dict[str, Any]:
    """The template's row of these samples, its positions checked; of none, a row that has no loss.

    Padded to a multiple of so many tokens, by a segment of its own.
    """
    samples = completed(padded(template, samples or [placeholder(template)], multiple))
    lengths = tuple(int(sample["length"]) for sample in samples)
    with layout(template, packed=True):
        row = template.data_collator([samples])
    check_row(row, Boundaries(lengths), name)
    return row if "cu_seq_lens_q" in row else row | boundary_tensors(lengths)


@contextmanager
def layout(template: Template, *, packed: bool) -> Iterator[None]:
    """Let the template make packed rows, or padded batches, and leave it as it was."""
    before = template.packing, template.padding_free
    template.packing = template.padding_free = packed
    try:
        yield
    finally:
        template.packing, template.padding_free = before


def check_row(row: dict[str, Any], boundaries: Boundaries, name: str) -> None:
    """Raise unless the row has exactly these samples: tokens, positions and boundaries."""
    num_rows, num_tokens = row["input_ids"].shape
    if num_rows != 1 or num_tokens != boundaries.num_tokens:
        raise BoundaryError(
            f"{name}: the template made {num_rows} rows of {num_tokens} tokens, not one of {boundaries.num_tokens}"
        )
    positions = row.get("text_position_ids")
    if positions is None:
        positions = row["position_ids"]
    try:
        boundaries.check_positions(positions.reshape(-1, num_tokens)[0].tolist())
    except BoundaryError as error:
        raise BoundaryError(f"{name}: {error}") from None
    made = row.get("cu_seq_lens_q")
    if made is not None and tuple(made.tolist()) != boundaries.cu_seqlens:
        raise BoundaryError(f"{name}: cu_seq_lens_q is {made.tolist()}, expected {list(boundaries.cu_seqlens)}")


def boundary_tensors(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What variable-length attention reads, for templates that do not add it themselves."""
    ends = torch.tensor(Boundaries(lengths).cu_seqlens, dtype=torch.int32)
    longest = torch.tensor(max(lengths))
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
