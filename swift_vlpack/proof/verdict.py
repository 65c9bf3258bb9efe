"""Judge what a proof has measured: find its first failure, or write the line for the log that says what was compared.

The first half judges the proof before training (`measure`), the second half the one on the first batch (`in_training`).
All comparisons are written `not size <= limit` and not `size > limit`, so that NaN is a failure, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.in_training import Gradients, InTraining
from swift_vlpack.proof.limits import Limits, worst
from swift_vlpack.proof.measure import NOTHING_LEFT_OUT, InFloat32, LeftOut, Measurements
from swift_vlpack.proof.same_inputs import name_of
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.words import counted

_OF_PREFIX = "shared prefix"
_BLIND_BRANCH = "a branch does not see its prefix, and all of what its row has before it is in there"
NOISE_LIMIT, STEPS_OF_CHANCE = 0.1, 10
"""Sizes of noise on embeddings may differ by this share, plus this many standard deviations of their estimate."""


class Finding(NamedTuple):
    """A failure in words. It names its cause, or the sequence in which `explain` looks for the cause."""

    said: str
    cause: str = ""
    sequence: Sequence[Encoded] | None = None
    is_in_float32: bool = False
    """True if the failure was found in float32; then its cause is looked for in float32, too."""


# -- before training --------------------------------------------------------------------------------------------------


class Float32Gaps(NamedTuple):
    """Largest differences between packed and alone in float32."""

    alone: float
    gradient: float | None
    """Largest difference of a gradient, as in `Proof`; None if the backward would take too much memory."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The numbers of the proof before training, in units of the logits."""

    num_samples: int
    moved: float
    """Largest change of a logit when another sample of the pack changed."""
    alone: float
    """Largest difference between a logit in the pack and the same logit of the sample alone."""
    gradient: float | None
    """Largest difference of a gradient, as a share, over parts of the model; None if no rank has a whole gradient."""
    largest_logit: float
    num_more: int = 0
    """Number of samples that were compared in whole sequences."""
    others: str = "sequences of the plan"
    """Words for the log that say where those samples are."""
    num_branches: int = 0
    """Number of those samples, in the pack and in sequences, that share a prefix with others."""
    num_prefixes: int = 0
    """Number of prefixes that they share."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """Sequences and samples of the plan that were not compared."""
    limits: Limits | None = None
    """Largest differences that count as rounding on this model."""
    dtype: str = ""
    """Name of the data type that the model computes in."""
    in_float32: Float32Gaps | None = None
    """Differences in float32, for a model that computes in 16 bits; None if they were not measured."""
    not_in_float32: str = ""
    """Reason why a model in 16 bits could not be compared in float32; empty for other models."""
    sharded_by: str = ""
    """The engine that leaves each rank a part of the parameters; empty if each rank has them all."""
    num_parameters: int = 0
    """Number of parameters, norms and biases, whose gradients were compared."""

    @classmethod
    def of(cls, measured: Measurements) -> Proof:
        """Summarize the measurements, whether or not the proof holds."""
        gaps = [gap for compared in measured.compared for gap in compared.gaps]
        units = [unit for samples in (measured.samples, *_sequences(measured)) for unit in units_in(samples)]
        return cls(
            num_samples=len(measured.samples),
            moved=worst([*measured.moves, *measured.moves_by_media, *measured.of_prefix.moves]),
            alone=worst([gap.most for gap in gaps]),
            gradient=worst(list(measured.gradient.values())) if measured.gradient else None,
            largest_logit=measured.largest_logit,
            num_more=sum(len(compared.gaps) for compared in measured.of_plan),
            num_branches=sum(map(len, units)),
            num_prefixes=len(units),
            left_out=measured.left_out,
            limits=measured.limits,
            dtype=str(measured.dtype).removeprefix("torch."),
            in_float32=None if measured.in_float32 is None else _float32_gaps(measured.in_float32),
            not_in_float32=measured.not_in_float32,
            sharded_by=measured.sharded_by,
            num_parameters=measured.num_parameters,
        )

    @property
    def num_sequences_left_out(self) -> int:
        """Return how many sequences of the plan were not compared."""
        return self.left_out.num_sequences

    @property
    def is_sharp(self) -> bool:
        """Tell whether the limits were narrow enough that a mistake would have exceeded them."""
        return self.in_float32 is not None or self.limits is None or self.limits.would_notice(self.largest_logit)

    def line(self, attention: str) -> str:
        """Return the line for the log. It says "verified" only if the limits were narrow enough (`is_sharp`)."""
        over = f"max difference {self.moved} over {self.num_samples} samples, attention {attention}"
        if self.is_sharp:
            return f"isolation verified: {over} ({'; '.join(self._parts())})"
        return f"isolation: no sample sees another, {over}; the rest is not sharp ({'; '.join(self._parts())})"

    def _parts(self) -> Iterator[str]:
        """Yield the parts of the log line: what was compared, how far it differs, and what was left out."""
        of_logits, of_gradient = f"logits up to {self.largest_logit:.1f}", _within(self.gradient)
        if self.sharded_by and self.gradient is not None:
            of_gradient += f" (of {counted(self.num_parameters, 'whole parameter')} that {self.sharded_by} shards)"
        if self.in_float32 is not None:
            in_float32 = "not compared in float32, for memory"
            if self.in_float32.gradient is not None:
                in_float32 = _within(self.in_float32.gradient)
            yield (
                f"in float32 packed equals the model's own attention within {self.in_float32.alone:.1e} of "
                f"{of_logits}, gradients {in_float32}; in {self.dtype}, as it trains, within {self.alone:.1e}, "
                f"gradients {of_gradient}, which is rounding"
            )
        elif self.is_sharp:
            own = f"packed equals the model's own attention within {self.alone:.1e} of {of_logits}"
            yield f"{own}, gradients {of_gradient}"
        else:
            assert self.limits is not None
            yield (
                f"packed equals the model's own attention only up to the rounding of {self.dtype}: within "
                f"{self.alone:.1e} of {of_logits}, and {self.limits.alone:.1e} would pass; gradients {of_gradient}, "
                f"and {self.limits.gradient:.1e} would pass"
            )
            if self.not_in_float32:
                yield f"not compared in float32: {self.not_in_float32}"
        if self.num_more:
            in_dtype = f" in {self.dtype}" if self.in_float32 is not None else ""
            verb = "does" if self.num_more == 1 else "do"
            yield f"so {verb} {counted(self.num_more, 'sample')} in {self.others}{in_dtype}"
        if self.num_prefixes:
            are = counted(self.num_branches, "branch", "branches")
            yield f"{are} of {counted(self.num_prefixes, 'shared prefix', 'shared prefixes')} among them"
        if self.left_out.num_sequences:
            yield (
                f"{counted(self.left_out.num_sequences, 'long sequence')} of the plan left out, "
                f"{counted(self.left_out.num_tokens, 'token')}"
            )
        if self.left_out.num_samples:
            yield f"{counted(self.left_out.num_samples, 'sample')} too long for the model's own attention left out"


def _sequences(measured: Measurements) -> list[Sequence[Encoded]]:
    return [compared.samples for compared in measured.of_plan]


def _float32_gaps(measured: InFloat32) -> Float32Gaps:
    gradient = worst(list(measured.gradient.values())) if measured.gradient else None
    return Float32Gaps(worst([gap.most for gap in measured.compared.gaps]), gradient)


def _within(gradient: float | None) -> str:
    return "not compared, parameters are sharded" if gradient is None else f"within {gradient:.1e}"


def finding_in(measured: Measurements) -> Finding | None:
    """Return the first failure of the proof before training; None if it holds."""
    return next(_findings(measured), None)


def _findings(measured: Measurements) -> Iterator[Finding]:
    """Yield failures, the ones that explain others first."""
    limits, said = measured.limits, f"(largest logit {measured.largest_logit:.3g}, {measured.dtype})"
    if not all(bool(torch.isfinite(logits).all()) for logits in measured.alone):
        yield Finding(f"logits are nan or infinite {said}", "the model itself gives them, without packing, too")
    if targets := next(filter(None, (compared.targets for compared in measured.compared)), None):
        yield Finding(targets, "labels or loss weights of the sequence are not those of its samples")
    if tokens := next(filter(None, (compared.tokens for compared in measured.compared)), None):
        yield Finding("compared as whole numbers, which no rounding moves", tokens)
    # Inputs first: they are exact, they name the field, and in 16 bits exchanged grids hardly show in the logits.
    if (name := next(filter(None, (compared.inputs for compared in measured.compared)), None)) is not None:
        yield Finding(
            f"{name} of a sequence is not that of its samples, one after the other",
            "media are in the wrong order: images, videos or sounds of the sequence, or their grids, are exchanged",
        )
    if not measured.repeated <= limits.alone:
        yield Finding(
            f"the same sequence gave logits that differ by {measured.repeated:.3g} when it was run again {said}",
            _cause_of_repeated(measured),
        )
    in_turn = (("tokens", measured.moves), ("media", measured.moves_by_media), (_OF_PREFIX, measured.of_prefix.moves))
    for what, moves in in_turn:
        if not (moved := worst(moves)) <= limits.moved:
            yield Finding(
                f"samples of a pack see each other: replacing the {what} of one moved the logits of another by "
                f"{moved:.3g} {said}",
                sequence=measured.samples,
            )
    yield from _gaps_in_float32(measured)
    for number, compared in enumerate(measured.compared):
        if not all(map(limits.allow, compared.gaps)):
            turned = ", while a sequence before it, of the same samples in another order, is right"
            yield Finding(
                "a packed sample does not give what the model's own attention gives it alone: logits differ by "
                f"{worst([gap.most for gap in compared.gaps]):.3g}{turned if number == 1 else ''} "
                f"{said}{_or_rounding(measured)}",
                sequence=compared.samples,
            )
    yield from _blindness(measured, said)
    yield from _gradients(measured)


def _gaps_in_float32(measured: Measurements) -> Iterator[Finding]:
    """Yield a failure if logits differ in float32, where rounding cannot be the reason."""
    single = measured.in_float32
    if single is not None and not all(map(single.limits.allow, single.compared.gaps)):
        yield Finding(
            "a packed sample does not give what the model's own attention gives it alone, in float32 too: logits "
            f"differ by {worst([gap.most for gap in single.compared.gaps]):.3g} "
            f"(largest logit {measured.largest_logit:.3g})",
            sequence=single.compared.samples,
            is_in_float32=True,
        )


def _or_rounding(measured: Measurements) -> str:
    """Return a hint that a failure may be rounding if the model computes in 16 bits; empty for other models."""
    if torch.finfo(measured.dtype).bits > 16:
        return ""
    known = "in float32 they are equal" if measured.in_float32 else "it could not be repeated in float32"
    return f"; {known}, so it may be rounding: a proof in float32 tells (`vlpack verify` takes --torch_dtype float32)"


def _cause_of_repeated(measured: Measurements) -> str:
    """Name the cause if the same pack gave other logits in a second run.

    Only the first run of the pack was made with gradients. If just that run differs from the samples alone, the cause
    is in what gradients change.
    """
    with_gradients, without = (all(map(measured.limits.allow, compared.gaps)) for compared in measured.compared[:2])
    if without and not with_gradients:
        return (
            "where gradients are asked for, as in training, the sequence is computed by something else than without "
            "them (a kernel with a backward of its own), and that does not keep samples apart"
        )
    return (
        "something stays in the model from one forward to the next (a cache, a state), or it draws at random what no "
        "dropout rate of its own switches off"
    )


def _blindness(measured: Measurements, said: str) -> Iterator[Finding]:
    """Yield a failure if a sample's own logits ignore its tokens or media: such a model passes all other checks."""
    # The sample itself must move twice as far as a neighbour may, or "no neighbour moved" would prove nothing.
    least = 2 * measured.limits.moved
    blind = [at for at, moved in enumerate(measured.own) if not moved > least]
    if blind:
        name = name_of(measured.samples[blind[0]], blind[0])
        yield Finding(
            f"replacing the tokens of {name} did not move its own logits {said}",
            "the model does not look at its tokens, so nothing can be seen by changing them",
        )
    blind = [at for at, moved in measured.of_prefix.own.items() if not moved > least]
    if blind:
        name = name_of(measured.samples[blind[0]], blind[0])
        yield Finding(f"replacing the tokens of the prefix of {name} did not move its branch {said}", _BLIND_BRANCH)
    blind = [at for at, moved in measured.own_media.items() if not moved > least]
    if blind:
        name = name_of(measured.samples[blind[0]], blind[0])
        yield Finding(
            f"replacing or exchanging the media of {name} did not move its logits {said}",
            "media do not reach the model, so nobody can see whether they reach the right sample",
        )


def _gradients(measured: Measurements) -> Iterator[Finding]:
    # float32 comes first: a difference there cannot be rounding, so the message can be definite.
    compared = [(measured.gradient, measured.limits, _or_rounding(measured))]
    if measured.in_float32 is not None:
        compared = [(measured.in_float32.gradient, measured.in_float32.limits, ", in float32 too"), *compared]
    for gradient, limits, said in compared:
        for part, off in gradient.items():
            if not off <= limits.gradient:
                yield Finding(
                    f"the gradient of the {part} part is off by {off:.3g} of its length, while logits and labels are "
                    f"equal{said}",
                    "the backward of a pack is not that of its samples one by one: a function with a backward of its "
                    "own (the attention, a fused kernel), or something that is detached",
                )


# -- on the first batch -----------------------------------------------------------------------------------------------


def line_in_training(measured: InTraining) -> str:
    """Return the line for the log. It says "verified" only if the limits would have noticed a mistake."""
    what = f"{counted(measured.num_samples, 'sample')} of {measured.num_tokens} tokens"
    if measured.num_prefixes:
        branches = counted(measured.num_branches, "branch", "branches")
        what += f", {counted(measured.num_prefixes, 'prefix', 'prefixes')} with {branches}"
    drawn = "with all that is drawn at random" if measured.has_drawn else "nothing is drawn at random"
    again = ", layers run again in the backward" if measured.is_checkpointed else ""
    whole = ", which is what its samples are when they are encoded anew" if measured.is_encoded_again else ""
    seen = f"the first batch of the trainer ({what}, {drawn}{again})"
    parts = [
        f"isolation verified in training: {seen}{whole}"
        if measured.is_sharp
        else f"isolation in training: no sample sees another in {seen}{whole}"
    ]
    if measured.moved:
        of_changed = "" if measured.of_changed is None else f", gradients by {measured.of_changed.most:.1e}"
        parts.append(f"other neighbours move hidden states by {worst(measured.moved):.1e}{of_changed}")
    if measured.gaps:
        of_targets = f"(the loss of {counted(measured.num_targets, 'target')})"
        of_alone = "" if measured.of_alone is None else f", gradients within {measured.of_alone.most:.1e} {of_targets}"
        equal = "equals" if len(measured.gaps) == 1 else "equal"
        off = worst([gap.most for gap in measured.gaps])
        alone = f"{counted(len(measured.gaps), 'sample')} in it {equal} the model's own attention within {off:.1e}"
        parts.append(f"{alone} of hidden states up to {measured.largest:.1f}{of_alone}")
        if not measured.is_sharp:
            parts.append(
                f"that rests on the rounding of {measured.dtype}, for which {measured.limits.alone:.1e} would pass, "
                f"and of gradients {measured.limits.gradient:.1e}"
            )
    if measured.sharded_by and measured.num_parameters:
        number = counted(measured.num_parameters, "whole parameter")
        parts.append(f"the gradients of {number} that {measured.sharded_by} shards are among those compared")
    if measured.not_looked_at:
        parts.append(f"not looked at: {', '.join(measured.not_looked_at)}")
    return "; ".join(parts)


def finding_in_training(measured: InTraining) -> Finding | None:
    """Return the first failure of the proof on the first batch; None if it holds."""
    return next(_findings_in_training(measured), None)


def _findings_in_training(measured: InTraining) -> Iterator[Finding]:
    """Yield failures, the ones that explain others first."""
    limits, exact = measured.limits, measured.exact
    equal_alone = all(map(limits.allow, measured.gaps)) and (
        measured.of_alone is None or measured.of_alone.most <= limits.gradient
    )
    without = (
        " With nothing drawn, the samples are right." if measured.has_drawn and measured.gaps and equal_alone else ""
    )
    drawn = (
        "what is drawn at random mixes samples: a dropout, noise or kernel that training takes and a proof without "
        "draws does not see"
    )
    leak = drawn if without else "samples of the trainer's own sequence see each other"
    wrong = [size for size in measured.moved if not size <= exact.moved]
    of_prefix = [size for size in measured.of_prefix.moves if not size <= exact.moved]
    if of_prefix:
        said = f"another prefix moved hidden states of samples that do not share it by {worst(of_prefix):.3g}{without}"
        yield Finding(said, leak)
    if not all(size > 0 for size in measured.of_prefix.own.values()):
        yield Finding("another prefix did not move the hidden states of a branch", _BLIND_BRANCH)
    if wrong:
        said = f"other neighbours moved hidden states by {worst(wrong):.3g} of up to {measured.largest:.3g}{without}"
        yield Finding(said, leak)
    if measured.of_changed is not None:
        yield from _leaks_of_gradients(measured.of_changed, measured, drawn if without else "")
    for name, gap in zip(measured.names, measured.gaps, strict=False):
        if not limits.allow(gap):
            yield Finding(
                f"hidden states of {name} differ by {gap.most:.3g} of up to {measured.largest:.3g}, allowed is "
                f"{limits.token if limits.token < gap.most else limits.alone:.3g}",
                "a sample in the trainer's own sequence does not give what it gives alone",
            )
    if measured.of_alone is not None:
        yield from _gradients_not_of_samples(measured.of_alone, measured)
    for name, (size, chance) in zip(measured.names, measured.noise_sizes, strict=False):
        if not abs(size - 1) <= NOISE_LIMIT + STEPS_OF_CHANCE * chance:
            yield Finding(
                f"the noise of {name} is {size:.3g} times as large as alone",
                "noise on embeddings is scaled by the length of the sequence, not by that of the sample, or is "
                "otherwise not what the sample gets alone",
            )


def _leaks_of_gradients(changed: Gradients, measured: InTraining, drawn: str) -> Iterator[Finding]:
    """Yield failures of gradients that other neighbours changed, or that reach samples without a loss."""
    limit = measured.exact.gradient
    again = (
        "layers that are run again in the backward (gradient checkpointing) do something else than in the forward, "
        "such as without boundaries; or the backward of attention crosses them"
        if measured.is_checkpointed
        else "the backward of a sequence crosses the boundaries of its samples"
    )
    if not measured.beside <= limit:
        said = f"the loss of some samples has a gradient of {measured.beside:.3g} at tokens of others"
        yield Finding(said, drawn or again)
    if not changed.loss <= limit:
        said = f"other neighbours changed its gradient by {changed.loss:.3g} of its length"
        yield Finding(said, "the loss of a sample depends on the samples beside it")
    if not changed.inputs <= limit:
        said = f"other neighbours changed the gradient of samples by {changed.inputs:.3g} of its length"
        yield Finding(said, drawn or again)
    said = "other neighbours changed the gradient that samples give to"
    yield from _wrong_part(changed.parts, limit, said, drawn or again)


def _gradients_not_of_samples(alone: Gradients, measured: InTraining) -> Iterator[Finding]:
    """Yield failures of gradients that are not those of the samples alone."""
    limit = measured.limits.gradient
    backward = (
        "the backward of the trainer's own sequence is not that of its samples one by one: a function with a backward "
        "of its own, something that is detached, or a layer that is run again otherwise (gradient checkpointing)"
    )
    if not alone.loss <= limit:
        yield Finding(
            f"its gradient at the last layer differs by {alone.loss:.3g} of its length, allowed is {limit:.3g}",
            "the trainer's loss of a sequence is not that of its samples",
        )
    if not alone.inputs <= limit:
        said = f"the gradient differs by {alone.inputs:.3g} of its length, allowed is {limit:.3g}"
        yield Finding(said, backward)
    yield from _wrong_part(alone.parts, limit, f"allowed is {limit:.3g}, and there is another gradient of", backward)


def _wrong_part(parts: Mapping[str, float], limit: float, said: str, cause: str) -> Iterator[Finding]:
    wrong = {part: off for part, off in parts.items() if not off <= limit}
    if wrong:
        part = max(wrong, key=wrong.__getitem__)
        yield Finding(f"{said} parameters of the {part} part, by {wrong[part]:.3g} of its length", cause)
