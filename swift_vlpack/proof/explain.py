"""Say where a failed proof begins: which samples, which of their tokens, and which module of the model first.

Runs only after a failure. If a sample moves when another one changes, the sequence is compared with itself before and
after that change; else each sample with itself alone. docs/isolation.md has the table of what is seen and what is said.

>>> cause_of(Evidence(attention="sdpa"))
'attention sdpa knows no boundaries; leave attn_impl unset, so that packing chooses its own'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from swift_vlpack.attention import attention
from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.gradients import VISION_PARTS
from swift_vlpack.proof.handed import why_not_apart
from swift_vlpack.proof.perturb import can_be_replaced, kinds_of_media, replaced, with_other_media
from swift_vlpack.proof.reference import OWN, QUICK, longest_for_own, own_attention, repeatable_training, untouched
from swift_vlpack.proof.runner import Ran, Runner, length_of, rotary_modules
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


class Tokens(NamedTuple):
    """The first and the last token of a sample that differ."""

    first: int
    last: int


class Origin(NamedTuple):
    """The first module whose output differs; `INPUT` if the input of the first layer differs already."""

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
    """By (changed, moved): the tokens of sample `moved` that moved when the tokens of `changed` were replaced."""
    moved_by_media: Mapping[tuple[int, int], Tokens] = field(default_factory=dict)
    changed: Sequence[int] = ()
    """The samples that were changed: all of a short sequence, some of a long one."""
    units: Sequence[Sequence[int]] = ()
    """The samples of each shared prefix."""
    differs: Mapping[int, Tokens] = field(default_factory=dict)
    """By sample: the tokens that differ from the sample alone."""
    origin: Origin | None = None
    is_only_in_training: bool = False
    window: int | None = None
    is_turned_otherwise: bool = False
    """True if rotary embeddings turn a sample by other angles in the sequence than alone, at equal positions."""
    has_own_collator: bool = False
    """True if the caller's own collator makes the batch, and not the host."""
    not_apart: str | None = None
    """Why what that batch has does not keep samples apart; None if it does, or nothing in it explains it."""


def explain(runner: Runner, sequence: Sequence[Encoded], limits: Limits) -> tuple[str, str]:
    """Return the likeliest cause, and where the sequence differs, each in a sentence."""
    evidence = evidence_of(runner, sequence, limits)
    return cause_of(evidence), where(sequence, evidence)


def evidence_of(runner: Runner, sequence: Sequence[Encoded], limits: Limits) -> Evidence:
    """Examine a sequence that failed the proof, sample by sample and module by module."""
    seen = _Seen(runner, sequence, limits)
    with untouched(runner.model):
        in_evaluation = seen.differs()
        with repeatable_training(runner.model):
            differs = seen.differs()
            changed = samples_to_change(len(sequence), next(iter(differs), 0))
            moved, by_media = seen.moved(changed, seen.other_tokens), seen.moved(changed, _other_media)
            origin = seen.origin(moved, by_media, differs)
            is_turned = not (moved or by_media) and seen.is_turned_otherwise(differs)
    return Evidence(
        attention=attention.name_of(runner.model.config),
        num_samples=len(sequence),
        moved=moved,
        moved_by_media=by_media,
        changed=changed,
        units=units_in(sequence),
        differs=differs,
        origin=origin,
        is_only_in_training=bool(differs) and not in_evaluation,
        has_own_collator=runner.has_own_collator,
        not_apart=seen.not_apart() if runner.has_own_collator else None,
        window=window_of(runner.model.config),
        is_turned_otherwise=is_turned,
    )


def window_of(config: Any) -> int | None:
    """Read the sliding window from a model's config; None if it has none."""
    text = text_config_of(config)
    # Llama 4 calls its window chunks; Qwen names a window and may not use it.
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    return window if isinstance(window, int) and getattr(text, "use_sliding_window", True) else None


def samples_to_change(num_samples: int, worst: int) -> tuple[int, ...]:
    """Choose samples to change: all if they are few, else the neighbours of `worst` and both ends of the sequence.

    Each changed sample costs a forward of the whole sequence.
    """
    around = {0, 1, *range(worst - 2, worst + 3), num_samples - 2, num_samples - 1}
    return tuple(at for at in range(num_samples) if num_samples <= len(around) or at in around)


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


def of_linear_attention() -> str:
    """Return the cause for a layer whose state runs on over the boundaries of samples."""
    return (
        "the model has a layer with a state (linear attention, a convolution), which must restart with every sample, "
        "and here it goes on; train without packing, or report the model"
    )


def cause_of(evidence: Evidence) -> str:
    """Return one sentence that names the cause, and the remedy if one is known."""
    if not evidence.has_own_collator and evidence.attention in NO_BOUNDARIES:
        name = evidence.attention
        return f"attention {name} knows no boundaries; leave attn_impl unset, so that packing chooses its own"
    mode = "in training mode, not in evaluation, " if evidence.is_only_in_training else ""
    return mode + (_of_moved(evidence) if evidence.moved or evidence.moved_by_media else _of_differing(evidence))


def _of_moved(evidence: Evidence) -> str:
    origin = evidence.origin or Origin("attention", is_attention=True)
    if not evidence.moved:
        return (
            f"images, videos or sounds of one sample reach another, first {origin}: their features are put at the "
            "tokens of another sample, or the vision tower mixes them"
        )
    if origin.is_stateful:
        return of_linear_attention()
    if evidence.not_apart is not None:
        return evidence.not_apart
    if not origin.is_attention:
        return f"samples see each other outside of attention, first {origin}"
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


def _of_differing(evidence: Evidence) -> str:
    """Name the cause if no sample moved when another sample changed, but samples differ packed and alone."""
    if not evidence.differs:
        return (
            "where gradients are asked for, as in training, the sequence is computed by something else than without "
            "them (a kernel with a backward of its own), and that does not keep samples apart"
        )
    origin = evidence.origin or Origin("attention", is_attention=True)
    if evidence.is_turned_otherwise:
        return (
            "rotary embeddings turn samples by other angles than alone: RoPE takes its frequencies by the length of "
            "the sequence or by its longest sample (dynamic, longrope); set packing_length to the length up to which "
            "it does not"
        )
    if origin.is_stateful:
        return of_linear_attention()
    if origin.name == INPUT:
        return f"samples differ {INPUT}: features of media at the wrong tokens, or positions that the model embeds"
    if not origin.is_attention:
        return f"a module gives a sample something else in the sequence than alone, first {origin}"
    first = min((tokens.first for tokens in evidence.differs.values()), default=0)
    hint = "scaling, a soft cap, or a mask of the model's own" if first else "sinks, or values changed"
    if evidence.window and first >= evidence.window - 1:
        hint = f"its window is {evidence.window} tokens"
    return f"attention {evidence.attention} is not the model's own: samples differ from token {first} on ({hint})"


# -- what is seen -----------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some columns of what a module was given and gave, for each token of a sample."""

    given: torch.Tensor | None
    made: torch.Tensor


class _Seen:
    def __init__(self, runner: Runner, sequence: Sequence[Encoded], limits: Limits) -> None:
        self.runner, self.sequence, self.limits = runner, sequence, limits

    def other_tokens(self, sample: Encoded) -> Encoded | None:
        is_ordinary = self.runner.is_ordinary
        return replaced(sample, is_ordinary) if can_be_replaced(sample, is_ordinary) else None

    def packed(self, sequence: Sequence[Encoded]) -> Ran:
        return self.runner.run(sequence, packed=True)

    def alone(self, sample: Encoded) -> Ran:
        is_short = length_of(sample) <= longest_for_own(self.runner.model)
        with own_attention(self.runner.model, OWN if is_short else QUICK):
            return self.runner.run([sample], packed=False)

    def differs(self) -> dict[int, Tokens]:
        packed = self.packed(self.sequence)
        alone = (self.alone(sample).of(0) for sample in self.sequence)
        return _wrong([packed.of(at) for at in range(len(self.sequence))], alone, self.limits.states)

    def moved(self, changed: Sequence[int], change: Callable[[Encoded], Encoded | None]) -> dict[Any, Tokens]:
        """Change samples one at a time, with those that share their prefix if its media change."""
        before, found = self.packed(self.sequence), {}
        for at in changed:
            others = self._changed(at, change)
            if others is not None:
                after = self.packed([others.get(n, s) for n, s in enumerate(self.sequence)])
                ones, twos = ([ran.of(n) for n in range(len(self.sequence))] for ran in (before, after))
                wrong = _wrong(ones, twos, _NOT_MOVED)
                found.update({(at, moved): tokens for moved, tokens in wrong.items() if moved not in others})
        return found

    def origin(
        self, moved: Mapping[Any, Tokens], by_media: Mapping[Any, Tokens], differs: Mapping[int, Tokens]
    ) -> Origin | None:
        """Return the first module of which a sample's input is right and its output is not."""
        if moved or by_media:
            (changed, at), change = (min(moved), self.other_tokens) if moved else (min(by_media), _other_media)
            others = self._changed(changed, change) or {}
            here = self._parts(self.sequence, at)
            there = self._parts([others.get(n, s) for n, s in enumerate(self.sequence)], at)
        elif differs:
            at = next(iter(differs))
            here, there = self._parts(self.sequence, at), self._parts([self.sequence[at]], 0, packed=False)
        else:
            return None
        allowed = _NOT_MOVED if moved or by_media else self.limits.states / _DEEPER
        wrong = [name for name, part in here.items() if name in there and _differ(part.made, there[name].made, allowed)]
        fed = [name for name in wrong if not _differ(here[name].given, there[name].given, allowed)]
        first = INPUT if INPUT in wrong else next(iter([*fed, *wrong]), None)
        return None if first is None else self._origin(first)

    def is_turned_otherwise(self, differs: Mapping[int, Tokens]) -> bool:
        """Tell whether rotary embeddings give a sample other angles in the sequence than alone."""
        for at in differs:
            here, there = self._angles(self.sequence, at), self._angles([self.sequence[at]], 0, packed=False)
            if any(_differ(one, other, self.limits.states) for one, other in zip(here, there, strict=False)):
                return True
        return False

    def _angles(self, sequence: Sequence[Encoded], at: int, *, packed: bool = True) -> list[torch.Tensor]:
        """Return what rotary embeddings of the language model give one sample."""
        seen: list[torch.Tensor] = []

        def note(module: Any, args: Any, made: Any) -> None:
            seen.extend(one.detach() for one in made if isinstance(one, torch.Tensor))

        handles = [module.register_forward_hook(note) for module in rotary_modules(self.runner.model)]
        try:
            ran = self.packed(sequence) if packed else self.alone(sequence[at])
        finally:
            for handle in handles:
                handle.remove()
        fitting = [one for one in seen if one.dim() == 3 and one.shape[1] == ran.states.shape[1]]
        return [ran.slots[at].of(one.expand(len(ran.states), -1, -1)) for one in fitting]

    def not_apart(self) -> str | None:
        config = self.runner.model.config
        with self.runner.batches.batch(self.sequence, packed=True) as batch:
            return why_not_apart(batch.inputs, batch.slots, config, attention.name_of(config))

    def _changed(self, at: int, change: Callable[[Encoded], Encoded | None]) -> dict[int, Encoded] | None:
        unit = next((unit for unit in units_in(self.sequence) if at in unit), [at]) if change is _other_media else [at]
        others = {n: made for n in unit if (made := change(self.sequence[n])) is not None}
        return others if at in others else None

    def _parts(self, sequence: Sequence[Encoded], at: int, *, packed: bool = True) -> dict[str, Part]:
        """Return what each module was given and gave for one sample, in the order in which the modules finish."""
        seen: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}

        def note(name: str, args: Any, kwargs: Any, made: Any) -> None:
            given = _columns(args[0] if args else kwargs.get("hidden_states", kwargs.get("inputs_embeds")))
            columns = _columns(made[0] if isinstance(made, tuple) else made)
            if columns is not None:
                seen.setdefault(name, (given, columns))

        model = self.runner.model
        handles = [
            module.register_forward_hook(
                lambda module, args, kwargs, made, name=name: note(name, args, kwargs, made), with_kwargs=True
            )
            for name, module in model.named_modules()
            if name and "rotary" not in name and not any(part in name for part in VISION_PARTS)
        ]

        def enters(module: Any, args: Any, kwargs: Any) -> None:
            note(INPUT, (), {}, args[0] if args else kwargs["hidden_states"])

        first = decoder_layers(model)[:1]
        handles += [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in first]
        try:
            ran = self.packed(sequence) if packed else self.alone(sequence[at])
        finally:
            for handle in handles:
                handle.remove()
        # Embeddings are compared as the input of the first layer, which has images in it.
        names = [name for name in seen if name != INPUT and "embed" not in name]
        parts = {}
        for name in [INPUT, *names]:
            given, made = (_own_part(one, ran, at) for one in seen.get(name, (None, None)))
            if made is not None:
                parts[name] = Part(given, made)
        return parts

    def _origin(self, name: str) -> Origin:
        """Describe a module; it counts as attention if it, or a module around it, is attention."""
        if name == INPUT:
            return Origin(INPUT)
        model, path = self.runner.model, name.split(".")
        kinds = [type(model.get_submodule(".".join(path[: depth + 1]))).__name__ for depth in range(len(path))]
        is_attention = any(
            "attention" in kind.lower() or "attn" in part for kind, part in zip(kinds, path, strict=True)
        )
        types, layer = getattr(text_config_of(model.config), "layer_types", None), re.search(r"layers\.(\d+)", name)
        layer_type = types[int(layer[1])] if types and layer and int(layer[1]) < len(types) else ""
        is_stateful = bool(_STATEFUL.search(layer_type) or _STATEFUL.search(name))
        return Origin(name, kinds[-1], is_attention, is_stateful)


def _other_media(sample: Encoded) -> Encoded | None:
    return with_other_media(sample) if kinds_of_media(sample) else None


def decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """Return the layers of the language model: the longest list of modules outside of the vision tower."""
    lists: list[Sequence[torch.nn.Module]] = [
        list(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and not any(part in name for part in VISION_PARTS)
    ]
    return max(lists, key=len, default=())


def _columns(value: Any) -> torch.Tensor | None:
    """Copy a few columns of what a module takes or gives; a view would keep the whole of it."""
    is_states = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.numel() and value.is_floating_point()
    if not is_states:
        return None
    return value.detach()[..., :: -(-value.shape[-1] // _NUM_COLUMNS)].to("cpu", torch.float32, copy=True)


def _own_part(made: torch.Tensor | None, ran: Ran, at: int) -> torch.Tensor | None:
    """Cut columns to the tokens of one sample; None if they have no value for each token."""
    if made is None:
        return None
    num_rows, num_tokens = ran.states.shape[:2]
    # Some modules flatten rows and tokens into one dimension.
    per_token = made.reshape(-1, made.shape[-1])
    if len(per_token) != num_rows * num_tokens:
        return None
    return ran.slots[at].of(per_token.reshape(num_rows, num_tokens, -1))


def _differ(one: torch.Tensor | None, other: torch.Tensor | None, allowed: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return not float((one - other).abs().max()) <= allowed * max(1e-6, float(other.abs().max()))


def _wrong(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor], allowed: float) -> dict[int, Tokens]:
    """Return the first and the last token of each sample that differs by more than this share of its largest state."""
    found = {}
    for at, (one, other) in enumerate(zip(ones, others, strict=True)):
        largest = max(1e-6, float(other.abs().max()))
        off = (one.float() - other.float()).abs().amax(dim=-1) / largest
        wrong = torch.nonzero(~(off <= allowed)).flatten().tolist()
        if wrong:
            found[at] = Tokens(wrong[0], wrong[-1])
    return found
