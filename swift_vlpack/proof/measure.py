"""Measure a pack for the proof: against its samples alone, and against itself with some samples changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from swift_vlpack.proof import gradients
from swift_vlpack.proof.changes import kinds_of_media, replaced, with_other_media
from swift_vlpack.proof.proof_model import Ran, Subject, length_of, with_cut_head
from swift_vlpack.proof.reference import (
    fitting,
    in_single,
    longest_for_own,
    own_attention,
    repeatable_training,
    untouched,
)
from swift_vlpack.proof.tolerance import (
    TIMES_NOISE,
    TIMES_NOISE_BESIDE_SINGLE,
    TIMES_PADDED,
    Limits,
    Noise,
    gap_of,
    precision_of,
    rounded_otherwise,
    rounds_coarsely,
    worst,
)
from swift_vlpack.proof.truth import AgainstAlone, Truth
from swift_vlpack.rows.samples import Encoded

TOKENS_ALLOWED, SHARE_OF_EPOCH = 16_384, 0.02
"""Budget of a proof for sequences of the plan: this many tokens, or this share of an epoch, whichever is more."""


@dataclass(frozen=True, slots=True)
class InSingle:
    """A comparison of a few of the samples, packed and alone, in float32."""

    subject: Subject
    row: AgainstAlone
    gradient: Mapping[str, float]
    """Difference of gradients by part of the model; empty if the backward would take too much memory."""
    limits: Limits


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements of one pack, in the order of its samples, and of sequences of the plan."""

    samples: Sequence[Encoded]
    alone: Sequence[torch.Tensor]
    dtype: torch.dtype
    noise: Noise
    """Effect of rounding on the samples alone, run by the model's own attention."""
    own: Sequence[float]
    """Largest change of a logit of each sample when its own tokens were replaced."""
    own_media: Mapping[int, float]
    """Largest change of a logit of each sample with a twin when its media were replaced; or the difference between the
    twins, if that is less."""
    repeated: float
    """Largest change of a logit when the same pack was run again."""
    moves: Sequence[float]
    """Largest change of a logit of each sample when the tokens of its neighbours were replaced."""
    moves_by_media: Sequence[float]
    """Largest change of a logit of samples whose own media stayed, when the media of others were replaced."""
    rows: Sequence[AgainstAlone]
    """The pack, the pack with its samples in reverse order, and sequences of the plan."""
    gradient: Mapping[str, float]
    left_out: LeftOut
    has_experts: bool
    in_single: InSingle | None
    """Comparison in float32; None if the model computes in 32 bits already, or cannot be run in float32."""
    not_in_single: str
    """Reason why the model could not be run in float32; empty if it was, or need not be."""
    padded: Noise
    """Difference between the host's padded batch and its samples alone; measured only if a model in 16 bits could not
    be run in float32."""

    @property
    def rows_of_plan(self) -> Sequence[AgainstAlone]:
        """Return the comparisons of sequences of the plan, without the two of the pack."""
        return self.rows[2:]

    @property
    def largest_logit(self) -> float:
        """Return the largest logit of the samples alone."""
        return worst([float(logits.abs().max()) for logits in self.alone])

    @property
    def limits(self) -> Limits:
        """Return the largest differences that count as rounding on this model, in units of the logits."""
        times = TIMES_NOISE if self.in_single is None else TIMES_NOISE_BESIDE_SINGLE
        noise = self.noise.times(times).at_least(self.padded.times(TIMES_PADDED))
        return Limits.of(self.dtype, self.largest_logit, noise, self.repeated, has_experts=self.has_experts)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Sequences and samples of the plan that were not compared."""

    num_rows: int = 0
    num_tokens: int = 0
    """Tokens of the sequences that were not compared."""
    num_samples: int = 0
    """Samples too long for the model's own attention, in sequences that were compared."""


NOTHING_LEFT_OUT = LeftOut()


def measured(
    subject: Subject, samples: Sequence[Encoded], rows: Sequence[Sequence[Encoded]] = (), tokens_of_epoch: int = 0
) -> Measured:
    """Run all measurements on one pack of `samples`, and compare sequences of the plan with their samples alone.

    The number of forwards does not depend on their results, because ranks that wait for each other in a forward must
    run equally many.
    """
    with untouched(subject.model), repeatable_training(subject.model):
        truth = Truth(subject, samples)
        samples = truth.known(samples)
        with own_attention(subject.model):
            subject = truth.subject = with_cut_head(subject, min(samples, key=length_of))
        has_experts = any("expert" in name for name, _ in subject.model.named_modules())
        compared = Compared(subject, samples, has_experts=has_experts)
        repeated = worst(_moved(subject, samples, compared.packed))
        own, own_media, moves, moves_by_media = _changed(subject, samples, compared.packed)
        few = [samples[at] for at in compared.few]
        single, why_not, padded = None, "", Noise(0.0, 0.0)
        if rounds_coarsely(subject.model, compared.dtype):
            single, why_not = _in_single(subject, few, has_experts=has_experts)
            padded = padded if single else compared.padded(samples)
        kept = affordable(rows, tokens_of_epoch)
        of_plan = [_against_known(subject, truth, row) for row in kept]
        looked_at = [row for row in of_plan if row is not None]
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
            rows=[*compared.against_alone(samples), *looked_at],
            gradient=compared.gradient,
            left_out=LeftOut(
                num_rows=len(rows) - len(looked_at),
                num_tokens=_tokens_in(rows) - _tokens_in([row.samples for row in looked_at]),
                num_samples=sum(len(row.samples) - len(row.gaps) for row in looked_at),
            ),
            has_experts=has_experts,
            in_single=single,
            not_in_single=why_not,
            padded=padded,
        )


def affordable(rows: Sequence[Sequence[Encoded]], tokens_of_epoch: int) -> list[Sequence[Encoded]]:
    """Choose sequences of the plan within the budget of tokens: the first in any case, then each that still fits.

    The budget counts tokens and not seconds, so that a busy machine compares as much as an idle one, and all ranks
    compare the same.
    """
    left = max(TOKENS_ALLOWED, SHARE_OF_EPOCH * tokens_of_epoch)
    kept: list[Sequence[Encoded]] = []
    for row in rows:
        if not kept or _tokens_in([row]) <= left:
            kept.append(row)
            left -= _tokens_in([row])
    return kept


def _tokens_in(rows: Sequence[Sequence[Encoded]]) -> int:
    return sum(length_of(sample) for row in rows for sample in row)


def _against_known(subject: Subject, truth: Truth, row: Sequence[Encoded]) -> AgainstAlone | None:
    """Compare a sequence of the plan with its samples alone, as far as `truth` has them; None if it has none."""
    is_known = [truth.is_for([sample]) for sample in row]
    if not any(is_known):
        return None
    alone = (truth.of(sample) if known else None for sample, known in zip(row, is_known, strict=True))
    return AgainstAlone.of(row, subject.run(row, packed=True), alone)


def _in_single(subject: Subject, samples: Sequence[Encoded], *, has_experts: bool) -> tuple[InSingle | None, str]:
    """Compare samples packed and alone in float32, on the model itself. Returns None and the reason if that fails."""
    model = subject.model
    if gradients.is_sharded(model):
        return None, "parameters are sharded"
    try:
        with gradients.small_set_in_single(model) as (parameters, leaves):
            device = next(model.parameters()).device.type

            def forward_context() -> AbstractContextManager[None]:
                return in_single(subject.forward_context(), device, leaves)

            again = replace(subject, forward_context=forward_context)
            alone = []
            for sample in samples:
                with own_attention(model, fitting(model, length_of(sample))):
                    alone.append(again.run([sample], packed=False, parameters=parameters))
            packed = again.run(samples, packed=True, parameters=parameters)
            off = gradients.difference(packed.gradient, gradients.added([ran.gradient for ran in alone]))
    except Exception as error:  # a kernel for 16 bits only, or too little memory: the packs may be right
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    largest = worst([float(ran.logits[0].abs().max()) for ran in alone])
    of_row = AgainstAlone.of(samples, packed, alone)
    return InSingle(again, of_row, off, Limits.sharp(largest, has_experts=has_experts)), ""


class Compared:
    """Runs one pack and its samples alone: logits of all, gradients of samples whose backward is cheap enough."""

    def __init__(self, subject: Subject, samples: Sequence[Encoded], *, has_experts: bool) -> None:
        self.subject = subject
        limit = longest_for_own(subject.model, is_trained=True)
        by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
        graded = [at for at in range(len(samples)) if length_of(samples[at]) <= limit] or by_length[:2]
        self.few = [at for at in _short_of_each_kind(samples) if at in graded]
        """Indices of a short sample of each kind."""
        with gradients.small_set(subject.model) as parameters:
            self.options: Any = {"parameters": parameters}
            self.alone, self.dtype = self._alone(samples, graded)
            with own_attention(subject.model):
                self.noise = self._noise(samples, self.few, num_draws=2 if has_experts else 1)
            short = [samples[at] for at in graded]
            together = subject.run(short, packed=True, **self.options)
        self.packed = together if len(short) == len(samples) else subject.run(samples, packed=True)
        # Reversed, the pack has its length and other boundaries: this shows a cache of boundaries by length.
        self.turned = subject.run(samples[::-1], packed=True)
        added = gradients.added([self.alone[at].gradient for at in graded])
        self.gradient = gradients.difference(together.gradient, added)

    def against_alone(self, samples: Sequence[Encoded]) -> list[AgainstAlone]:
        """Compare the pack, and the pack in reverse order, with the samples alone."""
        return [
            AgainstAlone.of(samples, self.packed, self.alone),
            AgainstAlone.of(samples[::-1], self.turned, self.alone[::-1]),
        ]

    def padded(self, samples: Sequence[Encoded]) -> Noise:
        """Measure how far a few samples in the host's padded batch differ from alone, by the model's own attention."""
        few = [samples[at] for at in self.few]
        with gradients.small_set(self.subject.model) as parameters, own_attention(self.subject.model):
            try:
                batch = self.subject.run(few, packed=False, parameters=parameters)
            except RuntimeError:
                return Noise(0.0, 0.0)  # the host cannot batch them: images of different sizes (Mistral 3)
        alone = [self.alone[at] for at in self.few]
        gaps = [gap_of(*pair).over_tokens for pair in zip(batch.logits, (ran.logits[0] for ran in alone), strict=True)]
        off = gradients.difference(batch.gradient, gradients.added([ran.gradient for ran in alone]))
        return Noise(worst(gaps), worst(list(off.values())))

    def _alone(self, samples: Sequence[Encoded], graded: Sequence[int]) -> tuple[list[Ran], torch.dtype]:
        ran: list[Ran] = []

        def run() -> None:
            for at, sample in enumerate(samples):
                options = self.options if at in graded else {}
                with own_attention(self.subject.model, fitting(self.subject.model, length_of(sample))):
                    ran.append(self.subject.run([sample], packed=False, **options))

        dtype = precision_of(self.subject.model, run)
        return ran, dtype

    def _noise(self, samples: Sequence[Encoded], chosen: Sequence[int], num_draws: int) -> Noise:
        """Measure what rounding does to the `chosen` samples alone.

        Takes the smallest gap over some draws of rounding, because a rare draw sends a token to another expert.
        """
        model, draws = self.subject.model, []
        for seed in range(num_draws):
            options = self.options if seed == 0 else {}
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
    """Choose the two shortest samples, and the shortest with each kind of media: a vision tower rounds, too."""
    by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
    of_kinds = {kinds_of_media(samples[at]): at for at in by_length[::-1]}
    return list(dict.fromkeys([*by_length[:2], *of_kinds.values()]))


def _changed(
    subject: Subject, samples: Sequence[Encoded], packed: Ran
) -> tuple[list[float], dict[int, float], list[float], list[float]]:
    """Replace the tokens of every second sample, then of the others, then the media of one twin of each pair.

    Returns `own`, `own_media`, `moves` and `moves_by_media` of `Measured`. The first twin's own move is limited to the
    difference between the twins: if they do not differ, an exchange of their media could not be seen.
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
    """Return the pairs of samples that differ only in their media."""
    with_media = [at for at, sample in enumerate(samples) if kinds_of_media(sample)]
    return [
        (one, other)
        for one in with_media
        for other in with_media
        if one < other
        and samples[one]["input_ids"] is samples[other]["input_ids"]
        and samples[one] is not samples[other]
    ]
