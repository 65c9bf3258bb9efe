"""Measure a pack for the proof: against its samples alone, and against itself with some samples changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from swift_vlpack.feed.waiting import is_of_collective
from swift_vlpack.proof import gradients
from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.choose_samples import shortest_of_each_kind
from swift_vlpack.proof.each_alone import each_alone
from swift_vlpack.proof.limits import (
    TIMES_NOISE,
    TIMES_NOISE_BESIDE_FLOAT32,
    TIMES_PADDED,
    Gap,
    Limits,
    Noise,
    gap_of,
    has_experts,
    precision_of,
    rounded_otherwise,
    rounds_coarsely,
    worst,
)
from swift_vlpack.proof.perturb import replaced, twins, with_other_media, with_other_prefix
from swift_vlpack.proof.proof_model import ProofModel, RunResult, length_of, with_cut_head
from swift_vlpack.proof.reference import (
    Reference,
    in_float32,
    longest_for_own,
    own_attention,
    repeatable_training,
    run_alone,
    untouched,
    words_of,
)
from swift_vlpack.proof.same_inputs import (
    boundaries_in,
    is_further_branch,
    wrong_boundaries,
    wrong_media,
    wrong_positions,
    wrong_targets_of,
    wrong_tokens,
)
from swift_vlpack.proof.shards import sharded_by
from swift_vlpack.rows.samples import Encoded

TOKENS_ALLOWED, SHARE_OF_EPOCH = 16_384, 0.02
"""Budget of a proof for sequences of the plan: this many tokens, or this share of an epoch, whichever is more."""
_WORDS_FOR_HEAD = 16
"""Number of tokens on which the whole head of the model is run once, to compare it with a part of the head."""


class AgainstAlone(NamedTuple):
    """Comparison of a packed sequence with its samples alone."""

    samples: Sequence[Encoded]
    gaps: Sequence[Gap]
    """Difference of logits for each sample that was compared."""
    targets: str | None
    """A mistake in labels or loss weights, in words; None if there is none."""
    inputs: str | None
    """Name of a media input that is not in the order of the samples; None if all are."""
    tokens: str | None
    """A mistake in boundaries, positions or other per-token integers, in words; None if there is none."""

    @classmethod
    def of(cls, samples: Sequence[Encoded], packed: RunResult, alone: Iterable[RunResult | None]) -> AgainstAlone:
        """Compare a sequence with its samples alone; None in `alone` skips a sample that could not be run alone.

        `alone` may be a generator: it is read one sample at a time, because logits are large.
        """
        boundaries = boundaries_in(packed.slots)
        gaps, targets = [], []
        inputs: list[Mapping[str, Any]] = []
        tokens = [wrong_boundaries(packed.inputs, boundaries) if boundaries else None]
        for at, (sample, ran) in enumerate(zip(samples, alone, strict=True)):
            if ran is None:
                inputs.append({})
                continue
            inputs.append({} if is_further_branch(packed.slots, at) else ran.inputs)
            gaps.append(gap_of(packed.logits[at], ran.logits[0]))
            targets.append(wrong_targets_of(sample, at, packed, ran))
            tokens.append(wrong_positions(sample, at, packed, ran) or wrong_tokens(sample, at, packed, ran))
        # In the order of the batch, which may be another than that of the samples.
        in_batch = [inputs[at] for at in sorted(range(len(inputs)), key=lambda at: packed.slots[at])]
        media = wrong_media(packed.inputs, in_batch) if len(gaps) == len(samples) else None
        return cls(samples, gaps, next(filter(None, targets), None), media, next(filter(None, tokens), None))


class OtherPrefix(NamedTuple):
    """Changes of logits when the tokens of prefixes were replaced; empty if no samples share a prefix."""

    own: Mapping[int, float]
    """Largest change after the prefix, for each sample that has it."""
    moves: Sequence[float]
    """Largest changes of samples that do not have it."""


@dataclass(frozen=True, slots=True)
class InFloat32:
    """A comparison of a few of the samples, packed and alone, in float32."""

    proof_model: ProofModel
    compared: AgainstAlone
    gradient: Mapping[str, float]
    """Difference of gradients by part of the model; empty if the backward would take too much memory."""
    limits: Limits


@dataclass(frozen=True, slots=True)
class Measurements:
    """All measurements of one pack, in the order of its samples, and of sequences of the plan."""

    proof_model: ProofModel
    """The model as it was run, with only some columns of its head (`with_cut_head`)."""
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
    of_prefix: OtherPrefix
    compared: Sequence[AgainstAlone]
    """The pack, the pack with its samples in reverse order, and sequences of the plan."""
    gradient: Mapping[str, float]
    num_parameters: int
    """Number of parameters whose gradients were compared."""
    sharded_by: str
    """The engine that leaves each rank a part of the parameters; empty if each rank has them all."""
    left_out: LeftOut
    has_experts: bool
    in_float32: InFloat32 | None
    """Comparison in float32; None if the model computes in 32 bits already, or cannot be run in float32."""
    not_in_float32: str
    """Reason why the model could not be run in float32; empty if it was, or need not be."""
    padded: Noise
    """Difference between the host's padded batch and its samples alone; measured only if a model in 16 bits could not
    be run in float32."""

    @property
    def of_plan(self) -> Sequence[AgainstAlone]:
        """Return the comparisons of sequences of the plan, without the two of the pack."""
        return self.compared[2:]

    @property
    def largest_logit(self) -> float:
        """Return the largest logit of the samples alone."""
        return worst([float(logits.abs().max()) for logits in self.alone])

    @property
    def limits(self) -> Limits:
        """Return the largest differences that count as rounding on this model, in units of the logits."""
        times = TIMES_NOISE if self.in_float32 is None else TIMES_NOISE_BESIDE_FLOAT32
        noise = self.noise.times(times).at_least(self.padded.times(TIMES_PADDED))
        return Limits.of(self.dtype, self.largest_logit, noise, self.repeated, has_experts=self.has_experts)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Sequences and samples of the plan that were not compared."""

    num_sequences: int = 0
    num_tokens: int = 0
    """Tokens of the sequences that were not compared."""
    num_samples: int = 0
    """Samples too long for the model's own attention, in sequences that were compared."""


NOTHING_LEFT_OUT = LeftOut()


def measure_pack(
    proof_model: ProofModel,
    samples: Sequence[Encoded],
    sequences: Sequence[Sequence[Encoded]] = (),
    tokens_of_epoch: int = 0,
) -> Measurements:
    """Run all measurements on one pack of `samples`, and compare sequences of the plan with their samples alone.

    The number of forwards does not depend on their results, because ranks that wait for each other in a forward must
    run equally many.
    """
    with untouched(proof_model.model), repeatable_training(proof_model.model):
        # A sample that is too long for any reference cannot be compared, so it is dropped before anything runs.
        reference = Reference(proof_model, samples)
        samples = reference.known(samples)
        with own_attention(proof_model.model):
            proof_model = with_cut_head(proof_model, words_of(samples[0], proof_model.is_ordinary, _WORDS_FOR_HEAD))
        experts = has_experts(proof_model.model)
        packs = _PackRuns(proof_model, samples, has_experts=experts)
        # Some kernels add in another order each time, which is noise. A cache or a random draw that stays on moves the
        # logits far more.
        repeated = worst(_moved(proof_model, samples, packs.packed))
        own, own_media, moves, moves_by_media = _changed(proof_model, samples, packs.packed)
        of_prefix = _with_other_prefixes(proof_model, samples, packs.packed)
        # In 16 bits rounding hides all but gross mistakes, so a few samples are compared in float32, too. If that
        # fails, an un-packed padded batch shows how much rounding other shapes alone cause.
        few = [samples[at] for at in packs.few]
        single, why_not, padded = None, "", Noise(0.0, 0.0)
        if rounds_coarsely(proof_model.model, packs.dtype):
            single, why_not = _in_float32(proof_model, few, has_experts=experts)
            padded = padded if single else packs.padded(samples)
        # Some mistakes show only in a full sequence: a buffer for few boundaries, a capacity of experts, a limit of
        # positions.
        kept = affordable(sequences, tokens_of_epoch)
        of_plan = [_against_known(proof_model, reference, sequence) for sequence in kept]
        looked_at = [one for one in of_plan if one is not None]
        return Measurements(
            proof_model=proof_model,
            samples=samples,
            alone=[ran.logits[0] for ran in packs.alone],
            dtype=packs.dtype,
            noise=packs.noise,
            own=own,
            own_media=own_media,
            repeated=repeated,
            moves=moves,
            moves_by_media=moves_by_media,
            of_prefix=of_prefix,
            compared=[*packs.against_alone(samples), *looked_at],
            gradient=packs.gradient,
            num_parameters=packs.num_parameters,
            sharded_by=sharded_by(proof_model.model),
            left_out=LeftOut(
                num_sequences=len(sequences) - len(looked_at),
                num_tokens=_tokens_in(sequences) - _tokens_in([one.samples for one in looked_at]),
                num_samples=sum(len(one.samples) - len(one.gaps) for one in looked_at),
            ),
            has_experts=experts,
            in_float32=single,
            not_in_float32=why_not,
            padded=padded,
        )


def affordable(sequences: Sequence[Sequence[Encoded]], tokens_of_epoch: int) -> list[Sequence[Encoded]]:
    """Choose sequences of the plan within the budget of tokens: the first in any case, then each that still fits.

    The budget counts tokens and not seconds, so that a busy machine compares as much as an idle one, and all ranks
    compare the same.
    """
    left = max(TOKENS_ALLOWED, SHARE_OF_EPOCH * tokens_of_epoch)
    kept: list[Sequence[Encoded]] = []
    for sequence in sequences:
        if not kept or _tokens_in([sequence]) <= left:
            kept.append(sequence)
            left -= _tokens_in([sequence])
    return kept


def _tokens_in(sequences: Sequence[Sequence[Encoded]]) -> int:
    return sum(length_of(sample) for sequence in sequences for sample in sequence)


def _against_known(proof_model: ProofModel, reference: Reference, sequence: Sequence[Encoded]) -> AgainstAlone | None:
    """Compare a sequence of the plan with its samples alone, if they have a reference; None if none of them has."""
    if not any(reference.is_for([sample]) for sample in sequence):
        return None
    alone = each_alone(proof_model, reference, sequence)
    return AgainstAlone.of(sequence, proof_model.run(sequence, packed=True), alone)


def _in_float32(
    proof_model: ProofModel, samples: Sequence[Encoded], *, has_experts: bool
) -> tuple[InFloat32 | None, str]:
    """Compare samples packed and alone in float32, on the model itself. Returns None and the reason if that fails."""
    model = proof_model.model
    if sharded_by(model):
        return None, "parameters are sharded"
    try:
        with gradients.small_set_in_float32(model) as (parameters, leaves):
            device = next(model.parameters()).device.type

            def forward_context() -> AbstractContextManager[None]:
                return in_float32(proof_model.forward_context(), device, leaves)

            again = replace(proof_model, forward_context=forward_context)
            alone = [run_alone(again, sample, parameters) for sample in samples]
            packed = again.run(samples, packed=True, parameters=parameters)
            off = gradients.difference(packed.gradient, gradients.added([ran.gradient for ran in alone]))
    except Exception as error:  # a kernel for 16 bits only, or too little memory: the packs may be right
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    largest = worst([float(ran.logits[0].abs().max()) for ran in alone])
    of_pack = AgainstAlone.of(samples, packed, alone)
    return InFloat32(again, of_pack, off, Limits.sharp(largest, has_experts=has_experts)), ""


class _PackRuns:
    """Run one pack and its samples alone: logits of all samples, gradients of those whose backward fits into memory."""

    def __init__(self, proof_model: ProofModel, samples: Sequence[Encoded], *, has_experts: bool) -> None:
        self.proof_model = proof_model
        limit = longest_for_own(proof_model.model, is_trained=True)
        by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
        # A backward keeps the attention weights of all layers, so it is limited to shorter samples than a forward.
        graded = [at for at in range(len(samples)) if length_of(samples[at]) <= limit] or by_length[:2]
        self.few = [at for at in _short_of_each_kind(samples) if at in graded]
        """Indices of a short sample of each kind."""
        with gradients.small_set(proof_model.model) as parameters:
            self.parameters = parameters
            self.alone, self.dtype = self._alone(samples, graded)
            with own_attention(proof_model.model):
                self.noise = self._noise(samples, self.few, num_draws=2 if has_experts else 1)
            short = [samples[at] for at in graded]
            together = proof_model.run(short, packed=True, parameters=parameters)
        self.packed = together if len(short) == len(samples) else proof_model.run(samples, packed=True)
        # Reversed, the pack has equal length but other boundaries, so a cache of boundaries by length gives wrong ones.
        self.turned = proof_model.run(samples[::-1], packed=True)
        added = gradients.added([self.alone[at].gradient for at in graded])
        self.gradient = gradients.difference(together.gradient, added)
        self.num_parameters = len(together.gradient)

    def against_alone(self, samples: Sequence[Encoded]) -> list[AgainstAlone]:
        """Compare the pack, and the pack in reverse order, with the samples alone."""
        return [
            AgainstAlone.of(samples, self.packed, self.alone),
            AgainstAlone.of(samples[::-1], self.turned, self.alone[::-1]),
        ]

    def padded(self, samples: Sequence[Encoded]) -> Noise:
        """Measure how far a few samples in the host's padded batch differ from alone, by the model's own attention."""
        few = [samples[at] for at in self.few]
        with gradients.small_set(self.proof_model.model) as parameters, own_attention(self.proof_model.model):
            try:
                batch = self.proof_model.run(few, packed=False, parameters=parameters)
            except RuntimeError as error:
                if is_of_collective(error):
                    raise
                return Noise(0.0, 0.0)  # the host cannot batch them: images of different sizes (Mistral 3)
        alone = [self.alone[at] for at in self.few]
        gaps = [gap_of(*pair).over_tokens for pair in zip(batch.logits, (ran.logits[0] for ran in alone), strict=True)]
        off = gradients.difference(batch.gradient, gradients.added([ran.gradient for ran in alone]))
        return Noise(worst(gaps), worst(list(off.values())))

    def _alone(self, samples: Sequence[Encoded], graded: Sequence[int]) -> tuple[list[RunResult], torch.dtype]:
        ran: list[RunResult] = []

        def run() -> None:
            for at, sample in enumerate(samples):
                ran.append(run_alone(self.proof_model, sample, self.parameters if at in graded else None))

        dtype = precision_of(self.proof_model.model, run)
        return ran, dtype

    def _noise(self, samples: Sequence[Encoded], chosen: Sequence[int], num_draws: int) -> Noise:
        """Measure what rounding does to the `chosen` samples alone.

        Takes the smallest gap over some draws of rounding, because a rare draw sends a token to another expert.
        """
        model, draws = self.proof_model.model, []
        for seed in range(num_draws):
            parameters = self.parameters if seed == 0 else None
            with rounded_otherwise(model, self.dtype, seed):
                draws.append(
                    [self.proof_model.run([samples[at]], packed=False, parameters=parameters) for at in chosen]
                )
        gaps = [
            min(gap_of(ran.logits[0], self.alone[at].logits[0]).over_tokens for ran in of_sample)
            for at, of_sample in zip(chosen, zip(*draws, strict=True), strict=True)
        ]
        off = gradients.added([ran.gradient for ran in draws[0]])
        right = gradients.added([self.alone[at].gradient for at in chosen])
        return Noise(worst(gaps), worst(list(gradients.difference(off, right).values())))


def _short_of_each_kind(samples: Sequence[Encoded]) -> list[int]:
    """Choose the two shortest samples, the shortest with each kind of media, and two branches of a prefix.

    With media, because a vision tower rounds, too.
    """
    by_length = sorted(range(len(samples)), key=lambda at: length_of(samples[at]))
    branches = next(iter(units_in(samples)), [])[:2]
    few = list(dict.fromkeys([*by_length[:2], *shortest_of_each_kind(samples)]))
    return sorted({*few, *branches}) if branches else few


def _changed(
    proof_model: ProofModel, samples: Sequence[Encoded], packed: RunResult
) -> tuple[list[float], dict[int, float], list[float], list[float]]:
    """Replace the tokens of every second sample, then of the others, then the media of one twin of each pair.

    Returns `own`, `own_media`, `moves` and `moves_by_media` of `Measurements`. The first twin's own move is limited to
    the difference between the twins: if they do not differ, an exchange of their media could not be seen.
    """
    # Change every second sample at once: two forwards then change all samples, and every sample has a changed
    # neighbour.
    own, moves = [0.0] * len(samples), []
    for parity in (0, 1):
        changed = [replaced(s, proof_model.is_ordinary) if at % 2 == parity else s for at, s in enumerate(samples)]
        for at, size in enumerate(_moved(proof_model, changed, packed)):
            if at % 2 == parity:
                own[at] = size
            else:
                moves.append(size)
    pairs = twins(samples)
    if not pairs:
        return own, {}, moves, []
    changed = list(samples)
    # Change one twin of each pair. If the other twin or a sample of text moves too, media reached the wrong tokens.
    for one, _ in pairs:
        changed[one] = with_other_media(samples[one], 2)
    again = proof_model.run(changed, packed=True)
    own_media = {
        one: min(_branch_moved(packed, again, one), gap_of(_branch(packed, one), _branch(packed, other)).most)
        for one, other in pairs
    }
    by_media = [size for at, size in enumerate(_sizes(packed, again)) if at not in own_media]
    return own, own_media, moves, by_media


def _with_other_prefixes(proof_model: ProofModel, samples: Sequence[Encoded], packed: RunResult) -> OtherPrefix:
    """Replace the tokens of every second prefix, then of the others: all branches must move, and nothing else."""
    own: dict[int, float] = {}
    moves: list[float] = []
    units = units_in(samples)
    for parity in (0, 1):
        changed, moving = list(samples), []
        for unit in units[parity::2]:
            others = with_other_prefix([samples[at] for at in unit], proof_model.is_ordinary)
            for at, other in zip(unit, others or [], strict=False):
                changed[at] = other
                moving.append(at)
        if moving:
            again = proof_model.run(changed, packed=True)
            own |= {at: _branch_moved(packed, again, at) for at in moving}
            moves += [size for at, size in enumerate(_sizes(packed, again)) if at not in moving]
    return OtherPrefix(own, moves)


def _moved(proof_model: ProofModel, changed: Sequence[Encoded], packed: RunResult) -> list[float]:
    return _sizes(packed, proof_model.run(changed, packed=True))


def _sizes(one: RunResult, other: RunResult) -> list[float]:
    return [gap_of(before, after).most for before, after in zip(one.logits, other.logits, strict=True)]


def _branch(ran: RunResult, at: int) -> torch.Tensor:
    """Return the logits of a sample without those of a prefix that it shares."""
    return ran.logits[at][ran.slots[at].num_prefix :]


def _branch_moved(one: RunResult, other: RunResult, at: int) -> float:
    return gap_of(_branch(one, at), _branch(other, at)).most
