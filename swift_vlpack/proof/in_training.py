"""Prove isolation on a whole sequence that trains, with the trainer's own loss, backward and random draws.

(a) Compute the loss of every second sample, the `watched` ones. Replace tokens and media of the other samples, and keep
    lengths and grids, so that the same random numbers are drawn. Nothing of the watched samples may change: neither
    their hidden states nor the gradients of their tokens and of parameters.
(b) Switch random draws off: each watched sample must give what it gives alone by the model's own attention.
(c) Measure the noise drawn for embeddings: it must be as large as it is for each sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.proof import gradients
from swift_vlpack.proof.changes import kinds_of_media, replaced, with_other_media
from swift_vlpack.proof.first_batch import known
from swift_vlpack.proof.isolation import IsolationError
from swift_vlpack.proof.passes import Pass, Passes
from swift_vlpack.proof.reference import (
    OWN,
    QUICK,
    configs_of,
    longest_for_own,
    own_attention,
    repeatable_training,
    untouched,
)
from swift_vlpack.proof.tolerance import (
    FLOORS,
    TIMES_NOISE,
    TIMES_NOISE_BESIDE_SINGLE,
    Gap,
    Limits,
    Noise,
    gap_of,
    precision_of,
    rounded_otherwise,
    worst,
)
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded, PackRecord
from swift_vlpack.words import counted

NOISE_LIMIT, STEPS_OF_CHANCE = 0.1, 10
"""Sizes of noise on embeddings may differ by this share, plus this many standard deviations of their estimate."""

NUM_FOR_NOISE = 4
"""Number of samples on which the effect of rounding is measured."""

Span = tuple[int, int]
OfAll = Callable[[Callable[[], Any]], list[Any]]


@dataclass(frozen=True)
class FirstRow:
    """A packed sequence as the trainer got it, and its samples, encoded again."""

    inputs: Mapping[str, Any]
    record: PackRecord
    samples: Sequence[Encoded] | str
    """The samples, or the reason why they could not be encoded again."""
    template: Any
    is_ordinary: Callable[[int], bool]

    @property
    def spans(self) -> list[Span]:
        """Return the range of tokens of each sample."""
        return list(pairwise([0, *accumulate(self.record.lengths)]))

    @property
    def watched(self) -> list[int]:
        """Return every second sample, from the second on, or the others if these have no targets.

        From the second on, because a sample sees the neighbour before it if the mask is causal and has no boundaries.
        """
        labels = self.inputs["labels"][0]
        has_target = [bool((labels[start + 1 : end] != NO_LABEL).any()) for start, end in self.spans]
        number = len(has_target)
        return list(range(1 if any(has_target[1::2]) else 0, number, 2))

    @property
    def others(self) -> list[int]:
        """Return the samples that are not watched."""
        return [at for at in range(len(self.spans)) if at not in self.watched]

    def for_watched(self) -> dict[str, Any]:
        """Return the inputs with labels of the watched samples only, so that the loss is theirs alone."""
        labels = torch.full_like(self.inputs["labels"], NO_LABEL)
        for start, end in map(self.spans.__getitem__, self.watched):
            labels[0, start:end] = self.inputs["labels"][0, start:end]
        return {**self.inputs, "labels": labels}

    def with_other(self, which: Sequence[int]) -> dict[str, Any]:
        """Return `for_watched()` with other tokens and media in the samples `which`; lengths, grids and labels stay."""
        row = self.for_watched()
        row["input_ids"] = row["input_ids"].clone()
        for start, end in map(self.spans.__getitem__, which):
            tokens = {"input_ids": row["input_ids"][0, start:end].tolist()}
            row["input_ids"][0, start:end] = torch.tensor(replaced(tokens, self.is_ordinary)["input_ids"])
        if not isinstance(self.samples, str) and any(kinds_of_media(self.samples[at]) for at in which):
            changed = [with_other_media(one) if at in which else one for at, one in enumerate(self.samples)]
            names = {name for one in changed for name in kinds_of_media(one)} & set(row)
            made = packed_sequence(self.template, list(map(known, changed)), multiple=self.record.sequence_multiple)
            row |= {name: made[name].to(row[name]) for name in names if isinstance(row[name], torch.Tensor)}
        return row

    def alone(self, at: int) -> dict[str, Any]:
        """Collate one sample as the host does un-packed, with the loss weights that its tokens have in the sequence."""
        assert not isinstance(self.samples, str)
        with layout(self.template, packed=False):
            made: dict[str, Any] = self.template.data_collator([known(self.samples[at])])
        if self.inputs.get("loss_scale") is not None:
            start, end = self.spans[at]
            weights = torch.zeros(made["labels"].shape, dtype=self.inputs["loss_scale"].dtype)
            weights[_is_token(made)] = self.inputs["loss_scale"][0, start:end].cpu()
            made["loss_scale"] = weights
        return made


def _is_token(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return a mask of the tokens that are not padding, for a batch of one un-packed sample."""
    mask = inputs.get("attention_mask")
    return mask.bool() if mask is not None and mask.dim() == 2 else torch.ones_like(inputs["labels"], dtype=torch.bool)


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
    num_tokens: int
    names: Sequence[str]
    """Names of the watched samples."""
    is_encoded_again: bool
    has_drawn: bool
    is_checkpointed: bool
    moved: Sequence[float]
    """Largest change of hidden states: of each watched sample when the others changed, then of each other sample when
    the watched samples changed."""
    of_changed: Gradients | None
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
    not_looked_at: Sequence[str] = field(default=())

    @property
    def is_sharp(self) -> bool:
        """Tell whether samples were compared with what they give alone, within limits that would notice a mistake."""
        return bool(self.gaps) and self.limits.would_notice(self.largest)

    def line(self) -> str:
        """Return the line that the log shows. It says "verified" only of what a limit would have noticed."""
        what = f"{counted(self.num_samples, 'sample')} of {self.num_tokens} tokens"
        drawn = "with all that is drawn at random" if self.has_drawn else "nothing is drawn at random"
        again = ", layers run again in the backward" if self.is_checkpointed else ""
        whole = ", which is what its samples are when they are encoded anew" if self.is_encoded_again else ""
        seen = f"the first batch of the trainer ({what}, {drawn}{again})"
        parts = [
            f"isolation verified in training: {seen}{whole}"
            if self.is_sharp
            else f"isolation in training: no sample sees another in {seen}{whole}"
        ]
        if self.moved:
            of_changed = "" if self.of_changed is None else f", gradients by {self.of_changed.most:.1e}"
            parts.append(f"other neighbours move hidden states by {worst(self.moved):.1e}{of_changed}")
        if self.gaps:
            of_alone = "" if self.of_alone is None else f", gradients within {self.of_alone.most:.1e}"
            equal = "equals" if len(self.gaps) == 1 else "equal"
            off = worst([gap.most for gap in self.gaps])
            alone = f"{counted(len(self.gaps), 'sample')} in it {equal} the model's own attention within {off:.1e}"
            parts.append(f"{alone} of hidden states up to {self.largest:.1f}{of_alone}")
            if not self.is_sharp:
                parts.append(
                    f"that rests on the rounding of {self.dtype}, for which {self.limits.alone:.1e} would pass, and of "
                    f"gradients {self.limits.gradient:.1e}"
                )
        if self.not_looked_at:
            parts.append(f"not looked at: {', '.join(self.not_looked_at)}")
        return "; ".join(parts)


def measured(passes: Passes, row: FirstRow, results_of_all: OfAll) -> InTraining:
    """Run all passes and return the measurements. If parameters are sharded, all ranks run equally many passes."""
    with untouched(passes.model), torch.enable_grad():
        passes.model.train()
        compared = _Compared(passes, row)
        of_ranks = results_of_all(compared.begin)
        if passes.is_sharded:
            compared.has_drawn = any(has_drawn for has_drawn, _ in of_ranks)
            compared.num_alone = max(number for _, number in of_ranks)
        results_of_all(compared.finish)
        return compared.result


class _Compared:
    """Runs the passes of one rank in two parts; between them, ranks agree on the number of passes."""

    result: InTraining

    def __init__(self, passes: Passes, row: FirstRow) -> None:
        self.passes = passes
        self.row = row
        self.watched = row.watched
        self.encoded = [] if isinstance(row.samples, str) else [row.samples[at] for at in self.watched]
        self.has_drawn = False
        self.num_alone = len(self.encoded)
        self.quick_is_equal = True
        self.is_checkpointed = any(
            getattr(module, "gradient_checkpointing", False) is True for module in passes.model.modules()
        )

    def begin(self) -> tuple[bool, int]:
        """Run the sequence as it trains. Returns whether it draws at random, and how many samples to run alone."""
        found: list[Pass] = []
        self.dtype = precision_of(self.passes.model, lambda: found.append(self._packed(self.row.for_watched())))
        self.original = found[0]
        self.has_drawn = self.original.has_drawn or _has_rates(self.passes.model)
        if self._long() or self.passes.is_sharded:
            self.quick_is_equal = self._is_quick_equal()
        if self._long() and not self.quick_is_equal:
            self.encoded, self.num_alone = [], 0
        return self.has_drawn, self.num_alone

    def finish(self) -> None:
        """Run all other passes, compare them, and set `result`."""
        original, model, row = self.original, self.passes.model, self.row
        moved, of_changed, beside, own = self._changed()
        still = original
        sizes = self._embedded_alone()
        with repeatable_training(model):
            if self.has_drawn:
                still = self._packed(row.for_watched())
            alone = self._alone(list(range(self.num_alone)))
            few = self._for_noise()
            with rounded_otherwise(model, self.dtype):
                noise = self._alone(few)
        largest = float(original.hidden.abs().max())
        has_experts = any("expert" in name for name, _ in model.named_modules())
        of_noise = Noise(0.0, 0.0)
        if alone:
            right = [alone[number] for number in few if number < len(alone)]
            gaps = [_gap(*pair).over_tokens for pair in zip(right, noise, strict=True)]
            of_noise = Noise(worst(gaps), _apart(_joined(right), _joined(noise)).most)
        # Because the proof before this one compares models of 16 bits in float32, and this one cannot.
        times = TIMES_NOISE_BESIDE_SINGLE if torch.finfo(self.dtype).bits == 16 else TIMES_NOISE
        limits = Limits.of(self.dtype, largest, of_noise.times(times), 0.0, has_experts=has_experts)
        floor = FLOORS[self.dtype]
        exact = limits._replace(moved=floor.moved * max(1.0, largest), gradient=floor.gradient)
        together = self._of_watched(still)
        self.result = InTraining(
            num_samples=len(row.spans),
            num_tokens=int(row.inputs["input_ids"].shape[-1]),
            names=[str(row.record.sample_ids[at]) for at in self.watched],
            is_encoded_again=not isinstance(row.samples, str),
            has_drawn=self.has_drawn,
            is_checkpointed=self.is_checkpointed,
            moved=moved,
            of_changed=of_changed,
            beside=beside,
            gaps=[_gap(*pair) for pair in zip(together, alone, strict=False)] if alone else (),
            of_alone=_apart(_joined(together, still.gradient), _joined(alone)) if alone else None,
            noise_sizes=self._noise_sizes(still, sizes),
            largest=largest,
            limits=limits,
            dtype=str(self.dtype).removeprefix("torch."),
            # In 16 bits a token may go to another expert because other tokens are beside it.
            exact=exact if not has_experts else limits._replace(moved=max(limits.alone, exact.moved)),
            not_looked_at=self._not_looked_at(has_changed=not moved or own > 2 * exact.moved),
        )

    def _packed(self, inputs: Mapping[str, Any], *, backward: bool = True) -> Pass:
        return self.passes.run(inputs, packed=True, backward=backward)

    def _changed(self) -> tuple[list[float], Gradients | None, float, float]:
        """Run the sequence with the other samples changed, then, forward only, with the watched samples changed.

        Returns `moved`, `of_changed` and `beside` of `InTraining`, and how far the changed samples moved themselves.
        """
        row, original = self.row, self.original
        if len(row.spans) < 2 and not self.passes.is_sharded:
            return [], None, 0.0, 0.0
        changed = self._packed(row.with_other(row.others))
        turned = self._packed(row.with_other(self.watched), backward=False)
        moved = [_most(original.hidden, changed.hidden, row.spans[at]) for at in self.watched]
        moved += [_most(original.hidden, turned.hidden, row.spans[at]) for at in row.others]
        before, after = self._of_watched(original), self._of_watched(changed)
        apart = _apart(_joined(before, original.gradient), _joined(after, changed.gradient))
        own = worst([_most(original.hidden, changed.hidden, row.spans[at]) for at in row.others])
        return moved, apart, self._beside(original), own

    def _beside(self, original: Pass) -> float:
        """Return the gradient at samples without a loss, as a share of the gradient at the watched samples."""
        if original.of_inputs is None:
            return 0.0
        squares = original.of_inputs.float().square().sum(dim=-1)
        of = [
            float(sum(squares[slice(*self.row.spans[at])].sum() for at in which))
            for which in (self.row.others, self.watched)
        ]
        return (of[0] / max(of[1], 1e-30)) ** 0.5 if of[1] > 0 else 0.0

    def _of_watched(self, whole: Pass) -> list[Pass]:
        """Cut the results of the watched samples out of a pass."""
        spans = [slice(*self.row.spans[at]) for at in self.watched]
        return [
            replace(
                whole,
                hidden=whole.hidden[span],
                of_loss=None if whole.of_loss is None else whole.of_loss[span],
                of_inputs=None if whole.of_inputs is None else whole.of_inputs[span],
                gradient={},
            )
            for span in spans
        ]

    def _alone(self, numbers: Sequence[int]) -> list[Pass]:
        """Run the watched samples of these numbers alone, as the host does without packing.

        For a number past the last sample, run the sequence again and drop the result: ranks with sharded parameters
        must run equally many passes.
        """
        made = []
        for number in numbers:
            if number >= len(self.encoded):
                self._packed(self.row.for_watched())
                continue
            at = self.watched[number]
            inputs = self.row.alone(at)
            with own_attention(self.passes.model, self._attention_for(self.row.record.lengths[at])):
                made.append(_without_padding(self.passes.run(inputs, packed=False), inputs))
        return made

    def _for_noise(self) -> list[int]:
        """Choose watched samples on which rounding is measured: the shortest with each kind of media, then more.

        If parameters are sharded, adds numbers past the last sample (see `_alone`): all ranks return equally many.
        """
        samples = self.encoded
        by_length = sorted(range(len(samples)), key=lambda number: int(samples[number]["length"]))
        of_kinds = {kinds_of_media(samples[number]): number for number in by_length[::-1]}
        few = list(dict.fromkeys([*of_kinds.values(), *by_length]))[:NUM_FOR_NOISE]
        missing = min(NUM_FOR_NOISE, self.num_alone) - len(few) if self.passes.is_sharded else 0
        return few + [self.num_alone] * missing

    def _attention_for(self, num_tokens: int) -> str:
        """Return the attention for a sample alone: the model's own, or sdpa if the sample is too long for it.

        Without checkpointing less fits into memory, because all layers keep their attention weights for the backward.
        """
        longest = longest_for_own(self.passes.model, is_trained=not self.is_checkpointed)
        return OWN if num_tokens <= longest else QUICK

    def _long(self) -> list[int]:
        """Return the watched samples that are too long for the model's own attention."""
        return [at for at in self.watched if self._attention_for(self.row.record.lengths[at]) != OWN]

    def _is_quick_equal(self) -> bool:
        """Return whether sdpa equals the model's own attention on the shortest watched sample.

        Compared before sdpa replaces the model's own attention, because it ignores what some models ask of attention.
        """
        hidden = []
        shortest = min(self.watched, key=lambda at: self.row.record.lengths[at], default=0)
        with repeatable_training(self.passes.model):
            for name in (OWN, QUICK):
                if not self.encoded:
                    self._packed(self.row.for_watched())
                    continue
                with own_attention(self.passes.model, name):
                    hidden.append(self.passes.run(self.row.alone(shortest), packed=False, backward=False).hidden)
        limit = 4 * FLOORS[self.dtype].logits
        return not hidden or gap_of(*hidden).over_tokens <= limit * max(1.0, float(hidden[0].abs().max()))

    def _embedded_alone(self) -> list[torch.Tensor]:
        """Return the embeddings of each watched sample, with noise drawn for the sample alone."""
        if not self.has_drawn or self.passes.is_sharded:
            return []
        embed, ids = self.passes.model.get_input_embeddings(), self.row.inputs["input_ids"]
        with torch.no_grad():
            return [
                embed(ids[:, slice(*self.row.spans[at])].to(self.original.hidden.device)).detach()[0]
                for at in self.watched
            ]

    def _noise_sizes(self, still: Pass, alone: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
        drawn, right = self.original.embedded, still.embedded
        num_tokens = self.row.inputs["input_ids"].shape[-1]
        if drawn is None or right is None or not len(drawn) == len(right) == num_tokens:
            return []
        sizes = []
        for at, own in zip(self.watched, alone, strict=False):
            span = slice(*self.row.spans[at])
            squares = [(one.float() - right[span].float()).square().flatten() for one in (drawn[span], own)]
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
        if isinstance(self.row.samples, str):
            said.append(f"its samples encoded anew and alone, other media beside them ({self.row.samples})")
        elif self._long():
            too_long = f"{counted(len(self._long()), 'sample')} too long for {OWN}"
            stands_in = f"{QUICK} stands in" if self.quick_is_equal else f"{QUICK} is not equal, so none is run alone"
            said.append(f"the model's own attention of {too_long} ({stands_in})")
        return tuple(said)


def _has_rates(model: torch.nn.Module) -> bool:
    """Return whether any rate of random draws is above 0.

    A custom kernel may draw by such a rate without using torch's generators, where `Pass.has_drawn` would see it.
    """

    def rates() -> list[Any]:
        owners = [*model.modules(), *configs_of(model)]
        return [value for owner in owners for value in vars(owner).values() if type(value) is float]

    before = rates()
    with repeatable_training(model):
        return rates() != before


def _without_padding(ran: Pass, inputs: Mapping[str, Any]) -> Pass:
    kept = _is_token(inputs)[0].to(ran.hidden.device)
    return replace(
        ran,
        hidden=ran.hidden[kept],
        of_loss=None if ran.of_loss is None else ran.of_loss[kept],
        of_inputs=None if ran.of_inputs is None else ran.of_inputs[kept],
    )


def _gap(one: Pass, other: Pass) -> Gap:
    return gap_of(one.hidden, other.hidden)


def _most(one: torch.Tensor, other: torch.Tensor, span: Span) -> float:
    return gap_of(one[slice(*span)], other[slice(*span)]).most


class _Joined(NamedTuple):
    loss: torch.Tensor | None
    inputs: torch.Tensor | None
    parameters: Mapping[str, torch.Tensor]


def _joined(samples: Sequence[Pass], gradient: Mapping[str, torch.Tensor] | None = None) -> _Joined:
    """Join the gradients of samples, to compare a sequence with its samples alone.

    Gradients at tokens are concatenated. Those of parameters are added up, unless `gradient` is given: a sequence has
    one gradient of parameters for all its samples.
    """
    loss, inputs = (
        torch.cat(parts) if parts and all(part is not None for part in parts) else None  # type: ignore[arg-type]
        for parts in ([one.of_loss for one in samples], [one.of_inputs for one in samples])
    )
    return _Joined(loss, inputs, gradients.added([one.gradient for one in samples]) if gradient is None else gradient)


def _apart(one: _Joined, other: _Joined) -> Gradients:
    return Gradients(
        _share(one.loss, other.loss),
        _share(one.inputs, other.inputs),
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


def prove_in_training(of: InTraining) -> None:
    """Raise `IsolationError` at the first failure. Compares by `not <=`, so that NaN fails, too."""
    limits, exact = of.limits, of.exact
    equal_alone = all(map(limits.allow, of.gaps)) and (of.of_alone is None or of.of_alone.most <= limits.gradient)
    without = " With nothing drawn, the samples are right." if of.has_drawn and of.gaps and equal_alone else ""
    drawn = (
        "what is drawn at random mixes samples: a dropout, noise or kernel that training takes and a proof without "
        "draws does not see"
    )
    leak = drawn if without else "samples of the trainer's own row see each other"
    wrong = [size for size in of.moved if not size <= exact.moved]
    if wrong:
        _stop(leak, f"other neighbours moved hidden states by {worst(wrong):.3g} of up to {of.largest:.3g}{without}")
    if of.of_changed is not None:
        _check_changed(of.of_changed, of, drawn if without else "")
    for name, gap in zip(of.names, of.gaps, strict=False):
        if not limits.allow(gap):
            _stop(
                "a sample in the trainer's own row does not give what it gives alone",
                f"hidden states of {name} differ by {gap.most:.3g} of up to {of.largest:.3g}, allowed is "
                f"{limits.token if limits.token < gap.most else limits.alone:.3g}",
            )
    if of.of_alone is not None:
        _check_alone(of.of_alone, of)
    for name, (size, chance) in zip(of.names, of.noise_sizes, strict=False):
        if not abs(size - 1) <= NOISE_LIMIT + STEPS_OF_CHANCE * chance:
            _stop(
                "noise on embeddings is scaled by the length of the row, not by that of the sample, or is otherwise "
                "not what the sample gets alone",
                f"the noise of {name} is {size:.3g} times as large as alone",
            )


def _check_changed(changed: Gradients, of: InTraining, drawn: str) -> None:
    again = (
        "layers that are run again in the backward (gradient checkpointing) do something else than in the forward, "
        "such as without boundaries; or the backward of attention crosses them"
        if of.is_checkpointed
        else "the backward of a row crosses the boundaries of its samples"
    )
    if not of.beside <= of.exact.gradient:
        _stop(drawn or again, f"the loss of some samples has a gradient of {of.beside:.3g} at tokens of others")
    if not changed.loss <= of.exact.gradient:
        _stop(
            "the loss of a sample depends on the samples beside it",
            f"other neighbours changed its gradient by {changed.loss:.3g} of its length",
        )
    if not changed.inputs <= of.exact.gradient:
        _stop(drawn or again, f"other neighbours changed the gradient of samples by {changed.inputs:.3g} of its length")
    _check_parts(
        changed, of.exact.gradient, "other neighbours changed the gradient that samples give to", drawn or again
    )


def _check_alone(alone: Gradients, of: InTraining) -> None:
    limit = of.limits.gradient
    backward = (
        "the backward of the trainer's own row is not that of its samples one by one: a function with a backward of "
        "its own, something that is detached, or a layer that is run again otherwise (gradient checkpointing)"
    )
    if not alone.loss <= limit:
        _stop(
            "the trainer's loss of a row is not that of its samples",
            f"its gradient at the last layer differs by {alone.loss:.3g} of its length, allowed is {limit:.3g}",
        )
    if not alone.inputs <= limit:
        _stop(backward, f"the gradient differs by {alone.inputs:.3g} of its length, allowed is {limit:.3g}")
    _check_parts(alone, limit, f"allowed is {limit:.3g}, and there is another gradient of", backward)


def _check_parts(found: Gradients, limit: float, said: str, cause: str) -> None:
    wrong = {part: off for part, off in found.parts.items() if not off <= limit}
    if wrong:
        part = max(wrong, key=wrong.__getitem__)
        _stop(cause, f"{said} parameters of the {part} part, by {wrong[part]:.3g} of its length")


def _stop(cause: str, said: str) -> None:
    raise IsolationError(f"isolation does not hold in the first batch of the trainer: {cause}. ({said})", cause=cause)
