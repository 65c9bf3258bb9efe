"""Make the batches of the proof on a trainer's own sequence: the sequence, its samples alone, and changed copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from swift_vlpack.feed.feed import CannotReadAgain, Feed
from swift_vlpack.feed.sequence import packed_sequence
from swift_vlpack.proof.branches import as_trained, marked
from swift_vlpack.proof.perturb import media_of
from swift_vlpack.proof.runner import Collated, Slot, TemplateBatches, slots_in
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
    """A packed sequence as the trainer got it, and its samples, encoded again. It makes batches of itself (`Batches`).

    Tokens are replaced in the sequence, so that it stays the trainer's own. Media are collated again, if they change.
    """

    inputs: Mapping[str, Any]
    record: PackRecord
    encoded: Sequence[Encoded] | str
    """The samples, or the reason why they could not be encoded again."""
    template: Any

    @cached_property
    def slots(self) -> list[Slot]:
        """Return where each sample lies in the sequence."""
        return slots_in(self.record.boundaries)

    @cached_property
    def samples(self) -> list[Encoded]:
        """Return the samples with the targets in the loss, their weights, and marks of the prefixes that they share.

        If need be, they have only their tokens.
        """
        fields = {"labels": self.labels, **({} if self.weights is None else {"loss_scale": self.weights})}
        rows: list[Encoded] = []
        for at, (slot, name) in enumerate(zip(self.slots, self.record.sample_ids, strict=True)):
            tokens = slot.of(self.inputs["input_ids"]).tolist()
            row = {"input_ids": tokens, "length": len(tokens)} if isinstance(self.encoded, str) else self.encoded[at]
            own = {field: slot.of(value).tolist() for field, value in fields.items()}
            rows.append({**row, **own, "sample_id": name})
        return marked(rows, self.record.shared)

    @property
    def weights(self) -> torch.Tensor | None:
        """Return the loss weights of all tokens."""
        return self.inputs.get("loss_scale")

    @cached_property
    def labels(self) -> torch.Tensor:
        """Return the labels of the targets in the loss."""
        labels: torch.Tensor = self.inputs["labels"].masked_fill(~self.is_learnt, NO_LABEL)
        return labels

    @cached_property
    def watched(self) -> list[int]:
        """Return every second sample, beginning with the second; or the others if those have no targets.

        Not beginning with the first: under a causal mask without boundaries a sample sees the samples before it, and
        the first has none.
        """
        labels = self.inputs["labels"][0]
        has_target = [bool((labels[slot.places][1:] != NO_LABEL).any()) for slot in self.slots]
        return list(range(1 if any(has_target[1::2]) else 0, len(has_target), 2))

    @cached_property
    def is_learnt(self) -> torch.Tensor:
        """Return a mask of the targets in the loss: a few of each watched sample, spread over the sample."""
        is_target = self.inputs["labels"][0] != NO_LABEL
        if self.weights is not None:
            is_target &= self.weights[0] != 0
        most = max(FEWEST_TARGETS, min(TARGETS_OF_SAMPLE, TARGETS_OF_SEQUENCE // max(1, len(self.watched))))
        is_learnt = torch.zeros_like(is_target)
        for slot in map(self.slots.__getitem__, self.watched):  # a prefix has no target
            targets = slot.start + is_target[slot.tokens].nonzero().flatten()
            spread = torch.linspace(0, len(targets) - 1, min(most, len(targets)), device=targets.device)
            is_learnt[targets[spread.long()]] = True
        return is_learnt

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        """Yield the sequence with the tokens and media of these samples, or one sample as the host has it un-packed."""
        if not packed:
            with TemplateBatches(self.template).batch(samples, packed=False) as alone:
                yield alone
            return
        made = {**self.inputs, "labels": self.labels, "input_ids": self.inputs["input_ids"].clone()}
        for slot, sample in zip(self.slots, samples, strict=True):
            made["input_ids"][slot.row, slot.places] = torch.tensor(sample["input_ids"]).to(made["input_ids"])
        yield replace(Collated.of(made | self._media(samples)), slots=self.slots)

    def _media(self, samples: Sequence[Encoded]) -> dict[str, torch.Tensor]:
        """Return the inputs with media that are not those of the batch; empty if all are."""
        pairs = [(media_of(one), own) for one, own in zip(samples, self.samples, strict=True)]
        changed = {name for media, own in pairs for name, value in media.items() if value is not own.get(name)}
        if not changed & set(self.inputs):
            return {}
        made = packed_sequence(self.template, as_trained(samples), multiple=self.record.sequence_multiple)
        own = {name: self.inputs[name] for name in changed & set(self.inputs)}
        return {name: made[name].to(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
