"""Judge what was compared: find the first failure, or write the line for the log that says what was compared.

All comparisons are written `not size <= limit` and not `size > limit`, so that NaN is a failure, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.compare import Compared, worst
from swift_vlpack.proof.gradients import is_checkpointed
from swift_vlpack.proof.shards import sharded_by
from swift_vlpack.words import counted

TIMES_ROUNDING = 8
"""Factor from the rounding that was measured on this model to the limit: right sequences differ by 0.5 to 2 times."""
NOISE_LIMIT, STEPS_OF_CHANCE = 0.1, 10
"""Sizes of noise on embeddings may differ by this share, plus this many standard deviations of their estimate."""


class Limits(NamedTuple):
    """Largest differences that count as equal: of hidden states, as a share of the largest, and of gradients."""

    states: float
    gradient: float

    @classmethod
    def of_rounding(cls, states: float, gradient: float | None) -> Limits:
        """Return the limits in the data type that a model trains in, from what rounding does to it there."""
        of_gradient = COARSE.gradient if gradient is None else TIMES_ROUNDING * max(gradient, SHARP.gradient)
        return cls(TIMES_ROUNDING * max(states, SHARP.states), of_gradient)


SHARP = Limits(1e-3, 1e-3)
"""Limits in float32: right models differ by 1e-6, mistakes by 5e-2 and more."""
COARSE = Limits(5e-2, 0.3)
"""Limits in 16 bits where rounding cannot be measured, because nothing can be run in float32."""


class Finding(NamedTuple):
    """A failure in words, with its cause if it names one."""

    said: str
    cause: str = ""
    compared: Compared | None = None
    """Comparison that `explain` examines if the cause is empty; None if there is nothing to examine."""


class Judged(NamedTuple):
    """A comparison, and the limits that it has to keep."""

    compared: Compared
    limits: Limits
    what: str
    """Words for the log: what was compared."""
    is_float32: bool = True
    """True if it was computed in float32."""


# -- failures ---------------------------------------------------------------------------------------------------------


def first_finding(judged: Sequence[Judged]) -> Finding | None:
    """Return the first failure; None if all holds. Inputs come first: they are exact, and they name the field."""
    for findings in (_of_numbers, _of_inputs, _of_swaps, _of_media, _of_samples, _of_gradients, _of_noise):
        for one in judged:
            if (finding := next(findings(one), None)) is not None:
                return finding
    return None


def _of_numbers(one: Judged) -> Iterator[Finding]:
    gaps = one.compared.gaps.values()
    if not all(map(torch.isfinite, torch.tensor([one.compared.largest, *(gap.most for gap in gaps)]))):
        yield Finding(f"hidden states of {one.what} are nan or infinite{_dtype(one)}", "the model itself gives them")


def _of_inputs(one: Judged) -> Iterator[Finding]:
    if one.compared.wrong is not None:
        yield Finding(f"{one.what}: {one.compared.wrong.said}", one.compared.wrong.cause)


def _of_media(one: Judged) -> Iterator[Finding]:
    if one.compared.drops_media:
        yield Finding(
            f"{one.what}: samples have images, videos or sounds, and their batch has none",
            "media do not reach the model: the collator drops them",
        )


def _of_swaps(one: Judged) -> Iterator[Finding]:
    swapped, compared = one.compared.swapped, one.compared
    if swapped is None:
        return
    exact = exact_limits(compared)
    if not compared.size(swapped.repeated) <= one.limits.states:
        yield Finding(
            f"{one.what}: the same sequence gave other hidden states when it was run again, by "
            f"{swapped.repeated.most:.3g} of the largest",
            "something stays in the model from one forward to the next (a cache, a state), or it draws at random what "
            "no dropout rate of its own switches off",
        )
    without = " With nothing drawn, the samples are right." if compared.has_drawn and _is_right(one) else ""
    if not compared.moved <= exact.states:
        yield Finding(
            f"{one.what}: samples see each other: replacing some moved the hidden states of others by "
            f"{compared.moved:.3g} of the largest{_dtype(one)}.{without}",
            _DRAWN if without else "",
            compared,
        )
    if swapped.blind:
        yield Finding(
            f"{one.what}: replacing the prefix of {compared.name(swapped.blind[0])} did not move its branch",
            "a branch does not see its prefix, and all of what its row has before it is in there",
        )
    if not swapped.num_changed and not compared.has_experts and swapped.moved:
        yield Finding(
            f"{one.what}: replacing the tokens of samples did not move their own hidden states",
            "the model does not look at its tokens, so nothing can be seen by changing them",
        )
    changed = swapped.of_changed
    if changed is None:
        return
    if not swapped.beside_states <= exact.gradient:
        said = f"the loss of some samples has a gradient of {swapped.beside_states:.3g} at hidden states of others"
        yield Finding(
            f"{one.what}: {said}",
            "the trainer's loss takes hidden states of other samples: targets or logits are shifted (logits_to_keep)",
        )
    again = _AGAIN if is_checkpointed(compared.runner.model) else "the backward of a sample crosses its boundaries"
    if not swapped.beside <= exact.gradient:
        said = f"the loss of some samples has a gradient of {swapped.beside:.3g} at tokens of others"
        yield Finding(f"{one.what}: {said}", _DRAWN if without else again)
    if not changed.loss <= exact.gradient:
        said = f"other neighbours changed its gradient by {changed.loss:.3g} of its length"
        yield Finding(f"{one.what}: {said}", "the loss of a sample depends on the samples beside it")
    for part, off in {"tokens": changed.inputs, **changed.parts}.items():
        if not off <= exact.gradient:
            said = f"other neighbours changed the gradient that samples give to {_named(part)} by {off:.3g}"
            yield Finding(f"{one.what}: {said} of its length.{without}", _DRAWN if without else again)


_DRAWN = (
    "what is drawn at random mixes samples: a dropout, noise or kernel that training takes and a proof without draws "
    "does not see"
)
_AGAIN = (
    "layers that are run again in the backward (gradient checkpointing) do something else than in the forward, such as "
    "without boundaries; or the backward of attention crosses them"
)


def _is_right(one: Judged) -> bool:
    return bool(one.compared.gaps) and not any((*_of_samples(one), *_of_gradients(one)))


def _of_samples(one: Judged) -> Iterator[Finding]:
    compared = one.compared
    for at, gap in compared.gaps.items():
        if not compared.size(gap) <= one.limits.states:
            yield Finding(
                f"{one.what}: {compared.name(at)} does not give what the model's own attention gives it alone: hidden "
                f"states differ by {compared.size(gap):.3g} of the largest, allowed is "
                f"{one.limits.states:.3g}{_dtype(one)}",
                "",
                compared,
            )


def _of_gradients(one: Judged) -> Iterator[Finding]:
    alone, limit = one.compared.of_alone, one.limits.gradient
    if alone is None:
        return
    if not alone.loss <= limit:
        yield Finding(
            f"{one.what}: the gradient at the last layer differs by {alone.loss:.3g} of its length, allowed is "
            f"{limit:.3g}{_dtype(one)}",
            "the trainer's loss of a sequence is not that of its samples",
        )
    for part, off in {**alone.parts, "tokens": alone.inputs}.items():
        if not off <= limit:
            yield Finding(
                f"{one.what}: the gradient of {_named(part)} is off by {off:.3g} of its length, allowed is "
                f"{limit:.3g}{_dtype(one)}",
                _CAUSE_OF_PART.get(part, _BACKWARD),
            )


_BACKWARD = (
    "the backward of a sequence is not that of its samples one by one: a function with a backward of its own (the "
    "attention, a fused kernel), something that is detached, or a layer that is run again otherwise (gradient "
    "checkpointing)"
)
_CAUSE_OF_PART = {
    "head": "the head, or a loss that is fused with it, does not learn from all of a sequence",
    "embeddings": "the backward of the embeddings does not add up the gradients of all tokens of a sequence",
}


def _of_noise(one: Judged) -> Iterator[Finding]:
    for at, (size, chance) in one.compared.noise_sizes.items():
        if not abs(size - 1) <= NOISE_LIMIT + STEPS_OF_CHANCE * chance:
            yield Finding(
                f"{one.what}: the noise of {one.compared.name(at)} is {size:.3g} times as large as alone",
                "noise on embeddings is scaled by the length of the sequence, not by that of the sample, or is "
                "otherwise not what the sample gets alone",
            )


def exact_limits(compared: Compared) -> Limits:
    """Return the limits of what the same kernels compute from the same numbers: as much as when they are run again."""
    swapped, eps = compared.swapped, torch.finfo(compared.dtype).eps
    repeated = 0.0 if swapped is None else 2 * compared.size(swapped.repeated)
    if compared.has_experts:  # other neighbours may round a token differently, and send it to another expert
        return Limits(max(repeated, COARSE.states if eps > _EPS_OF_FLOAT32 else SHARP.states), COARSE.gradient)
    return Limits(max(repeated, eps, _EXACT.states), max(_EXACT.gradient, 4 * eps))


_EXACT, _EPS_OF_FLOAT32 = Limits(1e-5, 1e-4), 1e-5


def _named(part: str) -> str:
    return part if part in ("tokens", *_CAUSE_OF_PART) else f"parameters of the {part} part"


def _dtype(one: Judged) -> str:
    return f" ({'float32' if one.is_float32 else dtype_name(one.compared.dtype)})"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a data type."""
    return str(dtype).removeprefix("torch.")


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
        compared = [one.compared.of_alone for one in self.judged if one.is_float32 == in_float32]
        found = [one.most for one in compared if one is not None]
        return worst(found) if found else None

    @property
    def is_coarse(self) -> bool:
        """Tell whether the model trains in another data type than float32."""
        return not all(one.is_float32 for one in self.judged)

    @property
    def is_sharp(self) -> bool:
        """Tell whether something was compared with samples alone within limits that a mistake would exceed."""
        return any(one.compared.gaps and one.limits.states < _NOTICED for one in self.judged)

    def line(self, attention: str) -> str:
        """Return the line for the log."""
        over = f"max difference {self.moved} over {counted(self.num_samples, 'sample')}, attention {attention}"
        begin = "isolation verified:" if self.is_sharp else "isolation: no sample sees another,"
        parts = [self._equal(in_float32=True), self._equal(in_float32=False)]
        # Each sequence once: not as it is turned round, and not in float32 again.
        own = [one for one in self.judged if one.is_float32 != self.is_coarse]
        once = [one.compared for one in own if one.what != SHORT or one.compared.swapped is not None]
        if units := [unit for compared in once for unit in units_in(compared.samples)]:
            branches = counted(sum(map(len, units)), "branch", "branches")
            parts.append(f"{branches} of {counted(len(units), 'shared prefix', 'shared prefixes')} among them")
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
        dtype = "" if not self.is_coarse else "in float32 " if in_float32 else "in " + _as_trained(judged[0])
        said = f"{dtype}packed equals the model's own attention within {self.off(in_float32=in_float32):.1e} of the "
        said += "largest hidden state"
        gradient, limits = self.gradient(in_float32=in_float32), judged[0].limits
        if gradient is not None:
            said += f", gradients within {gradient:.1e}{_of_shards(judged)}"
        if not in_float32:
            said += f", and {limits.states:.1e} and {limits.gradient:.1e} would be refused"
        more = sum(len(one.compared.gaps) for one in judged if one.what != SHORT)
        what = next((one.what for one in judged if one.what != SHORT), "")
        return f"{said}; so {'does' if more == 1 else 'do'} {counted(more, 'sample')} in {what}" if more else said


SHORT = "short samples"
"""The words for the pack of short samples."""
_NOTICED = 1.0
"""Widest limit under which a proof may say "verified"."""


def _as_trained(one: Judged) -> str:
    return f"{dtype_name(one.compared.dtype)}, as it trains, "


def _of_shards(judged: Sequence[Judged]) -> str:
    engine = sharded_by(judged[0].compared.runner.model)
    number = max(one.compared.num_parameters for one in judged)
    return f" (of {counted(number, 'whole parameter')} that {engine} shards)" if engine else ""


def line_in_training(proof: Proof, where: str, *, is_encoded_again: bool, not_looked_at: Sequence[str]) -> str:
    """Return the line for the log on the trainer's own batches."""
    (one, *_), again = proof.judged, ", which is what its samples are when they are encoded anew"
    compared = one.compared
    what = f"{counted(len(compared.samples), 'sample')} of {counted(compared.num_tokens, 'token')}"
    if units := units_in(compared.samples):
        branches = counted(sum(map(len, units)), "branch", "branches")
        what += f", {counted(len(units), 'prefix', 'prefixes')} with {branches}"
    drawn = "with all that is drawn at random" if compared.has_drawn else "nothing is drawn at random"
    run_again = ", layers run again in the backward" if is_checkpointed(compared.runner.model) else ""
    begin = "isolation verified in training:" if proof.is_sharp else "isolation in training: no sample sees another in"
    parts = [f"{begin} {where} ({what}, {drawn}{run_again}){again if is_encoded_again else ''}"]
    if compared.swapped is not None and compared.swapped.moved:
        changed = compared.swapped.of_changed
        of_changed = "" if changed is None else f", gradients by {max(changed.most, compared.swapped.beside):.1e}"
        parts.append(f"other neighbours move hidden states by {compared.moved:.1e}{of_changed}")
    if compared.gaps:
        of_alone = "" if compared.of_alone is None else f", gradients within {compared.of_alone.most:.1e}"
        equal = "equals" if len(compared.gaps) == 1 else "equal"
        said = f"{counted(len(compared.gaps), 'sample')} in it {equal} the model's own attention within "
        said += f"{compared.off:.1e} of the largest hidden state{of_alone}"
        if not one.is_float32:
            refused = f"{one.limits.states:.1e} and {one.limits.gradient:.1e}"
            said += f" (in {dtype_name(compared.dtype)}; {refused} would be refused)"
        parts.append(said)
    if (engine := sharded_by(compared.runner.model)) and compared.num_parameters:
        number = counted(compared.num_parameters, "whole parameter")
        parts.append(f"the gradients of {number} that {engine} shards are among those compared")
    if not_looked_at:
        parts.append(f"not looked at: {', '.join(not_looked_at)}")
    return "; ".join(parts)
