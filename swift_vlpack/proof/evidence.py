"""Collect the evidence for the cause of a failed proof. Runs only after a failure.

It shows which sample moved which, at which tokens, and in which layer the difference begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from swift_vlpack.attention import attention
from swift_vlpack.feed.units import IN_PREFIX
from swift_vlpack.proof.branches import num_prefix_of, units_in
from swift_vlpack.proof.causes import (
    ALONE,
    ANOTHER,
    EMBEDDINGS,
    MIXED,
    Evidence,
    Module,
    Profile,
    facts_of,
)
from swift_vlpack.proof.handed import Handed, handed_in
from swift_vlpack.proof.limits import Limits, gap_by_token, gap_of
from swift_vlpack.proof.perturb import (
    can_be_replaced,
    kinds_of_media,
    media_of,
    replaced,
    shape_of,
    with_media_of,
    with_other_media,
)
from swift_vlpack.proof.proof_model import VISION_PARTS, ProofModel, RunResult, length_of
from swift_vlpack.proof.reference import own_attention_for, repeatable_training, run_alone, untouched
from swift_vlpack.rows.samples import Encoded

_NOT_MOVED = 1e-5
"""A module's output counts as moved if it changes by more than this share of its largest value. One limit serves all
data types, because the same kernels compute the output from the same numbers."""
_NUM_COLUMNS = 16
"""Columns of a module's output that are kept for each token, enough to see that the token moved."""


def evidence_of(proof_model: ProofModel, sequence: Sequence[Encoded], limits: Limits) -> Evidence:
    """Examine a sequence that failed the proof, sample by sample and layer by layer."""
    facts = facts_of(proof_model.model.config)
    with untouched(proof_model.model):
        # If the failure shows in training mode only, its cause is a kernel or a draw that evaluation does not use.
        in_evaluation = _profiles(proof_model, sequence, limits)
        with repeatable_training(proof_model.model):
            profiles = _profiles(proof_model, sequence, limits)
            worst = next((at for at, profile in enumerate(profiles) if profile.differs), None)
            to_change = samples_to_change(len(sequence), worst or 0)
            moved = _moved(
                proof_model, sequence, limits, to_change, lambda sample: _with_other_tokens(proof_model, sample)
            )
            siblings = {at: unit for unit in units_in(sequence) for at in unit}  # which have their media in common
            by_media = _moved(proof_model, sequence, limits, to_change, _with_other_media, siblings)
            layer = None if worst is None else first_layer(proof_model, sequence, worst, limits)
            module = _module_of(proof_model, sequence, limits, worst, moved)
            given = _given(proof_model, sequence, profiles, limits)
            unpacked = _unpacked(proof_model, sequence, profiles, limits)
            handed = _handed(proof_model, sequence)
    return Evidence(
        attention=attention.name_of(proof_model.model.config),
        profiles=tuple(profiles),
        changed=to_change,
        moved=moved,
        moved_by_media=by_media,
        given=given,
        layer=layer,
        module=module,
        unpacked=unpacked,
        handed=handed,
        layer_type=_type_of(layer, facts["model_types"]),
        is_only_in_training=any(p.differs for p in profiles) and not any(p.differs for p in in_evaluation),
        **facts,
    )


def _handed(proof_model: ProofModel, sequence: Sequence[Encoded]) -> Handed | None:
    """Read how the batch tells where samples start, if it is not the host that makes it."""
    if not proof_model.has_own_collator:
        return None
    with proof_model.batches.batch(sequence, packed=True) as batch:
        return handed_in(batch.inputs, batch.slots, proof_model.model.config)


def samples_to_change(num_samples: int, worst: int) -> tuple[int, ...]:
    """Choose samples to change: all if they are few, else the neighbours of `worst` and both ends of the sequence.

    Each changed sample costs a forward of the whole sequence.
    """
    around = {0, 1, *range(worst - 2, worst + 3), num_samples - 2, num_samples - 1}
    return tuple(at for at in range(num_samples) if num_samples <= len(around) or at in around)


def where(sequence: Sequence[Encoded], evidence: Evidence) -> str:
    """Say where the sequence differs: the first sample that does, its tokens and the layer; empty if none differs."""
    found = next(((at, one) for at, one in enumerate(evidence.profiles) if one.differs), None)
    if found is None:
        return ""
    at, profile = found
    name = sequence[at].get("sample_id", "")
    layer = {None: "", EMBEDDINGS: ", before the first layer"}.get(evidence.layer, f", first in layer {evidence.layer}")
    return (
        f"{name or 'sample'}, number {at + 1} of {len(sequence)} in its sequence, differs from token "
        f"{profile.first} to {profile.last} of {profile.num_tokens}{layer}"
    )


def first_layer(proof_model: ProofModel, sequence: Sequence[Encoded], sample: int, limits: Limits) -> int | None:
    """Return the first layer after which a sample's hidden states in the sequence differ from the sample alone.

    Returns `EMBEDDINGS` if the input of the first layer differs, None if nothing differs or nothing can be compared.
    """
    layers = decoder_layers(proof_model.model)
    with hidden_states(layers) as packed:
        together = proof_model.run(sequence, packed=True)
    with hidden_states(layers) as alone:
        ran = run_alone(proof_model, sequence[sample])
    for number, (here, there) in enumerate(zip(packed, alone, strict=False), start=EMBEDDINGS):
        one, other = _own_part(here, together, sample), _own_part(there, ran, 0)
        if one is None or other is None or len(one) != len(other):
            return None
        one, other = one.float(), other.float()
        if not float((one - other).abs().max()) <= limits.relative * max(1e-6, float(other.abs().max())):
            return number
    return None


def _own_part(made: torch.Tensor, ran: RunResult, at: int) -> torch.Tensor | None:
    """Cut a module's output to the tokens of one sample; None if the output has no value for each token."""
    num_rows, num_tokens = ran.shape
    # Some modules flatten rows and tokens into one dimension.
    per_token = made.reshape(-1, made.shape[-1])
    if len(per_token) != num_rows * num_tokens:
        return None
    return ran.slots[at].of(per_token.reshape(num_rows, num_tokens, -1))


def _module_of(
    proof_model: ProofModel,
    sequence: Sequence[Encoded],
    limits: Limits,
    worst: int | None,
    moved: Mapping[tuple[int, int], int],
) -> Module | None:
    """Return the first module that gives a sample another output than it should; None if there is none.

    If samples moved, compare the sequence with one in which the tokens of another sample are replaced. Else compare the
    sample `worst` in the sequence with the same sample alone.
    """
    allowed = _NOT_MOVED if moved else limits.relative
    if moved:
        changed, at = min(moved)
        other = _with_other_tokens(proof_model, sequence[changed])
        assert other is not None
        here = _outputs(proof_model, sequence, at)
        there = _outputs(proof_model, [*sequence[:changed], other, *sequence[changed + 1 :]], at)
    elif worst is not None:
        here, there = _outputs(proof_model, sequence, worst), _outputs(proof_model, [sequence[worst]], 0, packed=False)
    else:
        return None
    for name, output in here.items():
        other_output = there.get(name)
        if other_output is None or other_output.shape != output.shape:
            continue
        if not float((output - other_output).abs().max()) <= allowed * max(1e-6, float(other_output.abs().max())):
            return _module(proof_model.model, name)
    return None


def _module(model: torch.nn.Module, name: str) -> Module:
    """Look up a module by name; it counts as attention if it, or a module around it, is attention."""
    path = name.split(".")
    kinds = [type(model.get_submodule(".".join(path[: depth + 1]))).__name__ for depth in range(len(path))]
    is_attention = any("attention" in kind.lower() or "attn" in part for kind, part in zip(kinds, path, strict=True))
    return Module(name, kinds[-1], is_attention)


def _outputs(
    proof_model: ProofModel, sequence: Sequence[Encoded], sample: int, *, packed: bool = True
) -> dict[str, torch.Tensor]:
    """Run a sequence, or one sample alone; return some columns of what each module gives for one sample.

    The outputs of the language model's modules are in the order in which the modules finish.
    """
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, made: Any) -> None:
        made = made[0] if isinstance(made, tuple) else made
        if isinstance(made, torch.Tensor) and made.dim() >= 2 and made.numel() and made.is_floating_point():
            seen.setdefault(name, made.detach()[..., :: -(-made.shape[-1] // _NUM_COLUMNS)].float().cpu())

    handles = [
        module.register_forward_hook(lambda module, args, made, name=name: note(name, made))
        for name, module in proof_model.model.named_modules()
        if name and "rotary" not in name and not any(part in name for part in VISION_PARTS)
    ]
    try:
        ran = proof_model.run(sequence, packed=True) if packed else run_alone(proof_model, sequence[sample])
    finally:
        for handle in handles:
            handle.remove()
    parts = {name: _own_part(made, ran, sample) for name, made in seen.items()}
    return {name: part for name, part in parts.items() if part is not None}


def decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """Return the layers of the language model: the longest list of modules outside of the vision tower."""
    lists: list[Sequence[torch.nn.Module]] = [
        list(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and not any(part in name for part in VISION_PARTS)
    ]
    return max(lists, key=len, default=())


@contextmanager
def hidden_states(layers: Sequence[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collect the input of the first layer, then the output of each layer."""
    seen: list[torch.Tensor] = []

    def enters(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach())

    def leaves(module: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).detach())

    handles = [layers[0].register_forward_pre_hook(enters, with_kwargs=True)] if len(layers) else []
    handles += [layer.register_forward_hook(leaves) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _profiles(proof_model: ProofModel, sequence: Sequence[Encoded], limits: Limits) -> list[Profile]:
    packed = proof_model.run(sequence, packed=True).logits
    units = units_in(sequence)
    unit_of = {at: (num_prefix_of(sequence[at]), number) for number, unit in enumerate(units) for at in unit}
    profiles: list[Profile] = []
    for logits, sample in zip(packed, sequence, strict=True):
        by_token = gap_by_token(logits, run_alone(proof_model, sample).logits[0])
        wrong = torch.nonzero(~(by_token <= limits.alone)).flatten().tolist()
        first, last = (wrong[0], wrong[-1]) if wrong else (None, None)
        num_prefix, unit = unit_of.get(len(profiles), (0, None))
        kinds, has_own = kinds_of_media(sample), unit is not None and IN_PREFIX in sample
        profiles.append(Profile(len(logits), bool(kinds), first, last, num_prefix, unit, has_own))
    return profiles


def _moved(
    proof_model: ProofModel,
    sequence: Sequence[Encoded],
    limits: Limits,
    to_change: Sequence[int],
    change: Callable[[Encoded], Encoded | None],
    together: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> dict[tuple[int, int], int]:
    """Change samples one at a time. Returns how many tokens of each other sample moved, by (changed, moved).

    `together` has the samples that have to change with one, because they share what is changed.
    """
    before = proof_model.run(sequence, packed=True).logits
    pairs = {}
    for changed in to_change:
        if change(sequence[changed]) is None:
            continue
        others = {at: change(sequence[at]) for at in together.get(changed, [changed])}
        after = proof_model.run([others.get(at) or one for at, one in enumerate(sequence)], packed=True).logits
        for moved, (one, two) in enumerate(zip(before, after, strict=True)):
            num_tokens = int((~(gap_by_token(one, two) <= limits.moved)).sum())
            if moved not in others and num_tokens:
                pairs[changed, moved] = num_tokens
    return pairs


def _unpacked(proof_model: ProofModel, sequence: Sequence[Encoded], profiles: Sequence[Profile], limits: Limits) -> str:
    """Compare the host's padded batch of two samples with each alone. Returns ALONE, ANOTHER or MIXED."""
    if len(sequence) < 2:
        return ALONE
    two = _two_of(sequence, profiles)
    with own_attention_for(proof_model.model, length_of(max(two, key=length_of))):
        try:
            together = proof_model.run(two, packed=False).logits
        except RuntimeError:
            return ALONE  # the host cannot batch them: images of different sizes (Mistral 3)
        alone = [proof_model.run([sample], packed=False).logits[0] for sample in two]
        if all(gap_of(*pair).over_tokens <= limits.alone for pair in zip(together, alone, strict=True)):
            return ALONE
        other = _with_other_media(two[1]) or two[1]
        other = _with_other_tokens(proof_model, other) or other
        after = proof_model.run([two[0], other], packed=False).logits[0]
    return ANOTHER if gap_of(together[0], after).most <= limits.moved else MIXED


def _two_of(sequence: Sequence[Encoded], profiles: Sequence[Profile]) -> list[Encoded]:
    """Choose a sample that differs, and the longest other sample with the same kind of media.

    The longest sample, because a sample of equal length (the twin) would need no padding.
    """
    order = sorted(range(len(sequence)), key=lambda at: (not kinds_of_media(sequence[at]), length_of(sequence[at])))
    first = next((at for at in order if profiles[at].differs), order[0])
    kinds = kinds_of_media(sequence[first])
    others = [at for at in order if at != first]
    of_its_media = [at for at in others if kinds & kinds_of_media(sequence[at])]
    other = max(of_its_media, key=lambda at: length_of(sequence[at])) if of_its_media else others[0]
    return [sequence[first], sequence[other]]


def _with_other_tokens(proof_model: ProofModel, sample: Encoded) -> Encoded | None:
    return replaced(sample, proof_model.is_ordinary) if can_be_replaced(sample, proof_model.is_ordinary) else None


def _with_other_media(sample: Encoded) -> Encoded | None:
    return with_other_media(sample) if kinds_of_media(sample) else None


def _given(
    proof_model: ProofModel, sequence: Sequence[Encoded], profiles: Sequence[Profile], limits: Limits
) -> tuple[int, int] | None:
    """Find a sample whose logits are those of the sample alone with another sample's media.

    Returns (sample, other), or None if there is no such sample.
    """
    packed = proof_model.run(sequence, packed=True).logits
    suspects = [at for at, profile in enumerate(profiles) if profile.differs and profile.has_media]
    for at in suspects:
        # Only media of the same shapes can be exchanged without a crash, so only those are tried.
        for other, sample in enumerate(sequence):
            if other == at or not _fits(sequence[at], sample):
                continue
            alone = run_alone(proof_model, with_media_of(sequence[at], sample)).logits[0]
            if gap_of(packed[at], alone).over_tokens <= limits.alone:
                return at, other
    return None


def _fits(sample: Encoded, other: Encoded) -> bool:
    """Tell whether the media of two samples have the same names and shapes."""
    own, others = media_of(sample), media_of(other)
    return (
        bool(own) and own.keys() == others.keys() and all(shape_of(own[name]) == shape_of(others[name]) for name in own)
    )


def _type_of(layer: int | None, types: Sequence[str]) -> str:
    return types[layer] if layer is not None and 0 <= layer < len(types) else ""
