"""Compare the inputs of a packed sequence with the inputs of its samples: boundaries, targets, positions, media.

Both proofs use one function. Before training, each sample is collated alone by the host. On the first batch, each is
encoded again and collated as a pack of its own. All values are whole numbers or copies, so they must be equal. Each
check describes the first mistake in words, or returns None.

>>> wrong_boundaries({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, Boundaries((3, 4, 2)))
'the boundary before sample 3 of the sequence is lost (wrong cu_seq_lens_q)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any

import torch

from swift_vlpack.feed.sequence import packed_sequence
from swift_vlpack.plan.boundaries import ROOT, Boundaries
from swift_vlpack.proof.branches import marked, without_extras
from swift_vlpack.proof.perturb import kinds_of_media
from swift_vlpack.proof.runner import Collated, Slot, length_of, slots_in
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded, PackRecord

ENDS = "cu_seq_lens_q"
"""The input in which transformers hands boundaries to attention."""
_ENDS, _LONGEST = (ENDS, "cu_seq_lens_k"), ("max_length_q", "max_length_k")
NUMBERS_OF_SAMPLES = ("seq_idx", "segment_ids", "sequence_ids", "document_ids")
"""Inputs in which collators give each token the number of its sample."""
WHERE_SAMPLES_START = (*_ENDS, *_LONGEST, *NUMBERS_OF_SAMPLES, "position_ids", "cache_position")
"""Inputs that tell where the samples of a batch start; a sample alone needs none of them."""
_OF_THE_BATCH = (*WHERE_SAMPLES_START, "attention_mask")
"""Inputs that rightly differ between a pack and a sample alone; `wrong_positions` compares positions."""
_AXES = ("time", "height", "width")
_LAST_BITS = 1e-3
"""Tolerance for what is encoded again: last bits of pixels may depend on the number of threads, another image differs
by far more."""


def wrong_boundaries(inputs: Mapping[str, Any], boundaries: Boundaries, *, is_whole: bool = False) -> str | None:
    """Compare the boundaries with those of the samples. More may follow, for padding, unless `is_whole`."""
    ends = list(boundaries.cu_seqlens)
    for name in _ENDS:
        if (given := inputs.get(name)) is None:
            continue
        if (given.dim() == 2 or boundaries.parents) and (wrong := _wrong_prefixes(given, boundaries, name)):
            return wrong
        given = given[0] if given.dim() == 2 else given
        if given.flatten().tolist() == ends:
            continue
        found = [end for end in dict.fromkeys(given.flatten().tolist()) if end <= ends[-1]]
        if found != ends:
            lost = ", ".join(str(at + 1) for at, end in enumerate(ends[:-1]) if end not in found) or len(ends)
            is_lost = "lost" if set(found) <= set(ends) else "shifted"
            return f"the boundary before sample {lost} of the sequence is {is_lost} (wrong {name})"
        if is_whole:
            return f"{name} goes beyond the samples: {given.tolist()}, and they end at {ends}"
    return None


def _wrong_prefixes(given: torch.Tensor, boundaries: Boundaries, name: str) -> str | None:
    """Compare the prefixes of segments; attention reads them in the second line of the boundaries."""
    expected = list(boundaries.parents) or [ROOT] * len(boundaries.lengths)
    found = given[1, 1:].tolist()[: len(expected)] if given.dim() == 2 else [ROOT] * len(expected)
    wrong = [at for at, parents in enumerate(zip_longest(found, expected)) if parents[0] != parents[1]]
    if not wrong:
        return None
    at = wrong[0]
    right = "has no prefix" if expected[at] == ROOT else f"has segment {expected[at] + 1} as its prefix"
    return f"a prefix is lost or another one: segment {at + 1} of the sequence {right}, but not in {name}"


def wrong_fork(name: str, labels: torch.Tensor, num_prefix: int) -> str | None:
    """Describe a target where samples share a prefix; `labels` are those of one sample.

    The prefix is in the sequence once, so a target there would count once for all samples. The token before a branch
    may be another branch's, which would learn a target at the fork.
    """
    targets = torch.nonzero(labels[: num_prefix + 1] != NO_LABEL).flatten().tolist() if num_prefix else []
    if not targets:
        return None
    place = "directly after its prefix" if targets == [num_prefix] else "in the prefix that it shares"
    return f"{name} has a target {place}, at its token {targets[0]}"


def _wrong_targets(name: str, at: int, packed: Collated, alone: Collated, tolerance: float) -> str | None:
    """Compare labels and loss weights of a sample in a sequence with those that it has alone.

    The first token is skipped, because it is never a target; that the sample before does not learn it is checked.
    """
    labels, expected = _cut(packed, at, packed.labels), _cut(alone, 0, alone.labels)
    assert labels is not None
    assert expected is not None
    slot = packed.slots[at]
    if wrong := wrong_fork(name, labels, slot.num_prefix):
        return wrong
    follows = any(one.row == slot.row and one.tokens.stop == slot.first for one in packed.slots)
    if follows and int(labels[0]) != NO_LABEL:
        return f"the first token of {name} is a target of the sample before it: its label is not {NO_LABEL}"
    if (token := _first_difference(labels, expected, 0.0)) is not None:
        return f"labels of {name} in the sequence are not those that it has alone, from its token {token} on"
    given, right = _cut(packed, at, packed.weights), _cut(alone, 0, alone.weights)
    given, right = ((labels != NO_LABEL) * (1.0 if one is None else one.float()) for one in (given, right))
    if (token := _first_difference(given, right, tolerance)) is not None:
        return f"loss weights of {name} in the sequence are not those that it has alone, from its token {token} on"
    return None


def _cut(batch: Collated, at: int, per_token: torch.Tensor | None) -> torch.Tensor | None:
    return None if per_token is None else batch.slots[at].of(per_token).cpu()


def _first_difference(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> int | None:
    """Return the first token whose values differ, None if none do. Skips token 0."""
    wrong = torch.nonzero(~((one[1:] - other[1:]).abs() <= tolerance * (1 + other[1:].abs()))).flatten()
    return int(wrong[0]) + 1 if len(wrong) else None


def wrong_media(joined: Mapping[str, Any], alone: Sequence[Mapping[str, Any]], *, tolerance: float = 0.0) -> str | None:
    """Return the name of a media input that is not in the order of the samples; None if all are right.

    Compares inputs with one entry for each image, video or sound, in the sequence as alone. Inputs that are padded to
    another shape are skipped; mistakes in them show in the logits. For inputs with one entry for each token see
    `wrong_tokens`.
    """
    for name, whole in joined.items():
        if name in _ENDS:  # two samples with padding have as many boundaries as both alone, but other values
            continue
        parts = [inputs[name] for inputs in alone if inputs.get(name) is not None]
        if parts and all(isinstance(part, torch.Tensor) and part.dim() for part in (whole, *parts)):
            is_joined = sum(map(len, parts)) == len(whole) and all(one.shape[1:] == whole.shape[1:] for one in parts)
            if is_joined and not _is_equal(torch.cat(parts), whole, tolerance):
                return name
    return None


def _is_equal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if torch.equal(one, other):
        return True
    is_close = tolerance > 0 and one.is_floating_point()
    return is_close and torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)


def wrong_inputs(
    samples: Sequence[Encoded], packed: Collated, alone: Sequence[Collated | None], *, tolerance: float = 0.0
) -> str | None:
    """Compare the inputs of a sequence with those of its samples alone; None for a sample that is not known alone.

    `tolerance` is for media and loss weights that were made again.
    """
    numbered = enumerate(zip(samples, alone, strict=True))
    pairs = [(name_of(sample, at), at, packed, one) for at, (sample, one) in numbered if one is not None]
    boundaries = boundaries_in(packed.slots)
    wrong = next(filter(None, (_wrong_targets(*pair, tolerance) for pair in pairs)), None)
    wrong = wrong or (wrong_boundaries(packed.inputs, boundaries) if boundaries and samples else None)
    wrong = wrong or next(filter(None, (wrong_positions(*pair) or wrong_tokens(*pair) for pair in pairs)), None)
    if wrong is None and any(map(kinds_of_media, samples)) and not kinds_of_media(dict(packed.inputs)):
        wrong = "media do not reach the model: the collator drops them"
    if wrong or None in alone:
        return wrong
    inputs = [{} if is_further_branch(packed.slots, at) else one.inputs for _, at, _, one in pairs]
    # In the order of the batch, which may be another than that of the samples.
    in_batch = [inputs[at] for at in sorted(range(len(inputs)), key=lambda at: packed.slots[at])]
    name = wrong_media(packed.inputs, in_batch, tolerance=tolerance)
    return name and f"{name} of the sequence are not those of its samples, one after the other: media are exchanged"


def wrong_positions(name: str, at: int, packed: Collated, alone: Collated) -> str | None:
    """Compare the positions of a sample with its positions alone.

    They must be equal up to one constant for all tokens and axes, because rotary embeddings see only differences of
    positions.
    """
    here, there = _positions_of(packed, at), _positions_of(alone, 0)
    if here is None or there is None:
        return None
    axes = max(len(here), len(there))
    moved = here.expand(axes, -1) - there.expand(axes, -1)
    wrong = torch.nonzero(moved != moved[0, 0])
    if not len(wrong):
        return None
    token = int(wrong[:, 1].min())
    axis = int(wrong[wrong[:, 1] == token][0, 0])
    named = f" ({_AXES[axis]})" if axes == len(_AXES) else ""
    said = f"positions of {name} in the sequence are not those that it has alone, from its token {token} on{named}"
    if not bool((here == here[:1]).all()) or bool((there == there[:1]).all()):
        return said
    given = packed.inputs.get("position_ids")
    why = "; without position_ids the model makes others only of mm_token_type_ids and grids" if given is None else ""
    if given is not None and given.dim() == 2:
        why = ", because position_ids of the batch are 2-D; the model's get_rope_index makes those of a sample"
    return f"{said}: they are positions of text, the same on all three axes{why}"


def _positions_of(batch: Collated, at: int) -> torch.Tensor | None:
    """Return the positions of a sample: of the rotary embedding in a forward, else those of the inputs."""
    found = batch.inputs.get("position_ids") if batch.positions is None else batch.positions
    if found is None:
        return None
    slot = batch.slots[at]
    return found.reshape(-1, *batch.inputs["input_ids"].shape)[:, slot.row, slot.places].long().cpu()


def wrong_tokens(name: str, at: int, packed: Collated, alone: Collated) -> str | None:
    """Compare all other inputs that have a whole number for each token, such as kinds of tokens."""
    for field in packed.inputs:
        joined, own = _of_tokens(packed, at, field), _of_tokens(alone, 0, field)
        if field in _OF_THE_BATCH or joined is None or own is None:
            continue
        if not torch.equal(joined, own):
            return f"{field} of {name} in the sequence are not those that it has alone"
    return None


def _of_tokens(batch: Collated, at: int, field: str) -> torch.Tensor | None:
    """Return the part of an input that belongs to one sample; None if it has no whole number for each token."""
    value: Any = batch.inputs.get(field)
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    return batch.slots[at].of(value).cpu() if is_whole and value.shape == batch.inputs["input_ids"].shape else None


def boundaries_in(slots: Sequence[Slot]) -> Boundaries | None:
    """Return the boundaries of samples that lie end to end in one row; None if they lie otherwise."""
    own = {(slot.start, slot.tokens.stop): (slot.prefix_start, slot.prefix.stop) for slot in slots}
    prefix_of = {span: prefix for span, prefix in own.items() if prefix[1] > prefix[0]}
    segments = sorted({*own, *prefix_of.values()})
    starts = [start for start, _ in segments]
    if any(slot.row for slot in slots) or starts != [0, *(stop for _, stop in segments)][: len(segments)]:
        return None
    parents = tuple(segments.index(prefix_of[one]) if one in prefix_of else ROOT for one in segments)
    return Boundaries(tuple(stop - start for start, stop in segments), parents if prefix_of else ())


def is_further_branch(slots: Sequence[Slot], at: int) -> bool:
    """Return whether a sample shares a prefix with the one before it, which has the media of the prefix."""
    before, slot = slots[at - 1], slots[at]
    return at > 0 and slot.num_prefix > 0 and (before.num_prefix, before.first) == (slot.num_prefix, slot.first)


def name_of(sample: Encoded, at: int) -> str:
    """Return the name of a sample for messages: its id, or its number in the sequence."""
    return str(sample.get("sample_id", f"sample {at + 1}"))


# -- the first batch: the trainer's sequence and its samples encoded again --------------------------------------------


def wrong_in_first_batch(
    batch: Mapping[str, Any], samples: Sequence[Encoded], template: Any, record: PackRecord, *, weighs_samples: bool
) -> str | None:
    """Compare a batch with its samples, each collated as a pack of its own.

    `weighs_samples` says that training multiplies the loss weights of each sample by a factor of its own.
    """
    sequence = _on_cpu(batch)
    if wrong := _wrong_shape(sequence, record):
        return wrong
    packed = replace(Collated.of(sequence), slots=slots_in(record.boundaries))
    alone = []
    for sample, slot in zip(samples, packed.slots, strict=True):
        made, length = packed_sequence(template, [without_extras(sample)]), length_of(sample)
        if missing := sorted(set(made) - set(sequence)):
            return f"the batch has no {', '.join(missing)}"
        if slot.num_prefix + slot.length != length:
            return f"{sample['sample_id']} has {slot.num_prefix + slot.length} tokens, and {length} when encoded anew"
        alone.append(replace(Collated.of(made), slots=[Slot(0, 0, length)]))
    if weighs_samples:
        packed = replace(packed, weights=_rescaled(packed, alone))
    return wrong_inputs(marked(samples, record.shared), packed, alone, tolerance=_LAST_BITS)


def _rescaled(packed: Collated, alone: Sequence[Collated]) -> torch.Tensor:
    """Scale the weights of each sample's targets so that their largest is that of the sample's own weights."""
    assert packed.labels is not None
    weights = torch.ones(packed.labels.shape) if packed.weights is None else packed.weights.float().clone()
    for slot, one in zip(packed.slots, alone, strict=True):
        is_target = slot.of(packed.labels)[1:] != NO_LABEL
        own = (torch.ones(len(is_target) + 1) if one.weights is None else one.weights[0].float())[1:][is_target]
        if own.any():
            given = slot.of(weights)[1:][is_target]
            weights[slot.row, slot.tokens] *= own.abs().max() / given.abs().max().clamp_min(1e-30)
    return weights


def wrong_without_samples(batch: Mapping[str, Any], record: PackRecord) -> str | None:
    """Describe a mistake in a batch that shows without its samples: in boundaries or labels."""
    sequence = _on_cpu(batch)
    if wrong := _wrong_shape(sequence, record):
        return wrong
    labels, tokens = sequence["labels"], sequence["input_ids"]
    if not bool(((labels == NO_LABEL) | (labels == tokens)).all()):
        return "labels are not the tokens at their places"
    starts = labels[0, [*accumulate(record.lengths_in_sequence)][:-1]]
    return None if bool((starts == NO_LABEL).all()) else "the first token of a sample is a target of the one before it"


def _on_cpu(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _wrong_shape(sequence: Mapping[str, Any], record: PackRecord) -> str | None:
    """Compare the number of tokens, the boundaries and the longest sample with the record; padding counts as one."""
    lengths = record.lengths_in_sequence
    if sequence["input_ids"].shape != (1, sum(lengths)):
        return f"the batch has {tuple(sequence['input_ids'].shape)} tokens, and its samples {sum(lengths)}"
    padding = (record.num_padding,) * bool(record.num_padding)
    parents = (*record.boundaries.parents, *(ROOT for _ in padding)) if record.shared else ()
    if wrong := wrong_boundaries(sequence, Boundaries(lengths, parents), is_whole=True):
        return wrong
    longest = max((*record.lengths, *padding), default=0) if record.shared else max(lengths)
    name = next((name for name in _LONGEST if name in sequence and int(sequence[name]) != longest), None)
    return f"{name} of the batch is {int(sequence[name])}, and its longest sample has {longest}" if name else None
