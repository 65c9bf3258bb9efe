"""Measure a whole sequence that trains, with the trainer's own loss, backward and random draws.

(a) Compute the loss of a few targets of every second sample, the `watched` ones. Replace tokens and media of the other
    samples, and keep lengths and grids, so that the same random numbers are drawn. Nothing of the watched samples may
    change: neither their hidden states nor the gradients of their tokens and of parameters.
(b) Switch random draws off: each watched sample must give what it gives alone by the model's own attention.
(c) If samples share prefixes, replace the tokens and media of every second prefix: its branches must change, and no
    other sample may.
(d) Measure the noise drawn for embeddings: it must be as large as it is for each sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from swift_vlpack.comm import OfAll
from swift_vlpack.feed.waiting import waiting
from swift_vlpack.proof import gradients
from swift_vlpack.proof.choose_samples import shortest_of_each_kind
from swift_vlpack.proof.first_batch import FirstSequence, is_token
from swift_vlpack.proof.limits import (
    FLOORS,
    TIMES_NOISE,
    TIMES_NOISE_BESIDE_FLOAT32,
    Gap,
    Limits,
    Noise,
    gap_of,
    has_experts,
    precision_of,
    rounded_otherwise,
    without_noise,
    worst,
)
from swift_vlpack.proof.measure import OtherPrefix
from swift_vlpack.proof.passes import Pass, Passes
from swift_vlpack.proof.proof_model import length_of
from swift_vlpack.proof.reference import (
    OWN,
    QUICK,
    configs_of,
    longest_for_own,
    own_attention,
    own_attention_for,
    repeatable_training,
    untouched,
)
from swift_vlpack.words import counted

NUM_FOR_NOISE = 4
"""Number of samples on which the effect of rounding is measured."""


class Gradients(NamedTuple):
    """Differences between two computations of the same gradients, as shares of their length."""

    loss: float
    inputs: float
    parts: Mapping[str, float]

    @property
    def most(self) -> float:
        """Return the largest of these differences."""
        return worst([self.loss, self.inputs, *self.parts.values()])


@dataclass(frozen=True, slots=True)
class InTraining:
    """Measurements on one sequence of the trainer, in units of the hidden states."""

    num_samples: int
    num_prefixes: int
    """Prefixes that samples share."""
    num_branches: int
    """Samples that share them."""
    num_tokens: int
    num_targets: int
    """Targets of the watched samples of which the loss was taken."""
    names: Sequence[str]
    """Names of the watched samples."""
    is_encoded_again: bool
    has_drawn: bool
    is_checkpointed: bool
    moved: Sequence[float]
    """Largest change of hidden states: of each watched sample when the others changed, then of each other sample when
    the watched samples changed."""
    of_changed: Gradients | None
    of_prefix: OtherPrefix
    beside: float
    """Gradient at tokens of samples without a loss, as a share of the gradient at the watched samples; should be 0."""
    gaps: Sequence[Gap]
    """Differences of hidden states between the sequence and each watched sample alone."""
    of_alone: Gradients | None
    noise_sizes: Sequence[tuple[float, float]]
    """Size of the noise drawn for each watched sample's embeddings, relative to the sample alone, and the standard
    deviation of this estimate."""
    largest: float
    limits: Limits
    """Limits for rounding, between the sequence and its samples alone."""
    exact: Limits
    """Limits for results that the same kernels compute from the same numbers."""
    dtype: str
    """The data type that the model computes in."""
    sharded_by: str
    """The engine that leaves each rank a part of the parameters; empty if each rank has them all."""
    num_parameters: int
    """Number of parameters whose gradients were compared."""
    not_looked_at: Sequence[str] = ()

    @property
    def is_sharp(self) -> bool:
        """Tell whether samples were compared with what they give alone, within limits that would notice a mistake."""
        return bool(self.gaps) and self.limits.would_notice(self.largest)


def measure_in_training(passes: Passes, sequence: FirstSequence, results_of_all: OfAll) -> InTraining:
    """Run all passes and return the measurements. All ranks must call it.

    If parameters are sharded, all ranks run equally many passes. A rank that fails in a pass raises at once, because
    the others wait for it in the middle of a forward, where it cannot send them a message.
    """
    with untouched(passes.model), torch.enable_grad():
        passes.model.train()
        compared = _Compared(passes, sequence)
        # With sharded parameters every pass is a collective, so a rank with fewer samples runs as many passes.
        of_ranks = _on_all(passes, compared.begin, results_of_all)
        if passes.is_sharded:
            compared.has_drawn = any(has_drawn for has_drawn, _, _ in of_ranks)
            compared.num_alone = max(number for _, number, _ in of_ranks)
            compared.has_prefixes = any(has_prefixes for _, _, has_prefixes in of_ranks)
        _on_all(passes, compared.finish, results_of_all)
        return compared.result


def _on_all(passes: Passes, work: Callable[[], Any], results_of_all: OfAll) -> list[Any]:
    """Run passes on every rank. Returns the results of all ranks."""
    if not passes.is_sharded:
        return results_of_all(work)
    with waiting("the first batch in training"):
        result = work()
    return results_of_all(lambda: result)


class _Compared:
    """Runs the passes of one rank in two parts; between them, ranks agree on the number of passes."""

    result: InTraining

    def __init__(self, passes: Passes, sequence: FirstSequence) -> None:
        self.passes = passes
        self.sequence = sequence
        self.watched = sequence.watched
        self.encoded = [] if isinstance(sequence.samples, str) else [sequence.samples[at] for at in self.watched]
        self.has_drawn = False
        self.num_alone = len(self.encoded)
        self.has_prefixes = sequence.has_units
        self.quick_is_equal = True
        self.is_checkpointed = any(
            getattr(module, "gradient_checkpointing", False) is True or hasattr(module, "_checkpoint_wrapped_module")
            for module in passes.model.modules()
        )

    def begin(self) -> tuple[bool, int, bool]:
        """Run the sequence as it trains.

        Returns whether it draws at random, how many samples to run alone, and whether samples share prefixes.
        """
        found: list[Pass] = []
        self.dtype = precision_of(self.passes.model, lambda: found.append(self._packed(self.sequence.for_watched())))
        self.original = found[0]
        self.has_drawn = self.original.has_drawn or _has_rates(self.passes.model)
        if self._long() or self.passes.is_sharded:
            self.quick_is_equal = self._is_quick_equal()
        if self._long() and not self.quick_is_equal:
            self.encoded, self.num_alone = [], 0
        return self.has_drawn, self.num_alone, self.has_prefixes

    def finish(self) -> None:
        """Run all other passes, compare them, and set `result`."""
        original, model, sequence = self.original, self.passes.model, self.sequence
        moved, of_changed, beside, own = self._changed()
        of_prefix = self._with_other_prefixes()
        # Without random draws a sample can be compared with what it gives alone, where it would draw other numbers.
        still = original
        sizes = self._embedded_alone()
        with repeatable_training(model):
            if self.has_drawn:
                still = self._packed(sequence.for_watched())
            alone = self._alone(list(range(self.num_alone)))
            few = self._for_noise()
            with rounded_otherwise(model, self.dtype):
                noise = self._alone(few)
        largest = float(original.hidden.abs().max())
        experts = has_experts(model)
        of_noise = Noise(0.0, 0.0)
        if alone:
            right = [alone[number] for number in few if number < len(alone)]
            gaps = [_gap(*pair).over_tokens for pair in zip(right, noise, strict=True)]
            of_noise = Noise(worst(gaps), _apart(_joined(right), _joined(noise)).most)
        # This proof cannot run in float32, as the proof before training does for models in 16 bits.
        times = TIMES_NOISE_BESIDE_FLOAT32 if torch.finfo(self.dtype).bits == 16 else TIMES_NOISE
        limits = Limits.of(self.dtype, largest, of_noise.times(times), 0.0, has_experts=experts)
        floor = FLOORS[self.dtype]
        exact = limits._replace(moved=floor.moved * max(1.0, largest), gradient=floor.gradient)
        together = self._of_watched(still)
        self.result = InTraining(
            num_samples=len(sequence.slots),
            num_prefixes=len(sequence.units),
            num_branches=sum(map(len, sequence.units)),
            num_tokens=int(sequence.inputs["input_ids"].shape[-1]),
            num_targets=int(sequence.is_learnt.sum()),
            names=[str(sequence.record.sample_ids[at]) for at in self.watched],
            is_encoded_again=not isinstance(sequence.samples, str),
            has_drawn=self.has_drawn,
            is_checkpointed=self.is_checkpointed,
            moved=moved,
            of_changed=of_changed,
            of_prefix=of_prefix,
            beside=beside,
            gaps=[_gap(*pair) for pair in zip(together, alone, strict=False)] if alone else (),
            of_alone=_apart(_joined(together, still.gradient), _joined(self._as_in_sequence(alone))) if alone else None,
            noise_sizes=self._noise_sizes(still, sizes),
            largest=largest,
            limits=limits,
            dtype=str(self.dtype).removeprefix("torch."),
            sharded_by=self.passes.sharded_by,
            num_parameters=len(original.gradient),
            # In 16 bits, other neighbours may round a token differently and send it to another expert.
            exact=exact if not experts else limits._replace(moved=max(limits.alone, exact.moved)),
            not_looked_at=self._not_looked_at(has_changed=not moved or own > 2 * exact.moved),
        )

    def _packed(self, inputs: Mapping[str, Any], *, backward: bool = True) -> Pass:
        return self.passes.run(inputs, packed=True, backward=backward)

    def _changed(self) -> tuple[list[float], Gradients | None, float, float]:
        """Run the sequence with the other samples changed, then, forward only, with the watched samples changed.

        Returns `moved`, `of_changed` and `beside` of `InTraining`, and how far the changed samples moved themselves.
        """
        sequence, original = self.sequence, self.original
        if len(sequence.slots) < 2 and not self.passes.is_sharded:
            return [], None, 0.0, 0.0
        # No backward in the second pass: its loss is that of the watched samples, and these have changed themselves.
        changed = self._packed(sequence.with_other(sequence.others))
        turned = self._packed(sequence.with_other(self.watched), backward=False)
        moved = [_most(original.hidden, changed.hidden, sequence.places[at]) for at in self.watched]
        moved += [_most(original.hidden, turned.hidden, sequence.places[at]) for at in sequence.others]
        before, after = self._of_watched(original), self._of_watched(changed)
        apart = _apart(_joined(before, original.gradient), _joined(after, changed.gradient))
        own = worst([_most(original.hidden, changed.hidden, sequence.places[at]) for at in sequence.others])
        return moved, apart, self._beside(original), own

    def _with_other_prefixes(self) -> OtherPrefix:
        """Run the sequence, forward only, with other tokens and media in every second prefix."""
        if not self.has_prefixes:
            return OtherPrefix({}, ())
        sequence, before = self.sequence, self.original.hidden
        units = sequence.units[::2]
        after = self._packed(sequence.with_other_prefixes(units), backward=False).hidden
        moving = [at for unit in units for at in unit]
        # A prefix without words, whose media cannot be replaced, stays as it was.
        changed = [at for at in moving if _most(before, after, sequence.slots[at].prefix) > 0]
        return OtherPrefix(
            {at: _most(before, after, sequence.slots[at].tokens) for at in changed},
            [_most(before, after, places) for at, places in enumerate(sequence.places) if at not in moving],
        )

    def _beside(self, original: Pass) -> float:
        """Return the gradient at samples without a loss, as a share of the gradient at the watched samples."""
        if original.of_inputs is None:
            return 0.0
        squares = original.of_inputs.float().square().sum(dim=-1)
        # The lengths of two vectors: the gradients at all tokens of each group of samples, but not at prefixes: these
        # have the gradients of all branches.
        of = [
            float(sum(squares[self.sequence.slots[at].tokens].sum() for at in which))
            for which in (self.sequence.others, self.watched)
        ]
        return (of[0] / max(of[1], 1e-30)) ** 0.5 if of[1] > 0 else 0.0

    def _as_in_sequence(self, alone: list[Pass]) -> list[Pass]:
        """Give samples alone the gradients at a prefix that it has in the sequence: the sum of those of its branches.

        The gradient of parameters needs no change, because it is the sum over all samples anyway.
        """
        made: dict[int, Pass] = dict(zip(self.watched, alone, strict=False))
        for unit in self.sequence.units:
            num_prefix = self.sequence.slots[unit[0]].num_prefix
            branches = [at for at in unit if at in made]
            for name in ("of_loss", "of_inputs", "of_embedded"):
                parts = [getattr(made[at], name) for at in branches]
                if any(part is None for part in parts):
                    continue
                total = sum(part[:num_prefix] for part in parts)
                for at, part in zip(branches, parts, strict=True):
                    changed: Any = {name: torch.cat([total, part[num_prefix:]])}
                    made[at] = replace(made[at], **changed)
        return list(made.values())

    def _of_watched(self, whole: Pass) -> list[Pass]:
        """Cut the results of the watched samples out of a pass."""
        return [whole.at(self.sequence.places[at]) for at in self.watched]

    def _alone(self, numbers: Sequence[int]) -> list[Pass]:
        """Run the watched samples of these numbers alone, as the host does without packing.

        For a number past the last sample, run `_stand_in`: ranks with sharded parameters run equally many passes.
        """
        made = []
        for number in numbers:
            if number >= len(self.encoded):
                self._stand_in()
                continue
            at = self.watched[number]
            inputs = self.sequence.alone(at)
            num_tokens = self.sequence.record.lengths[at]
            with own_attention_for(self.passes.model, num_tokens, is_trained=not self.is_checkpointed):
                made.append(_without_padding(self.passes.run(inputs, packed=False), inputs))
        return made

    def _stand_in(self) -> None:
        """Run a pass as other ranks run one for a sample alone, and drop its results.

        Runs a sample if this rank has one, and not the packed sequence: a wrong backward of the sequence may leave out
        layers, and the ranks would then gather parameters in different orders.
        """
        inputs, has_sample = self.sequence.for_watched(), False
        num_tokens = int(inputs["input_ids"].shape[-1])
        if self.watched and not isinstance(self.sequence.samples, str):
            at = min(self.watched, key=lambda at: self.sequence.record.lengths[at])
            inputs, num_tokens, has_sample = self.sequence.alone(at), self.sequence.record.lengths[at], True
        with own_attention_for(self.passes.model, num_tokens, is_trained=not self.is_checkpointed):
            self.passes.run(inputs, packed=not has_sample)

    def _for_noise(self) -> list[int]:
        """Choose watched samples on which rounding is measured: the shortest with each kind of media, then more.

        If parameters are sharded, adds numbers past the last sample (see `_alone`): all ranks return equally many.
        """
        samples = self.encoded
        by_length = sorted(range(len(samples)), key=lambda number: length_of(samples[number]))
        few = list(dict.fromkeys([*shortest_of_each_kind(samples), *by_length]))[:NUM_FOR_NOISE]
        missing = min(NUM_FOR_NOISE, self.num_alone) - len(few) if self.passes.is_sharded else 0
        return few + [self.num_alone] * missing

    def _long(self) -> list[int]:
        """Return the watched samples that are too long for the model's own attention."""
        # With checkpointing a layer keeps no weights for the backward, so as much fits as in a forward.
        longest = longest_for_own(self.passes.model, is_trained=not self.is_checkpointed)
        return [at for at in self.watched if self.sequence.record.lengths[at] > longest]

    def _is_quick_equal(self) -> bool:
        """Tell whether sdpa equals the model's own attention on the shortest watched sample.

        sdpa replaces the model's own attention for long samples. It silently ignores some arguments of attention, such
        as sinks and soft caps.
        """
        hidden = []
        shortest = min(self.watched, key=lambda at: self.sequence.record.lengths[at], default=0)
        with repeatable_training(self.passes.model):
            for name in (OWN, QUICK):
                if not self.encoded:  # a forward as those of the other ranks
                    self._packed(self.sequence.for_watched(), backward=False)
                    continue
                with own_attention(self.passes.model, name):
                    hidden.append(self.passes.run(self.sequence.alone(shortest), packed=False, backward=False).hidden)
        return not hidden or gap_of(*hidden).over_tokens <= without_noise(self.dtype, hidden[0])

    def _embedded_alone(self) -> list[torch.Tensor]:
        """Return the embeddings of each watched sample, with noise drawn for the sample alone."""
        if not self.has_drawn or self.passes.is_sharded:
            return []
        embed, ids = self.passes.model.get_input_embeddings(), self.sequence.inputs["input_ids"]
        with torch.no_grad():
            return [
                embed(ids[:, self.sequence.places[at]].to(self.original.hidden.device)).detach()[0]
                for at in self.watched
            ]

    def _noise_sizes(self, still: Pass, alone: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
        # The pass without draws has the embeddings themselves; what is left of the other one is noise.
        drawn, right = self.original.embedded, still.embedded
        num_tokens = self.sequence.inputs["input_ids"].shape[-1]
        if drawn is None or right is None or not len(drawn) == len(right) == num_tokens:
            return []
        sizes = []
        for at, own in zip(self.watched, alone, strict=False):
            places = self.sequence.places[at]
            squares = [(one.float() - right[places].float()).square().flatten() for one in (drawn[places], own)]
            means = [float(one.mean()) for one in squares]
            if max(means) > 0:
                chance = sum(float(one.var()) / (4 * len(one) * max(float(one.mean()), 1e-30) ** 2) for one in squares)
                sizes.append(((means[0] / max(means[1], 1e-30)) ** 0.5, chance**0.5))
        return sizes

    def _not_looked_at(self, *, has_changed: bool) -> tuple[str, ...]:
        said = (
            [] if has_changed else ["other neighbours, whose tokens could not be changed so that they move themselves"]
        )
        if self.passes.why_no_parameters:
            said.append(f"gradients of parameters ({self.passes.why_no_parameters})")
        if self.has_drawn and self.passes.is_sharded:
            said.append("how large drawn noise is (parameters are sharded)")
        if isinstance(self.sequence.samples, str):
            said.append(f"its samples encoded anew and alone, other media beside them ({self.sequence.samples})")
        elif self._long():
            too_long = f"{counted(len(self._long()), 'sample')} too long for {OWN}"
            stands_in = f"{QUICK} stands in" if self.quick_is_equal else f"{QUICK} is not equal, so none is run alone"
            said.append(f"the model's own attention of {too_long} ({stands_in})")
        return tuple(said)


def _has_rates(model: torch.nn.Module) -> bool:
    """Tell whether any rate of random draws is above 0.

    Needed beside `Pass.has_drawn`, because a custom kernel may draw without torch's generators.
    """

    def rates() -> list[Any]:
        owners = [*model.modules(), *configs_of(model)]
        return [value for owner in owners for value in vars(owner).values() if type(value) is float]

    before = rates()
    with repeatable_training(model):
        return rates() != before


def _without_padding(ran: Pass, inputs: Mapping[str, Any]) -> Pass:
    return replace(ran.at(is_token(inputs)[0].to(ran.hidden.device)), gradient=ran.gradient)


def _gap(one: Pass, other: Pass) -> Gap:
    return gap_of(one.hidden, other.hidden)


def _most(one: torch.Tensor, other: torch.Tensor, places: slice | torch.Tensor) -> float:
    return gap_of(one[places], other[places]).most


class _Joined(NamedTuple):
    loss: torch.Tensor | None
    inputs: torch.Tensor | None
    embedded: torch.Tensor | None
    parameters: Mapping[str, torch.Tensor]


def _joined(samples: Sequence[Pass], gradient: Mapping[str, torch.Tensor] | None = None) -> _Joined:
    """Join the gradients of samples, to compare a sequence with its samples alone.

    Gradients at tokens are concatenated. Those of parameters are added up, unless `gradient` is given: a sequence has
    one gradient of parameters for all its samples.
    """

    def of_tokens(name: str) -> torch.Tensor | None:
        parts = [getattr(one, name) for one in samples]
        return torch.cat(parts) if parts and all(part is not None for part in parts) else None

    of_parameters = gradients.added([one.gradient for one in samples]) if gradient is None else gradient
    return _Joined(of_tokens("of_loss"), of_tokens("of_inputs"), of_tokens("of_embedded"), of_parameters)


def _apart(one: _Joined, other: _Joined) -> Gradients:
    return Gradients(
        _share(one.loss, other.loss),
        worst([_share(one.inputs, other.inputs), _share(one.embedded, other.embedded)]),
        gradients.difference(one.parameters, other.parameters),
    )


def _share(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the difference of two gradients as a share of the larger; 1 if only one of them exists."""
    if one is None and other is None:
        return 0.0
    if one is None or other is None:
        return 1.0
    one, other = one.float(), other.float()
    return float((one - other).norm() / torch.maximum(one.norm(), other.norm()).clamp_min(1e-30))
