"""Judge what was compared: find the first failure, or write the line for the log that says what was compared.

All comparisons are written `not size <= limit` and not `size > limit`, so that NaN is a failure, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch

from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.compare import LAST_LAYER, TOKENS, Compared, worst
from swift_vlpack.proof.gradients import is_checkpointed
from swift_vlpack.proof.shards import sharded_by
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.words import counted

TIMES_ROUNDING = 8
"""Factor from the rounding that was measured on this model to the limit: right sequences differ by 0.5 to 2 times."""
NOISE_LIMIT, STEPS_OF_CHANCE = 0.1, 10
"""Sizes of noise on embeddings may differ by this share, plus this many standard deviations of their estimate."""
SHORT = "short samples"
"""The words for the pack of short samples."""


class Limits(NamedTuple):
    """Largest differences that count as equal: of hidden states, as a share of the largest, and of gradients."""

    states: float
    gradient: float

    @classmethod
    def of_rounding(cls, states: float, gradient: float | None) -> Limits:
        """Return the limits in the data type that a model trains in, from what rounding does to it there."""
        of_gradient = COARSE.gradient if gradient is None else TIMES_ROUNDING * max(gradient, SHARP.gradient)
        return cls(TIMES_ROUNDING * max(states, SHARP.states), of_gradient)

    def __str__(self) -> str:
        measured = ", a fixed limit: rounding was not measured" if self == COARSE else ""
        return f"{self.states:.1e} and {self.gradient:.1e} would be refused{measured}"


SHARP = Limits(1e-3, 1e-3)
"""Limits in float32: right models differ by 1e-6, mistakes by 5e-2 and more."""
COARSE = Limits(5e-2, 0.3)
"""Limits in 16 bits where rounding cannot be measured, because nothing can be run in float32."""
_EXACT, _EPS_OF_FLOAT32 = Limits(1e-5, 1e-4), 1e-5


class Judged(NamedTuple):
    """A comparison, and the limits that it has to keep."""

    compared: Compared
    limits: Limits
    what: str
    """Words for the log: what was compared."""
    is_float32: bool = True
    """True if it was computed in float32."""

    @property
    def dtype(self) -> str:
        """Return the short name of the data type."""
        return "float32" if self.is_float32 else str(self.compared.dtype).removeprefix("torch.")


class Finding(NamedTuple):
    """A failure in words, with its cause if it names one."""

    said: str
    cause: str = ""
    judged: Judged | None = None
    """Comparison that `explain` examines for the cause."""


# -- failures ---------------------------------------------------------------------------------------------------------


def first_finding(judged: Sequence[Judged]) -> Finding | None:
    """Return the first failure; None if all holds. Inputs come first: they are exact, and they name the field."""
    found = (
        finding._replace(said=f"{one.what}: {finding.said}")
        for findings in (_of_inputs, _of_swaps, _of_samples, _of_gradients)
        for one in judged
        for finding in findings(one)
    )
    return next(found, None)


def _of_inputs(one: Judged) -> Iterator[Finding]:
    if not all(map(isfinite, [one.compared.largest, *(gap.most for gap in one.compared.gaps.values())])):
        yield Finding(f"hidden states are nan or infinite ({one.dtype})", "the model itself gives them")
    if one.compared.wrong is not None:
        yield Finding("compared as whole numbers, which no rounding moves", one.compared.wrong)


def _of_swaps(one: Judged) -> Iterator[Finding]:
    swapped, compared, exact = one.compared.swapped, one.compared, exact_limits(one.compared)
    if swapped is None:
        return
    if not compared.size(swapped.repeated) <= one.limits.states:
        said = f"the same sequence gave other hidden states when it was run again, by {swapped.repeated.most:.3g}"
        yield Finding(said, _STAYS)
    is_right = bool(compared.gaps) and not any((*_of_samples(one), *_of_gradients(one)))
    drawn, without = (
        (_DRAWN, " With nothing drawn, the samples are right.") if compared.has_drawn and is_right else ("", "")
    )
    if not compared.moved <= exact.states:
        said = f"samples see each other: replacing some moved the hidden states of others by {compared.moved:.3g}"
        yield Finding(f"{said} of the largest ({one.dtype}).{without}", drawn, None if drawn else one)
    if not swapped.num_changed and not compared.has_experts and swapped.moved:
        yield Finding("replacing the tokens of samples did not move their own hidden states", _IGNORED)
    again = drawn or (_AGAIN if is_checkpointed(compared.runner.model) else _CROSSES)
    for what, off in (swapped.of_changed or {}).items():
        if not off <= exact.gradient:
            said = f"other neighbours changed the gradient that samples give to {_named(what)} by {off:.3g}"
            yield Finding(f"{said} of its length.{without}", _OTHER_LOSS if what == LAST_LAYER else again)


def _of_samples(one: Judged) -> Iterator[Finding]:
    compared = one.compared
    for at, gap in compared.gaps.items():
        if not compared.size(gap) <= one.limits.states:
            said = f"{compared.name(at)} does not give what the model's own attention gives it alone: hidden states"
            off = f"differ by {compared.size(gap):.3g} of the largest, allowed is {one.limits.states:.3g}"
            yield Finding(f"{said} {off} ({one.dtype})", "", one)


def _of_gradients(one: Judged) -> Iterator[Finding]:
    for what, off in (one.compared.of_alone or {}).items():
        if not off <= one.limits.gradient:
            allowed = f"of its length, allowed is {one.limits.gradient:.3g} ({one.dtype})"
            yield Finding(f"the gradient of {_named(what)} is off by {off:.3g} {allowed}", _CAUSES.get(what, _BACKWARD))
    if one.compared.swapped is not None and (blind := one.compared.swapped.blind):
        yield Finding(f"no gradient of {one.compared.name(blind[0])} reaches its prefix", _BLIND)
    for at, (size, chance) in one.compared.noise_sizes.items():
        if not abs(size - 1) <= NOISE_LIMIT + STEPS_OF_CHANCE * chance:
            yield Finding(f"the noise of {one.compared.name(at)} is {size:.3g} times as large as alone", _NOISE)


def exact_limits(compared: Compared) -> Limits:
    """Return the limits of what the same kernels compute from the same numbers: as much as when they are run again."""
    swapped, eps = compared.swapped, torch.finfo(compared.dtype).eps
    repeated = 0.0 if swapped is None else 2 * compared.size(swapped.repeated)
    if compared.has_experts:  # other neighbours may round a token differently, and send it to another expert
        return Limits(max(repeated, COARSE.states if eps > _EPS_OF_FLOAT32 else SHARP.states), COARSE.gradient)
    return Limits(max(repeated, eps, _EXACT.states), max(_EXACT.gradient, 4 * eps))


def _named(part: str) -> str:
    return part if part in (TOKENS, *_CAUSES) else f"parameters of the {part} part"


_STAYS = (
    "something stays in the model from one forward to the next (a cache, a state), or it draws at random what no "
    "dropout rate of its own switches off"
)
_BLIND = "a branch does not see its prefix, and all of what its row has before it is in there"
_IGNORED = "the model does not look at its tokens, so nothing can be seen by changing them"
_DRAWN = (
    "what is drawn at random mixes samples: a dropout, noise or kernel that training takes and a proof without draws "
    "does not see"
)
_OTHER_LOSS = (
    "the trainer's loss of a sample depends on other samples: targets or logits are shifted (logits_to_keep), or a "
    "weight is not its own"
)
_CROSSES = "the backward of attention crosses the boundaries of samples"
_AGAIN = (
    "layers that are run again in the backward (gradient checkpointing) do something else than in the forward, such as "
    "without boundaries; or the backward of attention crosses them"
)
_BACKWARD = (
    "the backward of a sequence is not that of its samples one by one: a function with a backward of its own (the "
    "attention, a fused kernel), something that is detached, or a layer that is run again otherwise (gradient "
    "checkpointing)"
)
_CAUSES = {
    LAST_LAYER: "the trainer's loss of a sequence is not that of its samples",
    "head": "the head, or a loss that is fused with it, does not learn from all of a sequence",
    "embeddings": "the backward of the embeddings does not add up the gradients of all tokens of a sequence",
}
_NOISE = "noise on embeddings is not what the sample gets alone: it is scaled by the length of the sequence"


# -- the line ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proof:
    """All that a proof has compared, and what it has not."""

    judged: Sequence[Judged]
    limits: Limits
    """Largest differences that count as equal in the data type that the model trains in."""
    left_out: Sequence[str] = ()
    """Names of what was not compared."""

    def finding(self) -> Finding | None:
        """Return the first failure; None if the proof holds."""
        return first_finding(self.judged)

    @property
    def moved(self) -> float:
        """Return the largest change of a sample when others were replaced."""
        return worst([one.compared.moved for one in self.judged])

    @property
    def num_samples(self) -> int:
        """Return the number of samples in the sequence in which samples were replaced."""
        return max(len(one.compared.samples) for one in self.judged if one.compared.swapped or len(self.judged) == 1)

    def off(self, *, in_float32: bool) -> float:
        """Return the largest difference of hidden states between packed and alone, in float32 or as it trains."""
        return worst([one.compared.off for one in self.judged if one.is_float32 == in_float32])

    def gradient(self, *, in_float32: bool) -> float | None:
        """Return the largest difference of gradients; None if none were compared."""
        judged = [one for one in self.judged if one.is_float32 == in_float32]
        found = [off for one in judged for off in (one.compared.of_alone or {}).values()]
        return worst(found) if found else None

    @property
    def is_coarse(self) -> bool:
        """Tell whether the model trains in another data type than float32."""
        return not all(one.is_float32 for one in self.judged)

    @property
    def is_sharp(self) -> bool:
        """Tell whether something was compared with samples alone within limits that a mistake would exceed."""
        return any(one.compared.gaps and one.limits.states < 1 for one in self.judged)

    def line(self, attention: str) -> str:
        """Return the line for the log."""
        over = f"max difference {self.moved} over {counted(self.num_samples, 'sample')}, attention {attention}"
        begin = "isolation verified:" if self.is_sharp else "isolation: no sample sees another,"
        of_types = [self._equal(in_float32=is_float32) for is_float32 in (True, False)]
        # Each sequence once: not as it is turned round, and not in float32 again.
        own = [one for one in self.judged if one.is_float32 != self.is_coarse]
        once = [one.compared for one in own if one.what != SHORT or one.compared.swapped is not None]
        parts = [*of_types, _branches([one.samples for one in once])]
        if rerouted := sum(gap.num_rerouted for one in self.judged for gap in one.compared.gaps.values()):
            parts.append(f"{counted(rerouted, 'token')} that took other experts left out")
        if self.left_out:
            parts.append(f"not compared: {', '.join(self.left_out)}")
        return f"{begin} {over} ({'; '.join(filter(None, parts))})"

    def _equal(self, *, in_float32: bool) -> str:
        """Say what was compared in one data type, and how far apart it is."""
        judged = [one for one in self.judged if one.is_float32 == in_float32 and one.compared.gaps]
        if not judged:
            return ""
        of_plan = [one for one in judged if one.what != SHORT]
        more = sum(len(one.compared.gaps) for one in of_plan)
        also = f"; so {'does' if more == 1 else 'do'} {counted(more, 'sample')} in {of_plan[0].what}" if of_plan else ""
        dtype = f"in {judged[0].dtype}{'' if in_float32 else ', as it trains,'} " if self.is_coarse else ""
        return f"{dtype}packed equals {_within(judged)}{also}"


def _within(judged: Sequence[Judged]) -> str:
    """Say how far these are from the model's own attention, of which gradients, and how far they may be."""
    found = [off for one in judged for off in (one.compared.of_alone or {}).values()]
    off, engine = worst([one.compared.off for one in judged]), sharded_by(judged[0].compared.runner.model)
    number = counted(max(one.compared.num_parameters for one in judged), "whole parameter")
    of_shards = f" (of {number} that {engine} shards)" if engine else ""
    gradient = f", gradients within {worst(found):.1e}{of_shards}" if found else ""
    limits = "" if judged[0].is_float32 else f", and {judged[0].limits}"
    return f"the model's own attention within {off:.1e} of the largest hidden state{gradient}{limits}"


def _branches(sequences: Sequence[Sequence[Encoded]]) -> str:
    units = [unit for samples in sequences for unit in units_in(samples)]
    if not units:
        return ""
    prefixes = counted(len(units), "shared prefix", "shared prefixes")
    return f"{counted(sum(map(len, units)), 'branch', 'branches')} of {prefixes} among them"


def line_in_training(proof: Proof, where: str, *, is_encoded_again: bool, not_looked_at: Sequence[str]) -> str:
    """Return the line for the log on the trainer's own batches."""
    (one,) = proof.judged
    compared, model = one.compared, one.compared.runner.model
    what = f"{counted(len(compared.samples), 'sample')} of {counted(compared.num_tokens, 'token')}"
    drawn = "with all that is drawn at random" if compared.has_drawn else "nothing is drawn at random"
    looked_at = [what, _branches([compared.samples]), drawn]
    looked_at += ["layers run again in the backward"] if is_checkpointed(model) else []
    begin = "isolation verified in training:" if proof.is_sharp else "isolation in training: no sample sees another in"
    again = ", which is what its samples are when they are encoded anew" if is_encoded_again else ""
    parts = [f"{begin} {where} ({', '.join(filter(None, looked_at))}){again}"]
    if (swapped := compared.swapped) is not None and swapped.moved:
        changed = "" if swapped.of_changed is None else f", gradients by {worst([*swapped.of_changed.values()]):.1e}"
        parts.append(f"other neighbours move hidden states by {compared.moved:.1e}{changed}")
    if compared.gaps:
        equal = "equals" if len(compared.gaps) == 1 else "equal"
        dtype = "" if one.is_float32 else f"in {one.dtype} "
        parts.append(f"{dtype}{counted(len(compared.gaps), 'sample')} in it {equal} {_within([one])}")
    if not_looked_at:
        parts.append(f"not looked at: {', '.join(not_looked_at)}")
    return "; ".join(parts)
