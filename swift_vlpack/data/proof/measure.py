"""What the proof measures: a pack against its samples alone, by the model's own attention, and against itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_vlpack.data.lengths.sizes import num_supervised
from swift_vlpack.data.proof import gradients
from swift_vlpack.data.proof.changes import kinds_of_media, replaced, with_other_media
from swift_vlpack.data.proof.cost import affordable
from swift_vlpack.data.proof.reference import fitting, longest_for_own, own_attention, repeatable_training, untouched
from swift_vlpack.data.proof.subject import Ran, Subject, length_of
from swift_vlpack.data.proof.tolerance import (
    Gap,
    Limits,
    Noise,
    gap_of,
    precision_of,
    rounded_otherwise,
    worst,
)
from swift_vlpack.data.proof.truth import Truth
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded


@dataclass(frozen=True, slots=True)
class Measured:
    """All that one pack was asked, by the place of the sample in it, and what rows of the plan gave."""

    samples: Sequence[Encoded]
    alone: Sequence[torch.Tensor]
    dtype: torch.dtype
    noise: Noise
    """Of the model's own attention, alone."""
    own: Sequence[float]
    """How far the logits of a sample moved when its own tokens were replaced."""
    own_media: Mapping[int, float]
    """The same for its media, of samples with a twin; no more than the two differ."""
    repeated: float
    """How far the same row moved when it was run again."""
    moves: Sequence[float]
    """Of samples whose neighbours got other tokens."""
    moves_by_media: Sequence[float]
    """Of samples when others got other media."""
    gaps: Sequence[Gap]
    """Between packed and alone."""
    gradient: Mapping[str, float]
    targets: str | None
    """What is wrong with labels or loss weights."""
    rows: Sequence[tuple[Sequence[Encoded], Sequence[Gap]]]
    """Rows of the plan, and how far their samples are from alone."""
    num_rows_left_out: int

    @property
    def largest_logit(self) -> float:
        """Of the model's own."""
        return worst([float(logits.abs().max()) for logits in self.alone])

    @property
    def limits(self) -> Limits:
        """What rounding may do on this model, in units of the logits."""
        return Limits.of(self.dtype, self.largest_logit, self.noise, self.repeated)


def measured(
    subject: Subject, samples: Sequence[Encoded], rows: Sequence[Sequence[Encoded]] = (), tokens_of_epoch: int = 0
) -> Measured:
    """Ask one pack everything, and rows of the plan whether they equal their samples alone.

    Runs the same forwards whatever they give: ranks that wait for each other in one must do equally many.
    """
    began = time.monotonic()
    with untouched(subject.model), repeatable_training(subject.model):
        truth = Truth(subject, samples)
        samples = truth.known(samples)
        compared = Compared(subject, samples)
        repeated = worst(_moved(subject, samples, compared.packed))
        own, own_media, moves, moves_by_media = _changed(subject, samples, compared.packed)
        num_tokens = sum(map(length_of, samples))
        kept = affordable(subject, rows, num_tokens, time.monotonic() - began, tokens_of_epoch)
        kept = [row for row in kept if truth.is_for(row)]
        of_rows = [against_alone(subject, row, truth) for row in kept]
        targets = [
            wrong_targets_of(sample, at, compared.packed, compared.alone[at]) for at, sample in enumerate(samples)
        ]
        return Measured(
            samples=samples,
            alone=[ran.logits[0] for ran in compared.alone],
            dtype=compared.dtype,
            noise=compared.noise,
            own=own,
            own_media=own_media,
            repeated=repeated,
            moves=moves,
            moves_by_media=moves_by_media,
            gaps=[gap_of(a, ran.logits[0]) for a, ran in zip(compared.packed.logits, compared.alone, strict=True)],
            gradient=compared.gradient,
            targets=next(filter(None, [*targets, *(wrong for _, wrong in of_rows)]), None),
            rows=[(row, gaps) for row, (gaps, _) in zip(kept, of_rows, strict=True)],
            num_rows_left_out=len(rows) - len(kept),
        )


class Compared:
    """One pack and its samples alone: logits of all, and the gradient of those whose backward is cheap enough."""

    def __init__(self, subject: Subject, samples: Sequence[Encoded]) -> None:
        self.subject = subject
        limit = longest_for_own(subject.model, is_trained=True)
        by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
        graded = [at for at in range(len(samples)) if length_of(samples[at]) <= limit] or by_length[:2]
        num_targets = sum(num_supervised(samples[at]) for at in graded)
        self.options: Any = {"num_targets": max(1, num_targets)}
        with gradients.small_set(subject.model) as parameters:
            self.options["parameters"] = parameters
            self.alone, self.dtype = self._alone(samples, graded)
            with own_attention(subject.model):
                self.noise = self._noise(samples, by_length[:2])
            short = [samples[at] for at in graded]
            together = subject.run(short, packed=True, **self.options)
        self.packed = together if len(short) == len(samples) else subject.run(samples, packed=True)
        added = gradients.added([self.alone[at].gradient for at in graded])
        self.gradient = gradients.difference(together.gradient, added)

    def _alone(self, samples: Sequence[Encoded], graded: Sequence[int]) -> tuple[list[Ran], torch.dtype]:
        ran: list[Ran] = []

        def run() -> None:
            for at, sample in enumerate(samples):
                options = self.options if at in graded else {}
                with own_attention(self.subject.model, fitting(self.subject.model, length_of(sample))):
                    ran.append(self.subject.run([sample], packed=False, **options))

        dtype = precision_of(self.subject.model, run)
        return ran, dtype

    def _noise(self, samples: Sequence[Encoded], chosen: Sequence[int]) -> Noise:
        """What rounding does to these samples, alone. The lesser of two draws, as a rare one takes other experts."""
        model, draws = self.subject.model, []
        for seed, options in enumerate((self.options, {})):
            with rounded_otherwise(model, self.dtype, seed):
                draws.append([self.subject.run([samples[at]], packed=False, **options) for at in chosen])
        gaps = [
            min(gap_of(ran.logits[0], self.alone[at].logits[0]).over_tokens for ran in of_sample)
            for at, of_sample in zip(chosen, zip(*draws, strict=True), strict=True)
        ]
        off = gradients.added([ran.gradient for ran in draws[0]])
        right = gradients.added([self.alone[at].gradient for at in chosen])
        return Noise(worst(gaps), worst(list(gradients.difference(off, right).values())))


def against_alone(subject: Subject, row: Sequence[Encoded], truth: Truth) -> tuple[list[Gap], str | None]:
    """How far each sample of a row is from what it gives alone, and what is wrong with the row's labels."""
    packed = subject.run(row, packed=True)
    gaps, targets = [], None
    for at, sample in enumerate(row):
        alone = truth.of(sample)
        gaps.append(gap_of(packed.logits[at], alone.logits[0]))
        targets = targets or wrong_targets_of(sample, at, packed, alone)
    return gaps, targets


def wrong_targets_of(sample: Encoded, at: int, packed: Ran, alone: Ran) -> str | None:
    """What is wrong with labels or loss weights of a sample in the row, where they are not those that it has alone."""
    name = sample.get("sample_id", f"sample {at + 1}")
    labels, expected = packed.labels[at], alone.labels[0]
    assert labels is not None
    assert expected is not None
    if at and int(labels[0]) != NO_LABEL:
        return f"the first token of {name} is a target of the sample before it: labels are shifted over a boundary"
    if (wrong := _first_difference(labels, expected)) is not None:
        return f"labels of {name} in the row are not those that it has alone, from its token {wrong} on"
    ones = torch.ones(length_of(sample))
    weights, expected = (ones if one is None else one for one in (packed.weights[at], alone.weights[0]))
    counted = (labels != NO_LABEL).cpu()
    if (wrong := _first_difference(weights.cpu() * counted, expected.cpu() * counted)) is not None:
        return f"loss weights of {name} in the row are not those that it has alone, from its token {wrong} on"
    return None


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Of two rows of tokens; the first token is nobody's target."""
    wrong = torch.nonzero(one[1:].cpu() != other[1:].cpu()).flatten()
    return int(wrong[0]) + 1 if len(wrong) else None


def _changed(
    subject: Subject, samples: Sequence[Encoded], packed: Ran
) -> tuple[list[float], dict[int, float], list[float], list[float]]:
    """Replace the tokens of every second sample, then of the others; then the media of one of each two twins.

    That twins differ says that whoever exchanged them would be noticed.
    """
    own, moves = [0.0] * len(samples), []
    for parity in (0, 1):
        changed = [replaced(s, subject.is_ordinary) if at % 2 == parity else s for at, s in enumerate(samples)]
        for at, size in enumerate(_moved(subject, changed, packed)):
            if at % 2 == parity:
                own[at] = size
            else:
                moves.append(size)
    pairs = twins(samples)
    if not pairs:
        return own, {}, moves, []
    changed = list(samples)
    for one, _ in pairs:
        changed[one] = with_other_media(samples[one], 2)
    sizes = _moved(subject, changed, packed)
    own_media = {one: min(sizes[one], gap_of(packed.logits[one], packed.logits[other]).most) for one, other in pairs}
    return own, own_media, moves, [size for at, size in enumerate(sizes) if at not in own_media]


def _moved(subject: Subject, changed: Sequence[Encoded], packed: Ran) -> list[float]:
    again = subject.run(changed, packed=True)
    return [gap_of(before, after).most for before, after in zip(packed.logits, again.logits, strict=True)]


def twins(samples: Sequence[Encoded]) -> list[tuple[int, int]]:
    """Samples that differ in nothing but their media."""
    with_media = [at for at, sample in enumerate(samples) if kinds_of_media(sample)]
    return [
        (one, other)
        for one in with_media
        for other in with_media
        if one < other
        and samples[one]["input_ids"] is samples[other]["input_ids"]
        and samples[one] is not samples[other]
    ]
