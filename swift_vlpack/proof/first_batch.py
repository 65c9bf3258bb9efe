"""Make the inputs of the proof on a trainer's first batch: the sequence, its samples alone, and changed copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from swift_vlpack.feed.feed import CannotReadAgain, Feed
from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.proof.branches import PREFIX, Prefix, as_trained, marked, without_extras
from swift_vlpack.proof.perturb import (
    kinds_of_media,
    replaced,
    with_other_media,
    with_other_prefix,
)
from swift_vlpack.proof.proof_model import Slot, slots_in
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded, PackRecord, SampleId

TARGETS_OF_SAMPLE, TARGETS_OF_SEQUENCE, FEWEST_TARGETS = 8, 256, 2
"""Number of targets in the loss of this proof: most of a sample, most of a sequence, and fewest of a sample (its first
and last target). Each target costs a product with the whole vocabulary, forward and backward. A few are enough, because
the gradient of a late target reaches all tokens before it in every layer but the last."""


def encoded_again(feed: Feed, record: PackRecord, *, rank: int, num_workers: int) -> list[Encoded] | str:
    """Encode the samples of a batch again, in this process and with the same random draws.

    Returns the samples, or the reason why they cannot be encoded again.
    """
    if not record.sample_ids:  # this rank has no data left, but takes part in the step
        return []
    try:
        found = feed.samples_again(record, rank=rank, num_workers=num_workers)
    except CannotReadAgain as error:
        return str(error)
    samples: dict[SampleId, list[Encoded]] = {}
    for sample in found:
        if isinstance(sample, dict):
            samples.setdefault(sample["sample_id"], []).append(sample)
    chosen = []
    for key in record.sample_ids:
        if key not in samples:
            return f"{key} cannot be encoded again"
        of_key = samples[key]  # a row that comes twice may have other random draws each time
        chosen.append(of_key.pop(0) if len(of_key) > 1 else of_key[0])
    return chosen


@dataclass(frozen=True)
class FirstSequence:
    """A packed sequence as the trainer got it, and its samples, encoded again."""

    inputs: Mapping[str, Any]
    record: PackRecord
    samples: Sequence[Encoded] | str
    """The samples, or the reason why they could not be encoded again."""
    template: Any
    is_ordinary: Callable[[int], bool]

    @cached_property
    def slots(self) -> list[Slot]:
        """Return where each sample lies in the sequence."""
        return slots_in(self.record.boundaries)

    @cached_property
    def places(self) -> list[slice | torch.Tensor]:
        """Return the index of the tokens of each sample, those of a prefix that it shares first."""
        return [slot.places for slot in self.slots]

    @cached_property
    def units(self) -> list[list[int]]:
        """Return the samples of each prefix that samples share."""
        units: dict[int, list[int]] = {}
        for at, slot in enumerate(self.slots):
            if slot.num_prefix:
                units.setdefault(slot.prefix_start, []).append(at)
        return list(units.values())

    @property
    def has_units(self) -> bool:
        """Return whether samples share a prefix."""
        return bool(self.units)

    @cached_property
    def whole_rows(self) -> list[Encoded]:
        """Return the samples encoded again, with marks of the prefixes that they share in the sequence."""
        assert not isinstance(self.samples, str)
        return marked(self.samples, self.record.shared)

    @cached_property
    def watched(self) -> list[int]:
        """Return every second sample, beginning with the second; or the others if those have no targets.

        Not beginning with the first: under a causal mask without boundaries a sample sees the samples before it, and
        the first has none.
        """
        labels = self.inputs["labels"][0]
        has_target = [bool((labels[places][1:] != NO_LABEL).any()) for places in self.places]
        number = len(has_target)
        return list(range(1 if any(has_target[1::2]) else 0, number, 2))

    @cached_property
    def others(self) -> list[int]:
        """Return the samples that are not watched."""
        return [at for at in range(len(self.slots)) if at not in self.watched]

    @cached_property
    def is_learnt(self) -> torch.Tensor:
        """Return a mask of the targets in the loss: a few of each watched sample, spread over the sample."""
        is_target, weights = self.inputs["labels"][0] != NO_LABEL, self.inputs.get("loss_scale")
        if weights is not None:
            is_target &= weights[0] != 0
        most = max(FEWEST_TARGETS, min(TARGETS_OF_SAMPLE, TARGETS_OF_SEQUENCE // max(1, len(self.watched))))
        is_learnt = torch.zeros_like(is_target)
        for slot in map(self.slots.__getitem__, self.watched):  # a prefix has no target
            targets = slot.start + is_target[slot.tokens].nonzero().flatten()
            spread = torch.linspace(0, len(targets) - 1, min(most, len(targets)), device=targets.device)
            is_learnt[targets[spread.long()]] = True
        return is_learnt

    def for_watched(self) -> dict[str, Any]:
        """Return the inputs with a few labels of the watched samples only (`is_learnt`): the loss is theirs alone."""
        return {**self.inputs, "labels": self.inputs["labels"].masked_fill(~self.is_learnt, NO_LABEL)}

    def with_other(self, which: Sequence[int]) -> dict[str, Any]:
        """Return `for_watched()` with other tokens and media in the samples `which`; lengths, grids and labels stay.

        A prefix stays unchanged, with its media, because other samples share it.
        """
        inputs = self.for_watched()
        inputs["input_ids"] = inputs["input_ids"].clone()
        for slot in map(self.slots.__getitem__, which):
            row = {"input_ids": slot.of(inputs["input_ids"]).tolist(), PREFIX: Prefix(slot.num_prefix)}
            own = replaced(row, self.is_ordinary)["input_ids"][slot.num_prefix :]
            inputs["input_ids"][0, slot.tokens] = torch.tensor(own)
        return inputs | self._other_media([at for at in which if not self.slots[at].num_prefix])

    def with_other_prefixes(self, units: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return `for_watched()` with other tokens and media in the prefixes of these units."""
        inputs = self.for_watched()
        inputs["input_ids"] = inputs["input_ids"].clone()
        for slot in (self.slots[unit[0]] for unit in units):
            row = {"input_ids": slot.of(inputs["input_ids"]).tolist(), PREFIX: Prefix(slot.num_prefix)}
            if (others := with_other_prefix([row], self.is_ordinary)) is not None:
                inputs["input_ids"][0, slot.prefix] = torch.tensor(others[0]["input_ids"][: slot.num_prefix])
        return inputs | self._other_media([at for unit in units for at in unit])

    def _other_media(self, which: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the inputs that hold media, with those of the samples `which` replaced; empty if none has media."""
        if isinstance(self.samples, str) or not any(kinds_of_media(self.samples[at]) for at in which):
            return {}
        changed = [with_other_media(one) if at in which else one for at, one in enumerate(self.whole_rows)]
        names = {name for one in changed for name in kinds_of_media(one)} & set(self.inputs)
        made = packed_sequence(self.template, as_trained(changed), multiple=self.record.sequence_multiple)
        return {name: made[name].to(self.inputs[name]) for name in names if isinstance(self.inputs[name], torch.Tensor)}

    def alone(self, at: int) -> dict[str, Any]:
        """Collate one sample as the host does un-packed, with the targets and weights that it has in the sequence."""
        assert not isinstance(self.samples, str)
        with layout(self.template, packed=False):
            made: dict[str, Any] = self.template.data_collator([without_extras(self.samples[at])])
        here, places = self.places[at], is_token(made)
        is_learnt = torch.zeros_like(places)
        is_learnt[places] = self.is_learnt[here].cpu()
        made["labels"] = made["labels"].masked_fill(~is_learnt, NO_LABEL)
        if self.inputs.get("loss_scale") is not None:
            weights = torch.zeros(made["labels"].shape, dtype=self.inputs["loss_scale"].dtype)
            weights[places] = self.inputs["loss_scale"][0, here].cpu()
            made["loss_scale"] = weights
        return made


def is_token(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return a mask of the tokens that are not padding, for a batch of one un-packed sample."""
    mask = inputs.get("attention_mask")
    return mask.bool() if mask is not None and mask.dim() == 2 else torch.ones_like(inputs["labels"], dtype=torch.bool)
