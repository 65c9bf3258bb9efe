"""Say where a failed proof begins: which samples, which of their tokens, and which module of the model first.

Runs only after a failure. If a sample moves when another one changes, the sequence is compared with itself before and
after that change; else each sample with itself alone. docs/isolation.md has the table of what is seen and what is said.

>>> cause_of(Evidence(attention="sdpa"))
'attention sdpa knows no boundaries; leave attn_impl unset, so that packing chooses its own'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from swift_vlpack.attention import attention
from swift_vlpack.attention.sequence_effects import BY_LONGEST
from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.handed import why_not_apart
from swift_vlpack.proof.limits import Limits, gap_by_token
from swift_vlpack.proof.perturb import can_be_replaced, kinds_of_media, replaced, with_other_media
from swift_vlpack.proof.proof_model import VISION_PARTS, ProofModel, RunResult
from swift_vlpack.proof.reference import repeatable_training, run_alone, untouched
from swift_vlpack.rows.families import text_config_of
from swift_vlpack.rows.samples import Encoded

NO_BOUNDARIES = ("sdpa", "eager", "flex_attention")
INPUT = "before the first layer"
_STATEFUL = re.compile(r"linear_attn|linear_attention|mamba|conv|recurrent")
_NOT_MOVED = 1e-5
"""Share of a module's largest output by which it may change if nothing moved: the same kernels, the same numbers."""
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
    rope_type: str = "default"
    has_own_collator: bool = False
    """True if the caller's own collator makes the batch, and not the host."""
    not_apart: str | None = None
    """Why what that batch has does not keep samples apart; None if it does, or nothing in it explains it."""


def explain(proof_model: ProofModel, sequence: Sequence[Encoded], limits: Limits) -> tuple[str, str]:
    """Return the likeliest cause, and where the sequence differs, each in a sentence."""
    evidence = evidence_of(proof_model, sequence, limits)
    return cause_of(evidence), where(sequence, evidence)


def evidence_of(proof_model: ProofModel, sequence: Sequence[Encoded], limits: Limits) -> Evidence:
    """Examine a sequence that failed the proof, sample by sample and module by module."""
    seen = _Seen(proof_model, sequence, limits)
    with untouched(proof_model.model):
        in_evaluation = seen.differs()
        with repeatable_training(proof_model.model):
            differs = seen.differs()
            changed = samples_to_change(len(sequence), next(iter(differs), 0))
            moved, by_media = seen.moved(changed, seen.other_tokens), seen.moved(changed, _other_media)
            origin = seen.origin(moved, by_media, differs)
    return Evidence(
        attention=attention.name_of(proof_model.model.config),
        num_samples=len(sequence),
        moved=moved,
        moved_by_media=by_media,
        changed=changed,
        units=units_in(sequence),
        differs=differs,
        origin=origin,
        is_only_in_training=bool(differs) and not in_evaluation,
        has_own_collator=proof_model.has_own_collator,
        not_apart=seen.not_apart() if proof_model.has_own_collator else None,
        **facts_of(proof_model.model.config),
    )


def facts_of(config: Any) -> dict[str, Any]:
    """Read the window and the type of RoPE from a model's config."""
    text = text_config_of(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # Some models have RoPE parameters for each kind of layer: take the first.
    rope = next((one for one in rope.values() if isinstance(one, dict)), rope)
    # Llama 4 calls its window chunks; Qwen names a window and may not use it.
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    return {
        "window": window if isinstance(window, int) and getattr(text, "use_sliding_window", True) else None,
        "rope_type": str(rope.get("rope_type") or rope.get("type") or "default"),
    }


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
    origin = evidence.origin or Origin("attention", is_attention=True)
    if evidence.rope_type in BY_LONGEST and len(evidence.differs) < evidence.num_samples:
        return (
            f"the model's RoPE is {evidence.rope_type}, which takes its frequencies by the longest sample of the "
            "sequence; set packing_length to the length up to which it does not"
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


class _Seen:
    def __init__(self, proof_model: ProofModel, sequence: Sequence[Encoded], limits: Limits) -> None:
        self.proof_model, self.sequence, self.limits = proof_model, sequence, limits

    def other_tokens(self, sample: Encoded) -> Encoded | None:
        is_ordinary = self.proof_model.is_ordinary
        return replaced(sample, is_ordinary) if can_be_replaced(sample, is_ordinary) else None

    def differs(self) -> dict[int, Tokens]:
        packed = self.proof_model.run(self.sequence, packed=True).logits
        alone = (run_alone(self.proof_model, sample).logits[0] for sample in self.sequence)
        return self._wrong(packed, alone, self.limits.alone)

    def moved(self, changed: Sequence[int], change: Callable[[Encoded], Encoded | None]) -> dict[Any, Tokens]:
        """Change samples one at a time, with those that share their prefix if its media change."""
        before, found = self.proof_model.run(self.sequence, packed=True).logits, {}
        for at in changed:
            others = self._changed(at, change)
            if others is not None:
                after = self.proof_model.run(
                    [others.get(n, s) for n, s in enumerate(self.sequence)], packed=True
                ).logits
                wrong = self._wrong(before, after, self.limits.moved)
                found.update({(at, moved): tokens for moved, tokens in wrong.items() if moved not in others})
        return found

    def origin(
        self, moved: Mapping[Any, Tokens], by_media: Mapping[Any, Tokens], differs: Mapping[int, Tokens]
    ) -> Origin | None:
        """Return the first module that gives a sample another output than it should."""
        if moved or by_media:
            (changed, at), change = (min(moved), self.other_tokens) if moved else (min(by_media), _other_media)
            others = self._changed(changed, change) or {}
            here = self._outputs(self.sequence, at)
            there = self._outputs([others.get(n, s) for n, s in enumerate(self.sequence)], at)
        elif differs:
            at = next(iter(differs))
            here, there = self._outputs(self.sequence, at), self._outputs([self.sequence[at]], 0, packed=False)
        else:
            return None
        allowed = _NOT_MOVED if moved or by_media else self.limits.relative
        for name, one in here.items():
            other = there.get(name)
            if other is None or other.shape != one.shape:
                continue
            if not float((one - other).abs().max()) <= allowed * max(1e-6, float(other.abs().max())):
                return self._origin(name)
        return None

    def not_apart(self) -> str | None:
        config = self.proof_model.model.config
        with self.proof_model.batches.batch(self.sequence, packed=True) as batch:
            return why_not_apart(batch.inputs, batch.slots, config, attention.name_of(config))

    def _changed(self, at: int, change: Callable[[Encoded], Encoded | None]) -> dict[int, Encoded] | None:
        unit = next((unit for unit in units_in(self.sequence) if at in unit), [at]) if change is _other_media else [at]
        others = {n: made for n in unit if (made := change(self.sequence[n])) is not None}
        return others if at in others else None

    def _wrong(self, ones: Any, others: Any, allowed: float) -> dict[int, Tokens]:
        found = {}
        for at, (one, other) in enumerate(zip(ones, others, strict=True)):
            wrong = torch.nonzero(~(gap_by_token(one, other) <= allowed)).flatten().tolist()
            if wrong:
                found[at] = Tokens(wrong[0], wrong[-1])
        return found

    def _outputs(self, sequence: Sequence[Encoded], at: int, *, packed: bool = True) -> dict[str, torch.Tensor]:
        """Return some columns of what each module gives for one sample, in the order in which the modules finish."""
        seen: dict[str, torch.Tensor] = {}

        def note(name: str, made: Any) -> None:
            made = made[0] if isinstance(made, tuple) else made
            if isinstance(made, torch.Tensor) and made.dim() >= 2 and made.numel() and made.is_floating_point():
                columns = made.detach()[..., :: -(-made.shape[-1] // _NUM_COLUMNS)]
                # A copy, because a view would keep the whole output, and a sequence has thousands of tokens.
                seen.setdefault(name, columns.to("cpu", torch.float32, copy=True))

        model = self.proof_model.model
        handles = [
            module.register_forward_hook(lambda module, args, made, name=name: note(name, made))
            for name, module in model.named_modules()
            if name and "rotary" not in name and not any(part in name for part in VISION_PARTS)
        ]

        def enters(module: Any, args: Any, kwargs: Any) -> None:
            note(INPUT, args[0] if args else kwargs["hidden_states"])

        first = decoder_layers(model)[:1]
        handles += [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in first]
        try:
            run = self.proof_model.run(sequence, packed=True) if packed else run_alone(self.proof_model, sequence[at])
        finally:
            for handle in handles:
                handle.remove()
        # Embeddings are compared as the input of the first layer, which has images in it.
        names = [name for name in seen if name != INPUT and "embed" not in name]
        parts = {name: _own_part(seen[name], run, at) for name in [INPUT, *names] if name in seen}
        return {name: part for name, part in parts.items() if part is not None}

    def _origin(self, name: str) -> Origin:
        """Describe a module; it counts as attention if it, or a module around it, is attention."""
        if name == INPUT:
            return Origin(INPUT)
        model, path = self.proof_model.model, name.split(".")
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


def _own_part(made: torch.Tensor, run: RunResult, at: int) -> torch.Tensor | None:
    """Cut a module's output to the tokens of one sample; None if the output has no value for each token."""
    num_rows, num_tokens = run.shape
    # Some modules flatten rows and tokens into one dimension.
    per_token = made.reshape(-1, made.shape[-1])
    if len(per_token) != num_rows * num_tokens:
        return None
    return run.slots[at].of(per_token.reshape(num_rows, num_tokens, -1))
