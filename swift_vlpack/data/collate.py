"""Packs and padded batches through one template: the row is made by the template, the boundaries are checked here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swift_vlpack.core.boundaries import Boundaries
from swift_vlpack.core.errors import BoundaryError, ConfigError
from swift_vlpack.data.fusion import Template
from swift_vlpack.data.samples import Encoded, PackedSamples

RECORD = "vlpack"
"""Key of the pack's record in a collated batch; the trainer takes it out before the model sees the batch."""

_PLACEHOLDER_ROW = {"messages": [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]}


class Collator:
    """A pack becomes one row, anything else a padded batch; the type of the batch tells, so one run can have both."""

    def __init__(self, template: Template, padding_to: int | None = None) -> None:
        self.template = template
        self.padding_to = padding_to

    def __call__(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Collate a list of one pack, or of rows to be padded."""
        if not isinstance(batch[0], list):
            copies = [dict(sample) for sample in batch]  # as in `row`
            with layout(self.template, packed=False):
                return self.template.data_collator(copies, padding_to=self.padding_to)  # type: ignore[call-arg]
        if len(batch) > 1:
            raise ConfigError(f"{len(batch)} packs in a batch; one row is one pack, so set the batch size to 1")
        return self.row(batch[0])

    def row(self, pack: list[Encoded]) -> dict[str, Any]:
        """One row from the samples of a pack, its positions checked; without a sample, a row that has no loss."""
        # The template adds to the samples and takes from them; the caller may want them again.
        samples = completed([dict(sample) for sample in pack]) or [self._placeholder()]
        lengths = tuple(int(sample["length"]) for sample in samples)
        with layout(self.template, packed=True):
            row = self.template.data_collator([samples])
        name = str(pack.record) if isinstance(pack, PackedSamples) else "the pack"
        check_row(row, Boundaries(lengths), name)
        if "cu_seq_lens_q" not in row:
            row |= boundary_tensors(lengths)
        if isinstance(pack, PackedSamples):
            row[RECORD] = pack.record
        return row

    def _placeholder(self) -> Encoded:
        sample: Encoded = self.template.encode(_PLACEHOLDER_ROW, return_length=True)
        sample["labels"] = [-100] * len(sample["input_ids"])
        return sample


@contextmanager
def layout(template: Template, *, packed: bool) -> Iterator[None]:
    """Let the template make packed rows, or padded batches, and leave it as it was."""
    before = template.packing, template.padding_free
    template.packing = template.padding_free = packed
    try:
        yield
    finally:
        template.packing, template.padding_free = before


def completed(samples: list[Encoded]) -> list[Encoded]:
    """Give every sample the per-token fields that any of them has: the template joins them end to end."""
    if any(sample.get("loss_scale") is not None for sample in samples):
        for sample in samples:
            if sample.get("loss_scale") is None:
                sample["loss_scale"] = [1.0] * len(sample["input_ids"])
    return samples


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
