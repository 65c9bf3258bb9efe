"""What the proof measures: a pack against its samples alone, by the model's own attention, and against itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_vlpack.data.lengths.sizes import num_supervised
from swift_vlpack.data.proof import gradients
from swift_vlpack.data.proof.changes import kinds_of_media, replaced, with_other_media
from swift_vlpack.data.proof.reference import OWN, QUICK, longest_for_own, own_attention, repeatable_training, untouched
from swift_vlpack.data.proof.subject import Ran, Subject
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded

TIMES_NOISE = 8
"""Two ways to compute the same differ by their noise; the maximum over a vocabulary and a pack by some times that."""
SECONDS_ALLOWED, SHARE_OF_EPOCH = 30.0, 0.02


class Tolerance(NamedTuple):
    """What rounding may do: to logits in shares of the largest, to gradients in shares of their length."""

    moved: float
    """To a neighbour, which the same kernels compute from the same numbers."""
    least: float
    """To a sample in another row and by another attention, where little noise was measured, ..."""
    most: float
    """... and where much was."""
    gradient_least: float
    gradient_most: float


TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-8, 1e-8, 1e-7, 1e-7),
    torch.float32: Tolerance(1e-5, 1e-4, 1e-3, 1e-3, 1e-2),
    torch.float16: Tolerance(5e-3, 5e-3, 2e-2, 2e-2, 1e-1),
    torch.bfloat16: Tolerance(2e-2, 2e-2, 1e-1, 5e-2, 2e-1),
}


class Limits(NamedTuple):
    """What is no difference on this model."""

    moved: float
    alone: float
    gradient: float
    relative: float
    """Of hidden states, in shares of the largest."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All that one pack was asked, by the place of the sample in it, and what rows of the plan gave."""

    samples: Sequence[Encoded]
    alone: Sequence[torch.Tensor]
    dtype: torch.dtype
    noise: tuple[float, float]
    """Of logits and gradient: what another layout of the batch does to them, without us."""
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
    gaps: Sequence[float]
    """Between packed and alone."""
    gradient: Mapping[str, float]
    targets: str | None
    """What is wrong with labels or loss weights."""
    rows: Sequence[tuple[Sequence[Encoded], Sequence[float]]]
    """Rows of the plan, and how far their samples are from alone."""
    num_rows_left_out: int

    @property
    def largest_logit(self) -> float:
        """Of the model's own."""
        return worst([float(logits.abs().max()) for logits in self.alone])

    @property
    def limits(self) -> Limits:
        """What rounding may do on this model, in units of the logits."""
        of, scale = TOLERANCES[self.dtype], max(1.0, self.largest_logit)
        logits, gradient = (TIMES_NOISE * noise for noise in self.noise)
        return Limits(
            of.moved * scale,
            min(of.most * scale, max(of.least * scale, logits)),
            min(of.gradient_most, max(of.gradient_least, gradient)),
            of.least,
        )


def measured(
    subject: Subject, samples: Sequence[Encoded], rows: Sequence[Sequence[Encoded]] = (), tokens_of_epoch: int = 0
) -> Measured:
    """Ask one pack everything, and rows of the plan whether they equal their samples alone.

    Runs the same forwards whatever they give: ranks that wait for each other in one must do equally many.
    """
    began = time.monotonic()
    with untouched(subject.model), repeatable_training(subject.model):
        truth = Truth(subject, min(samples, key=_length))
        compared = Compared(subject, samples, truth)
        repeated = worst(_moved(subject, samples, compared.packed))
        own, own_media, moves, moves_by_media = _changed(subject, samples, compared.packed)
        num_tokens = sum(map(_length, samples))
        affordable = _affordable(subject, rows, num_tokens, time.monotonic() - began, tokens_of_epoch)
        affordable = [row for row in affordable if truth.is_for(row)]
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
            gaps=[gap(a, ran.logits[0]) for a, ran in zip(compared.packed.logits, compared.alone, strict=True)],
            gradient=compared.gradient,
            targets=wrong_targets(samples, compared.packed, compared.alone),
            rows=[(row, against_alone(subject, row, truth)) for row in affordable],
            num_rows_left_out=len(rows) - len(affordable),
        )


class Truth:
    """The attention that says what a sample gives: the model's own, or, for samples too long for that, its equal."""

    def __init__(self, subject: Subject, shortest: Encoded) -> None:
        self.subject = subject
        self.shortest = shortest
        self.limit = max(longest_for_own(subject.model), _length(shortest))

    def is_for(self, row: Sequence[Encoded]) -> bool:
        """Whether it can be said for all of a row."""
        return all(_length(sample) <= self.limit for sample in row) or self._has_equal

    def logits(self, sample: Encoded) -> torch.Tensor:
        """Of one sample alone."""
        with own_attention(self.subject.model, OWN if _length(sample) <= self.limit else QUICK):
            return self.subject.run([sample], packed=False).logits[0]

    @cached_property
    def _has_equal(self) -> bool:
        """sdpa needs no matrix of L x L, and may drop what the model asks for: so it is compared, on a short sample."""
        logits = []
        for name in (OWN, QUICK):
            with own_attention(self.subject.model, name):
                logits.append(self.subject.run([self.shortest], packed=False).logits[0])
        limit = TOLERANCES[coarsest([logits[0].dtype])].least
        return gap(*logits) <= limit * max(1.0, float(logits[0].abs().max()))


class Compared:
    """One pack and its samples alone: logits of all, and the gradient of those whose backward is cheap enough."""

    def __init__(self, subject: Subject, samples: Sequence[Encoded], truth: Truth) -> None:
        self.subject = subject
        limit = longest_for_own(subject.model, is_trained=True)
        by_length = sorted(range(len(samples)), key=lambda at: _length(samples[at]))
        graded = [at for at in range(len(samples)) if _length(samples[at]) <= limit] or by_length[:2]
        num_targets = sum(num_supervised(samples[at]) for at in graded)
        self.options: Any = {"num_targets": max(1, num_targets)}
        with gradients.small_set(subject.model) as parameters:
            self.options["parameters"] = parameters
            self.alone, self.dtype = self._alone(samples, graded, truth)
            with own_attention(subject.model):
                self.noise = self._noise(samples, *by_length[:2])
            short = [samples[at] for at in graded]
            together = subject.run(short, packed=True, **self.options)
        self.packed = together if len(short) == len(samples) else subject.run(samples, packed=True)
        added = gradients.added([self.alone[at].gradient for at in graded])
        self.gradient = gradients.difference(together.gradient, added)

    def _alone(self, samples: Sequence[Encoded], graded: Sequence[int], truth: Truth) -> tuple[list[Ran], torch.dtype]:
        ran: list[Ran] = []

        def run() -> None:
            for at, sample in enumerate(samples):
                options = self.options if at in graded else {}
                with own_attention(self.subject.model, OWN if _length(sample) <= truth.limit else QUICK):
                    ran.append(self.subject.run([sample], packed=False, **options))

        dtype = precision_of(self.subject.model, run)
        return ran, dtype

    def _noise(self, samples: Sequence[Encoded], one: int, other: int) -> tuple[float, float]:
        """What another layout of the batch does: the two shortest samples, padded to one length."""
        together = self.subject.run([samples[one], samples[other]], packed=False, **self.options)
        gaps = [gap(a, self.alone[at].logits[0]) for at, a in zip((one, other), together.logits, strict=True)]
        apart = gradients.added([self.alone[one].gradient, self.alone[other].gradient])
        return worst(gaps), worst(list(gradients.difference(together.gradient, apart).values()))


def precision_of(model: Any, forward: Callable[[], Any]) -> torch.dtype:
    """The precision that limits the proof: that of the weights, or what autocast makes of it before the logits."""
    seen = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()][:1]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        forward()
        return coarsest(seen)
    handle = head.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    try:
        forward()
    finally:
        handle.remove()
    return coarsest(seen)


def coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The one of them that rounds most."""
    known = (dtype for dtype in dtypes if dtype in TOLERANCES)
    return max(known, key=lambda dtype: TOLERANCES[dtype].most, default=torch.float32)


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far logits differ at most."""
    return float(gap_by_token(one, other).max())


def gap_by_token(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far the logits of each token differ."""
    return (one.float() - other.float()).abs().amax(dim=-1)


def worst(sizes: Sequence[float]) -> float:
    """The largest; NaN stays NaN, which Python's max may lose."""
    return float(np.max([0.0, *sizes]))


def against_alone(subject: Subject, row: Sequence[Encoded], truth: Truth) -> list[float]:
    """How far each sample of a row is from what it gives alone."""
    packed = subject.run(row, packed=True).logits
    return [gap(logits, truth.logits(sample)) for logits, sample in zip(packed, row, strict=True)]


def wrong_targets(samples: Sequence[Encoded], packed: Ran, alone: Sequence[Ran]) -> str | None:
    """What is wrong with labels or loss weights of the row, where they are not those of the samples alone."""
    for at, (sample, ran) in enumerate(zip(samples, alone, strict=True)):
        name = sample.get("sample_id", f"sample {at + 1}")
        labels, expected = packed.labels[at], ran.labels[0]
        assert labels is not None
        assert expected is not None
        if at and int(labels[0]) != NO_LABEL:
            return f"the first token of {name} is a target of the sample before it: labels are shifted over a boundary"
        if (wrong := _first_difference(labels, expected)) is not None:
            return f"labels of {name} in the row are not those that it has alone, from its token {wrong} on"
        weights, expected = (
            torch.ones(_length(sample)) if one is None else one for one in (packed.weights[at], ran.weights[0])
        )
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
    own_media = {one: min(sizes[one], gap(packed.logits[one], packed.logits[other])) for one, other in pairs}
    return own, own_media, moves, [size for at, size in enumerate(sizes) if at not in own_media]


def _moved(subject: Subject, changed: Sequence[Encoded], packed: Ran) -> list[float]:
    again = subject.run(changed, packed=True)
    return [gap(before, after) for before, after in zip(packed.logits, again.logits, strict=True)]


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


def _affordable(
    subject: Subject, rows: Sequence[Sequence[Encoded]], num_tokens: int, seconds: float, tokens_of_epoch: int
) -> list[Sequence[Encoded]]:
    """The rows of the plan that fit what the proof may take: 2 % of an epoch, or 30 seconds on the slowest rank.

    Up to here it took as much as ten forwards of the pack; a row of the plan takes two and its samples' own attention.
    """
    device = next(subject.model.parameters()).device
    per_token = _slowest(seconds, device) / (10 * num_tokens)
    allowed = max(SECONDS_ALLOWED, SHARE_OF_EPOCH * 3 * per_token * tokens_of_epoch) - 10 * per_token * num_tokens
    kept = []
    for row in rows:
        allowed -= 3 * per_token * sum(map(_length, row))
        if allowed >= 0:
            kept.append(row)
    return kept


def _slowest(seconds: float, device: torch.device) -> float:
    """On any rank: all have to decide alike."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seconds
    agreed = torch.tensor([seconds], device=device)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
    return float(agreed)


def _length(sample: Encoded) -> int:
    return int(sample["length"])
