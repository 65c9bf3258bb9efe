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
    Limits,
    Noise,
    gap_of,
    precision_of,
    rounded_otherwise,
    worst,
)
from swift_vlpack.data.proof.truth import AgainstAlone, Truth
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
    rows: Sequence[AgainstAlone]
    """The pack, the same with its samples the other way round, and rows of the plan."""
    gradient: Mapping[str, float]
    num_rows_left_out: int
    has_experts: bool

    @property
    def rows_of_plan(self) -> Sequence[AgainstAlone]:
        """Without those that the pack made."""
        return self.rows[2:]

    @property
    def largest_logit(self) -> float:
        """Of the model's own."""
        return worst([float(logits.abs().max()) for logits in self.alone])

    @property
    def limits(self) -> Limits:
        """What rounding may do on this model, in units of the logits."""
        return Limits.of(self.dtype, self.largest_logit, self.noise, self.repeated, has_experts=self.has_experts)


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
        of_plan = [AgainstAlone.of(row, subject.run(row, packed=True), map(truth.of, row)) for row in kept]
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
            rows=[*compared.against_alone(samples), *of_plan],
            gradient=compared.gradient,
            num_rows_left_out=len(rows) - len(kept),
            has_experts=any("expert" in name for name, _ in subject.model.named_modules()),
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
                self.noise = self._noise(samples, [at for at in _short_of_each_kind(samples) if at in graded])
            short = [samples[at] for at in graded]
            together = subject.run(short, packed=True, **self.options)
        self.packed = together if len(short) == len(samples) else subject.run(samples, packed=True)
        # What remembers the boundaries of a row by its length takes them for those of this one.
        self.turned = subject.run(samples[::-1], packed=True)
        added = gradients.added([self.alone[at].gradient for at in graded])
        self.gradient = gradients.difference(together.gradient, added)

    def against_alone(self, samples: Sequence[Encoded]) -> list[AgainstAlone]:
        """The pack, and the same the other way round."""
        return [
            AgainstAlone.of(samples, self.packed, self.alone),
            AgainstAlone.of(samples[::-1], self.turned, self.alone[::-1]),
        ]

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


def _short_of_each_kind(samples: Sequence[Encoded]) -> list[int]:
    """The two shortest, and the shortest of those with the same media: a vision tower rounds, too."""
    by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
    of_kinds = {kinds_of_media(samples[at]): at for at in by_length[::-1]}
    return list(dict.fromkeys([*by_length[:2], *of_kinds.values()]))


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
