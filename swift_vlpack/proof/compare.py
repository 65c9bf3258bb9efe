"""Compare a packed sequence with its samples: the one measurement of both proofs.

(a) Inputs are compared exactly, first, and named by field (`same_inputs`).
(b) Replace the tokens and media of every second sample, then of the others: no other sample may move, neither in its
    hidden states nor, where only some samples are learnt, in the gradient of their loss. Kernels and numbers are the
    same, so this is exact, in 16 bits too. Nobody may move by more than the same sequence run twice.
(c) Run each sample alone by the model's own attention: its hidden states must be equal, up to rounding.
(d) Gradients of the sequence must be the sum of those of the samples alone, up to rounding.
(e) Noise drawn for embeddings must be as large as it is for each sample alone.

A difference of hidden states is a share of the largest, a difference of gradients a share of their length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from swift_vlpack.proof import gradients
from swift_vlpack.proof.experts import has_experts
from swift_vlpack.proof.gradients import Parameters, is_checkpointed
from swift_vlpack.proof.perturb import with_other_content
from swift_vlpack.proof.reference import own_attention, reference_for, repeatable_training
from swift_vlpack.proof.runner import Collated, Ran, Runner, length_of
from swift_vlpack.proof.same_inputs import name_of, wrong_inputs
from swift_vlpack.proof.shards import is_sharded
from swift_vlpack.rows.samples import Encoded

_MOST_REROUTED = 0.5
"""Share of a sample's tokens that may be left out because other experts computed them."""
Facts = tuple[bool, int]
Agree = Callable[[Facts], Sequence[Facts]]


class Gap(NamedTuple):
    """Difference between two computations of a sample's hidden states, as a share of the largest."""

    most: float
    over_tokens: float
    """The root of the mean square over tokens."""
    num_rerouted: int = 0
    """Tokens that another expert computed; they are left out."""


Gradients = Mapping[str, float]
"""Differences between two computations of the same gradients, as shares of their length, by what they are of:
`LAST_LAYER`, `TOKENS`, and parts of the model."""
LAST_LAYER, TOKENS = "hidden states", "tokens"


@dataclass(frozen=True, slots=True)
class Swapped:
    """Changes of samples when others were replaced."""

    moved: Mapping[int, Gap]
    """Moves of the samples that were not replaced."""
    blind: Sequence[int]
    """Watched branches of whose loss no gradient reaches their prefix."""
    num_changed: int
    """Samples that were replaced, and moved themselves."""
    repeated: Gap
    """Change when the same sequence was run again; measured only if something moved."""
    of_changed: Gradients | None
    """Changes of gradients; None if nothing has a loss of its own."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Measurements of one sequence."""

    runner: Runner
    samples: Sequence[Encoded]
    watched: Sequence[int]
    """The samples that were run alone."""
    has_experts: bool
    largest: float
    """Largest hidden state."""
    dtype: torch.dtype
    wrong: str | None
    """The first mistake in its inputs."""
    swapped: Swapped | None
    gaps: Mapping[int, Gap]
    of_alone: Gradients | None
    noise_sizes: Mapping[int, tuple[float, float]]
    """Size of the noise drawn for each watched sample's embeddings, relative to the sample alone, and how much chance
    moves it: one standard deviation of the estimate."""
    has_drawn: bool
    num_parameters: int
    num_tokens: int
    seconds: float
    """Time that all of this took."""
    alone: Mapping[int, Ran] = field(default_factory=dict)
    """Results of the samples alone, by the `id` of the sample; kept on request."""

    @property
    def num_without(self) -> int:
        """Return the number of samples too long for the model's own attention."""
        return len(self.watched) - len(self.gaps)

    def size(self, gap: Gap) -> float:
        """Return what a limit is for: the worst token; with experts the mean, because a route moves single tokens."""
        return gap.over_tokens if self.has_experts else gap.most

    @property
    def off(self) -> float:
        """Return the largest difference between packed and alone."""
        return worst(list(map(self.size, self.gaps.values())))

    @property
    def moved(self) -> float:
        """Return the largest change of a sample when others were replaced."""
        return 0.0 if self.swapped is None else worst(list(map(self.size, self.swapped.moved.values())))

    @property
    def name(self) -> Callable[[int], str]:
        """Return the function that names a sample."""
        return lambda at: name_of(self.samples[at], at)


def worst(sizes: Sequence[float]) -> float:
    """Return the largest size, or NaN if any size is NaN; Python's `max` may lose a NaN."""
    return float(np.max([0.0, *sizes]))


def compare(  # noqa: PLR0913 - three things are compared, in different depth
    runner: Runner,
    samples: Sequence[Encoded],
    *,
    parameters: Parameters | None = None,
    watched: Sequence[int] | None = None,
    swaps: bool = False,
    runs_alone: bool = True,
    known: Mapping[int, Ran] | None = None,
    keeps: bool = False,
    agree: Agree = lambda facts: [facts],
) -> Compared:
    """Measure a sequence of these samples.

    With `parameters`, gradients are compared. `watched` are the samples that have a loss, all by default. `swaps` says
    that (b) is measured, `known` has results of samples alone, and `keeps` keeps those of this call. If parameters are
    sharded, every pass is a collective: `agree` returns the facts of all ranks, so that all run equally many.
    """
    start, watched = time.monotonic(), list(range(len(samples))) if watched is None else list(watched)
    one = _Comparison(runner, samples, watched, parameters, is_sharded(runner.model))
    original = one.packed(samples, backward=True)
    with repeatable_training(runner.model) as has_rates:
        has_drawn = original.has_drawn or has_rates
    num_alone = len(watched) if runs_alone else 0
    if one.is_sharded:
        has_drawn, num_alone = (max(facts) for facts in zip(*agree((has_drawn, num_alone)), strict=True))
    one.largest = max(1e-6, worst([float(original.of(at).abs().max()) for at in range(len(samples))]))
    swapped = one.swapped(original) if swaps else None
    # Without random draws a sample can be compared with what it gives alone, where it would draw other numbers.
    still = original
    embedded = one.embedded_alone(original) if has_drawn and not one.is_sharded else {}
    with repeatable_training(runner.model):
        if has_drawn:
            still = one.packed(samples, backward=True)
        alone = one.alone(still, num_alone, known or {}, runs_own=runs_alone, keeps=keeps)
    return Compared(
        runner=runner,
        samples=samples,
        watched=watched if runs_alone else (),
        has_experts=has_experts(runner.model),
        largest=one.largest,
        dtype=original.dtype,
        wrong=alone.wrong(),
        swapped=swapped,
        gaps=alone.gaps,
        of_alone=alone.off() if parameters is not None and runs_alone and 0 < len(watched) == len(alone.gaps) else None,
        noise_sizes=one.noise_sizes(original, still, embedded),
        has_drawn=has_drawn,
        num_parameters=len(still.gradient),
        num_tokens=original.states.shape[0] * original.states.shape[1],
        seconds=time.monotonic() - start,
        alone=alone.results,
    )


@dataclass
class _Comparison:
    runner: Runner
    samples: Sequence[Encoded]
    watched: Sequence[int]
    parameters: Parameters | None
    is_sharded: bool
    largest: float = 1.0

    @cached_property
    def others(self) -> list[int]:
        return [at for at in range(len(self.samples)) if at not in self.watched]

    def packed(self, samples: Sequence[Encoded], *, backward: bool) -> Ran:
        return self.runner.run(samples, packed=True, parameters=self.parameters if backward else None)

    def gap(self, one: Ran, at: int, other: Ran, there: int) -> Gap:
        """Compare a sample of two passes."""
        return gap_of(one.of(at), other.of(there), self.largest, one.rerouted(at, other, there))

    # -- neighbours ---------------------------------------------------------------------------------------------------

    def swapped(self, original: Ran) -> Swapped | None:
        """Replace every second sample, then the others."""
        num = len(self.samples)
        if num < 2 and not self.is_sharded:
            return None
        # Every sample has a changed neighbour in one of two passes. The loss is that of the watched samples, so only a
        # pass in which these stay has a gradient to compare.
        groups = (self.others, self.watched) if self.others else (range(1, num, 2), range(0, num, 2))
        moved: dict[int, Gap] = {}
        num_changed, of_changed = 0, None
        for number, changing in enumerate(groups):
            backward = number == 0 and (bool(self.others) or self.is_sharded)
            changed = [
                with_other_content(sample, self.runner.is_ordinary) if at in changing else sample
                for at, sample in enumerate(self.samples)
            ]
            after = self.packed(changed, backward=backward)
            staying = [at for at in range(num) if at not in changing]
            moved |= {at: self.gap(original, at, after, at) for at in staying}
            num_changed += sum(self.gap(original, at, after, at).most > 0 for at in changing)
            if backward and self.parameters is not None:
                of_changed = _apart(_at_tokens(original), _at_tokens(after), original.gradient, after.gradient)
        repeated = Gap(0.0, 0.0)
        if self.is_sharded or any(not gap.most <= 0 for gap in moved.values()):
            again = self.packed(self.samples, backward=False)
            gaps = [self.gap(original, at, again, at) for at in range(num)]
            repeated = Gap(worst([gap.most for gap in gaps]), worst([gap.over_tokens for gap in gaps]))
        prefixes = {at: slot for at in self.watched if (slot := original.slots[at]).num_prefix}
        of_tokens = original.of_embedded
        blind = [
            at for at, slot in prefixes.items() if of_tokens is not None and not of_tokens[slot.row, slot.prefix].any()
        ]
        return Swapped(moved, blind, num_changed, repeated, of_changed)

    # -- alone --------------------------------------------------------------------------------------------------------

    def alone(self, still: Ran, num_alone: int, known: Mapping[int, Ran], *, runs_own: bool, keeps: bool) -> _Alone:
        """Run each watched sample alone, as the host does without packing.

        Past the last sample, as many passes are run as on the other ranks, because sharded parameters are gathered.
        """
        watched = [self.samples[at] for at in self.watched] if runs_own else []
        made = _Alone(self, still, keeps=keeps)
        is_trained = self.parameters is not None and not is_checkpointed(self.runner.model)
        reference_of = reference_for(self.runner, watched, is_trained=is_trained, stand_in=self.samples)
        for at, sample in zip(self.watched, watched, strict=False):
            if id(sample) in known:
                made.add(at, known[id(sample)])
            elif (name := reference_of(sample)) is not None:
                with own_attention(self.runner.model, name):
                    made.add(at, self.runner.run([sample], packed=False, parameters=self.parameters))
        for _ in range(num_alone - len(watched)):
            # A sample if there is one: a wrong backward of the sequence may leave out layers, and the ranks would then
            # gather parameters in different orders.
            with own_attention(self.runner.model):
                stand_in = [min(watched, key=length_of)] if watched else self.samples
                self.runner.run(stand_in, packed=not watched, parameters=self.parameters)
        return made

    def embedded_alone(self, original: Ran) -> dict[int, torch.Tensor]:
        """Return the embeddings of each watched sample, with noise drawn for the sample alone."""
        embed, ids = self.runner.model.get_input_embeddings(), original.given.inputs["input_ids"]
        with torch.no_grad():
            own = {at: original.slots[at].of(ids)[None].to(original.states.device) for at in self.watched}
            return {at: embed(tokens).detach()[0] for at, tokens in own.items()}

    def noise_sizes(
        self, original: Ran, still: Ran, alone: Mapping[int, torch.Tensor]
    ) -> dict[int, tuple[float, float]]:
        """Compare the noise in a sequence with that drawn for a sample alone, by the root of the mean square."""
        sizes = {}
        if original.embedded is not None and still.embedded is not None:
            for at, own in alone.items():
                # The pass without draws has the embeddings themselves; what is left of the others is noise.
                drawn, right = (original.slots[at].of(one).float() for one in (original.embedded, still.embedded))
                squares = [(one.float() - right).square().flatten() for one in (drawn, own)]
                here, there = (max(float(one.mean()), 1e-30) for one in squares)
                if max(here, there) > 1e-30:
                    chance = sum(float(one.var()) / (4 * len(one) * float(one.mean()) ** 2 + 1e-30) for one in squares)
                    sizes[at] = (here / there) ** 0.5, chance**0.5
        return sizes


class _Alone:
    """Compare samples alone with their sequence, each as it is run: gradients of many samples would fill memory."""

    def __init__(self, comparison: _Comparison, packed: Ran, *, keeps: bool) -> None:
        self.comparison, self.packed, self.keeps = comparison, packed, keeps
        self.gaps: dict[int, Gap] = {}
        self.results: dict[int, Ran] = {}
        self.inputs: dict[int, Collated] = {}
        self.at_tokens: dict[str, torch.Tensor | None] = {}
        self.gradient: dict[str, torch.Tensor] = {}

    def add(self, at: int, ran: Ran) -> None:
        self.gaps[at] = self.comparison.gap(self.packed, at, ran, 0)
        self.gradient = gradients.added([self.gradient, ran.gradient])
        slot = self.packed.slots[at]
        for name in _AT_TOKENS.values():
            value, total = getattr(ran, name), self.at_tokens.get(name)
            if value is None or (total is None and name in self.at_tokens):
                self.at_tokens[name] = None
                continue
            if total is None:
                shape = *self.packed.states.shape[:2], value.shape[-1]
                total = self.at_tokens[name] = torch.zeros(shape, device=value.device)
            total[slot.row, slot.places] += ran.slots[0].of(value).float()  # at a prefix the sum over its branches
        self.inputs[at] = ran.given
        if self.keeps:
            self.results[id(self.comparison.samples[at])] = ran

    def wrong(self) -> str | None:
        """Compare the inputs of the sequence with those of its samples."""
        samples = self.comparison.samples
        return wrong_inputs(samples, self.packed.given, [self.inputs.get(at) for at in range(len(samples))])

    def off(self) -> Gradients:
        """Compare the gradient of the sequence with the sum over its samples."""
        return _apart(_at_tokens(self.packed), self.at_tokens, self.packed.gradient, self.gradient)


_AT_TOKENS = {LAST_LAYER: "of_states", TOKENS: "of_embedded"}
"""Fields of a pass with a gradient at each token."""


def _at_tokens(ran: Ran) -> dict[str, torch.Tensor | None]:
    """Return the gradients at the tokens of a sequence. At tokens of samples without a loss they have to be 0."""
    found = {name: getattr(ran, name) for name in _AT_TOKENS.values()}
    return {name: None if value is None else value.float() for name, value in found.items()}


def _apart(
    one: Mapping[str, torch.Tensor | None],
    other: Mapping[str, torch.Tensor | None],
    gradient: Mapping[str, torch.Tensor],
    of_other: Mapping[str, torch.Tensor],
) -> Gradients:
    shares = {what: _share(one.get(name), other.get(name)) for what, name in _AT_TOKENS.items()}
    return {**shares, **gradients.difference(gradient, of_other)}


def _share(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the difference of two gradients as a share of the larger; 1 if only one of them exists."""
    if one is None and other is None:
        return 0.0
    if one is None or other is None:
        return 1.0
    one, other = one.float(), other.float()
    return float((one - other).norm() / torch.maximum(one.norm(), other.norm()).clamp_min(1e-30))


def gap_of(one: torch.Tensor, other: torch.Tensor, largest: float, is_rerouted: torch.Tensor) -> Gap:
    """Compare two computations of the hidden states of one sample, as a share of the largest state."""
    by_token = (one.float() - other.float()).abs().amax(dim=-1) / largest
    num = int(is_rerouted.sum())
    if num > len(one) * _MOST_REROUTED:  # in 16 bits nearly every token takes another route in some layer
        num, is_rerouted = 0, torch.zeros_like(is_rerouted)
    kept = by_token[~is_rerouted]
    return Gap(float(kept.max()), float(kept.square().mean().sqrt()), num)
