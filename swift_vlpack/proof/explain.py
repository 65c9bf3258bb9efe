"""Say where a failed proof begins: which samples, which of their tokens, and which module of the model first.

Runs only after a failure. If a sample moves when another one changes, the sequence is compared with itself before and
after that change; else each sample with itself alone. docs/isolation.md has the table of what is seen and what is said.

>>> cause_of(Evidence(attention="sdpa"))
'attention sdpa knows no boundaries; leave attn_impl unset, so that packing chooses its own'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from swift_vlpack.attention import attention
from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.gradients import VISION_PARTS
from swift_vlpack.proof.handed import why_not_apart
from swift_vlpack.proof.perturb import with_other_content
from swift_vlpack.proof.reference import OWN, QUICK, longest_for_own, own_attention, repeatable_training, untouched
from swift_vlpack.proof.runner import Ran, Runner, hooked, length_of
from swift_vlpack.proof.verdict import Limits
from swift_vlpack.rows.families import text_config_of
from swift_vlpack.rows.samples import Encoded

NO_BOUNDARIES = ("sdpa", "eager", "flex_attention")
INPUT = "before the first layer"
_STATEFUL = re.compile(r"linear_attn|linear_attention|mamba|conv|recurrent")
_NOT_MOVED = 1e-5
"""Share of a module's largest output by which it may change if nothing moved: the same kernels, the same numbers."""
_DEEPER = 4
"""The share of a limit for the end of a model that holds for each of its modules, because each adds to rounding."""
_NUM_COLUMNS = 16
"""Columns of a module's output that are kept for each token, enough to see that the token moved."""
OF_A_STATE = (
    "the model has a layer with a state (linear attention, a convolution), which must restart with every sample, and "
    "here it goes on; train without packing, or report the model"
)


class Tokens(NamedTuple):
    """The first and the last token of a sample that differ."""

    first: int
    last: int


class Origin(NamedTuple):
    """The first module whose inputs are right and whose output is not; `INPUT` if the layers get wrong input."""

    name: str
    kind: str = ""
    is_attention: bool = False
    is_stateful: bool = False
    """True for a module in a layer whose state goes from token to token, such as linear attention."""

    def __str__(self) -> str:
        return f"in {self.name} ({self.kind})" if self.kind else self.name


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations of a sequence that differs from its samples alone. Samples are counted from 0."""

    attention: str
    num_samples: int = 0
    moved: Mapping[tuple[int, int], Tokens] = field(default_factory=dict)
    """By (changed, moved): the tokens of sample `moved` that moved when `changed` got other tokens and media."""
    changed: Sequence[int] = ()
    """The samples that were changed: all of a short sequence, some of a long one."""
    units: Sequence[Sequence[int]] = ()
    """The samples of each shared prefix."""
    differs: Mapping[int, Tokens] = field(default_factory=dict)
    """By sample: the tokens that differ from the sample alone."""
    origin: Origin | None = None
    has_own_collator: bool = False
    """True if the caller's own collator makes the batch, and not the host."""
    not_apart: str | None = None
    """Why what that batch has does not keep samples apart; None if it does, or nothing in it explains it."""


def explain(runner: Runner, sequence: Sequence[Encoded], limits: Limits) -> tuple[str, str]:
    """Return the likeliest cause, and where the sequence differs, each in a sentence."""
    evidence = evidence_of(runner, sequence, limits)
    return cause_of(evidence), where(sequence, evidence)


def where(sequence: Sequence[Encoded], evidence: Evidence) -> str:
    """Say which sample differs first, at which tokens, and where in the model that begins; empty if none differs."""
    if not evidence.differs:
        return ""
    at, tokens = next(iter(evidence.differs.items()))
    name, origin = sequence[at].get("sample_id", "sample"), f", first {evidence.origin}" if evidence.origin else ""
    return (
        f"{name}, number {at + 1} of {len(sequence)} in its sequence, differs from token {tokens.first} to "
        f"{tokens.last} of {sequence[at]['length']}{origin}"
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def cause_of(evidence: Evidence) -> str:
    """Return one sentence that names the cause, and the remedy if one is known."""
    name, origin = evidence.attention, evidence.origin or Origin("attention", is_attention=True)
    if not evidence.has_own_collator and name in NO_BOUNDARIES:
        return f"attention {name} knows no boundaries; leave attn_impl unset, so that packing chooses its own"
    if not evidence.moved and not evidence.differs:
        return (
            "where gradients are asked for, as in training, the sequence is computed by something else than without "
            "them (a kernel with a backward of its own), and that does not keep samples apart"
        )
    if origin.is_stateful:
        return OF_A_STATE
    if evidence.moved and evidence.not_apart is not None:
        return evidence.not_apart
    if origin.name == INPUT:
        of = "images, videos or sounds of one sample reach another" if evidence.moved else "samples differ"
        return f"{of}, first {INPUT}: features of media at the wrong tokens, or positions that the model embeds"
    if "rotary" in origin.name:
        return (
            "rotary embeddings turn samples by other angles than alone: RoPE takes its frequencies by the length of "
            "the sequence or by its longest sample (dynamic, longrope); set packing_length to the length up to which "
            "it does not"
        )
    if not origin.is_attention:
        if evidence.moved:
            return f"samples see each other outside of attention, first {origin}"
        return f"a module gives a sample something else in the sequence than alone, first {origin}"
    return _of_boundaries(evidence) if evidence.moved else _of_attention(evidence)


def _of_boundaries(evidence: Evidence) -> str:
    if all(any({*pair} <= {*unit} for unit in evidence.units) for pair in evidence.moved):
        return "branches of one prefix see each other: attention takes a prefix and its branches for one sample"
    if any(moved < changed for changed, moved in evidence.moved):
        return "attention is not causal over the sequence and knows no boundaries"
    crossed = sorted(moved + 1 for changed, moved in evidence.moved if moved == changed + 1)
    if crossed and len(crossed) < sum(at + 1 < evidence.num_samples for at in evidence.changed):
        numbers = ", ".join(map(str, crossed))
        return f"the boundary before sample {numbers} of the sequence is lost or shifted, while others hold"
    return (
        "attention is causal and has no boundaries: a mask or a cache hides them from the attention function, or the "
        "model does not hand cu_seq_lens on; train without packing, or report the model"
    )


def _of_attention(evidence: Evidence) -> str:
    first = min(tokens.first for tokens in evidence.differs.values())
    hint = "scaling, a soft cap, a window, or another mask of the model's own" if first else "sinks, or values changed"
    return f"attention {evidence.attention} is not the model's own: samples differ from token {first} on ({hint})"


# -- what is seen -----------------------------------------------------------------------------------------------------


def evidence_of(runner: Runner, sequence: Sequence[Encoded], limits: Limits) -> Evidence:
    """Examine a sequence that failed the proof, sample by sample and module by module."""
    config, name = runner.model.config, attention.name_of(runner.model.config)
    with untouched(runner.model), repeatable_training(runner.model):
        packed = runner.run(sequence, packed=True)
        alone = (_alone(runner, sample) for sample in sequence)
        differs = _wrong([(packed.of(at), one.of(0)) for at, one in enumerate(alone)], limits.states)
        changed = samples_to_change(len(sequence), next(iter(differs), 0))
        moved: dict[tuple[int, int], Tokens] = {}
        for at in changed:
            after = runner.run(_with_other(runner, sequence, at), packed=True)
            wrong = _wrong([(packed.of(n), after.of(n)) for n in range(len(sequence))], _NOT_MOVED)
            moved |= {(at, n): tokens for n, tokens in wrong.items() if n != at}
        origin = _origin_of(runner, sequence, moved, differs, limits)
        with runner.batches.batch(sequence, packed=True) as batch:
            slots = batch.slots or packed.slots
            not_apart = why_not_apart(batch.inputs, slots, config, name) if runner.has_own_collator else None
    return Evidence(
        attention=name,
        num_samples=len(sequence),
        moved=moved,
        changed=changed,
        units=units_in(sequence),
        differs=differs,
        origin=origin,
        has_own_collator=runner.has_own_collator,
        not_apart=not_apart,
    )


def samples_to_change(num_samples: int, worst: int) -> tuple[int, ...]:
    """Choose samples to change: all if they are few, else the neighbours of `worst` and both ends of the sequence.

    Each changed sample costs a forward of the whole sequence.
    """
    around = {0, 1, *range(worst - 2, worst + 3), num_samples - 2, num_samples - 1}
    return tuple(at for at in range(num_samples) if num_samples <= len(around) or at in around)


def _with_other(runner: Runner, sequence: Sequence[Encoded], at: int) -> list[Encoded]:
    changed = list(sequence)
    changed[at] = with_other_content(sequence[at], runner.is_ordinary)
    return changed


def _alone(runner: Runner, sample: Encoded) -> Ran:
    is_short = length_of(sample) <= longest_for_own(runner.model)
    with own_attention(runner.model, OWN if is_short else QUICK):
        return runner.run([sample], packed=False)


def _wrong(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], allowed: float) -> dict[int, Tokens]:
    """Return the first and the last token of each sample that differs by more than this share of its largest state."""
    found = {}
    for at, (one, other) in enumerate(pairs):
        off = (one.float() - other.float()).abs().amax(dim=-1) / max(1e-6, float(other.abs().max()))
        if wrong := torch.nonzero(~(off <= allowed)).flatten().tolist():
            found[at] = Tokens(wrong[0], wrong[-1])
    return found


class Part(NamedTuple):
    """Some columns of what a module was given and gave, for each token of a sample."""

    given: torch.Tensor | None
    made: torch.Tensor


def _origin_of(
    runner: Runner,
    sequence: Sequence[Encoded],
    moved: Mapping[tuple[int, int], Tokens],
    differs: Mapping[int, Tokens],
    limits: Limits,
) -> Origin | None:
    """Return the first module of which a sample's input is right and its output is not."""
    if moved:
        changed, at = min(moved)
        there = parts_of(runner, _with_other(runner, sequence, changed), at)
    elif differs:
        at = next(iter(differs))
        there = parts_of(runner, [sequence[at]], 0, packed=False)
    else:
        return None
    allowed, here = _NOT_MOVED if moved else limits.states / _DEEPER, parts_of(runner, sequence, at)
    both = {name: (part, there[name]) for name, part in here.items() if name in there}
    is_given_other = {name: _differ(one.given, other.given, allowed) for name, (one, other) in both.items()}
    if next((is_other for is_other in is_given_other.values() if is_other is not None), False):
        return Origin(INPUT)
    wrong = [name for name, (one, other) in both.items() if _differ(one.made, other.made, allowed)]
    fed = [name for name in wrong if is_given_other[name] is False]
    return _described(runner.model, [*fed, *wrong][0]) if wrong else None


def parts_of(runner: Runner, sequence: Sequence[Encoded], at: int, *, packed: bool = True) -> dict[str, Part]:
    """Return what each module was given and gave for one sample, in the order in which the modules finish."""
    seen: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def note(name: str, module: Any, args: Any, kwargs: Any, made: Any) -> None:
        given = _columns(args[0] if args else kwargs.get("hidden_states", kwargs.get("inputs_embeds")))
        columns = _columns(made[0] if isinstance(made, tuple) else made)
        if columns is not None:
            seen.setdefault(name, (given, columns))

    # Embeddings are seen as the input of the first module after them, which has images in it.
    others = ("embed", *VISION_PARTS)
    named = ((name, one) for name, one in runner.model.named_modules() if name and not any(o in name for o in others))
    with hooked((module, partial(note, name)) for name, module in named):
        ran = runner.run(sequence, packed=True) if packed else _alone(runner, sequence[at])
    parts = {}
    for name, both in seen.items():
        given, made = (_own_part(one, ran, at) for one in both)
        if made is not None:
            parts[name] = Part(given, made)
    return parts


def _described(model: Any, name: str) -> Origin:
    """Describe a module; it counts as attention if it, or a module around it, is attention."""
    path = name.split(".")
    kinds = [type(model.get_submodule(".".join(path[: depth + 1]))).__name__ for depth in range(len(path))]
    is_attention = any("attention" in kind.lower() or "attn" in part for kind, part in zip(kinds, path, strict=True))
    types, layer = getattr(text_config_of(model.config), "layer_types", None), re.search(r"layers\.(\d+)", name)
    layer_type = types[int(layer[1])] if types and layer and int(layer[1]) < len(types) else ""
    return Origin(name, kinds[-1], is_attention, bool(_STATEFUL.search(layer_type) or _STATEFUL.search(name)))


def _columns(value: Any) -> torch.Tensor | None:
    """Copy a few columns of what a module takes or gives; a view would keep the whole of it."""
    is_states = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.numel() and value.is_floating_point()
    if not is_states:
        return None
    return value.detach()[..., :: -(-value.shape[-1] // _NUM_COLUMNS)].to("cpu", torch.float32, copy=True)


def _own_part(made: torch.Tensor | None, ran: Ran, at: int) -> torch.Tensor | None:
    """Cut columns to the tokens of one sample; None if they have no value for each token."""
    num_rows, num_tokens = ran.states.shape[:2]
    # Some modules flatten rows and tokens into one dimension.
    per_token = None if made is None else made.reshape(-1, made.shape[-1])
    if per_token is None or len(per_token) != num_rows * num_tokens:
        return None
    return ran.slots[at].of(per_token.reshape(num_rows, num_tokens, -1))


def _differ(one: torch.Tensor | None, other: torch.Tensor | None, allowed: float) -> bool | None:
    """Tell whether two values differ; None if they cannot be compared."""
    if one is None or other is None or one.shape != other.shape:
        return None
    return not float((one - other).abs().max()) <= allowed * max(1e-6, float(other.abs().max()))
