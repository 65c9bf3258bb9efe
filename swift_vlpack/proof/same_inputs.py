"""Compare the inputs of a packed sequence with the inputs of its samples: boundaries, targets, positions, media.

Both proofs use these checks. Before training, a sequence of the proof is compared with each sample as the host collates
it alone. On the first batch, the trainer's own sequence is compared with its samples encoded again. All values are
whole numbers or copies, so they must be equal. Each function describes the first mistake in words, or returns None.

>>> wrong_boundaries({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, Boundaries((3, 4, 2)))
'the boundary before sample 3 of the sequence is lost (wrong cu_seq_lens_q)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch

from swift_vlpack.feed.sequence import packed_sequence
from swift_vlpack.plan.boundaries import ROOT, Boundaries
from swift_vlpack.proof.branches import marked, without_extras
from swift_vlpack.proof.perturb import kinds_of_media
from swift_vlpack.proof.runner import Ran, Slot, length_of, slots_in
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded, PackRecord

ENDS = "cu_seq_lens_q"
"""The input in which transformers hands boundaries to attention."""
_ENDS, _LONGEST = (ENDS, "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_OF_LOSS = ("labels", "loss_scale")
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
        if found == ends:
            if is_whole:
                return f"{name} goes beyond the samples: {given.tolist()}, and they end at {ends}"
            continue
        lost = ", ".join(str(at + 1) for at, end in enumerate(ends[:-1]) if end not in found)
        if set(found) <= set(ends):
            return f"the boundary before sample {lost or len(ends)} of the sequence is lost (wrong {name})"
        place = f"where sample {lost} of the sequence starts"
        return f"a boundary is shifted: {place}, {name} has another token (wrong {name})"
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


def wrong_targets(  # noqa: PLR0913 - what a loss is made of, twice
    name: str,
    labels: torch.Tensor,
    expected: torch.Tensor,
    weights: torch.Tensor | None,
    expected_weights: torch.Tensor | None,
    *,
    is_first: bool,
    tolerance: float = 0.0,
) -> str | None:
    """Compare labels and loss weights of a sample in a sequence with those that it has alone.

    The first token is skipped, because it is never a target; that the sample before does not learn it is checked.
    """
    if not is_first and int(labels[0]) != NO_LABEL:
        return f"the first token of {name} is a target of the sample before it: its label is not {NO_LABEL}"
    labels, expected = labels.cpu(), expected.cpu()
    if (token := _first_difference(labels, expected, 0.0)) is not None:
        return f"labels of {name} in the sequence are not those that it has alone, from its token {token} on"
    ones, is_target = torch.ones(len(labels)), labels != NO_LABEL
    given, right = (ones if one is None else one.cpu().float() for one in (weights, expected_weights))
    if (token := _first_difference(given * is_target, right * is_target, tolerance)) is not None:
        return f"loss weights of {name} in the sequence are not those that it has alone, from its token {token} on"
    return None


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


# -- before training: a sequence and its samples alone ----------------------------------------------------------------


class WrongInputs(NamedTuple):
    """A mistake in the inputs of a sequence, and its cause."""

    said: str
    cause: str


def wrong_inputs(samples: Sequence[Encoded], packed: Ran, alone: Sequence[Ran | None]) -> WrongInputs | None:
    """Compare the inputs of a sequence with those of its samples alone; None for a sample that was not run."""
    pairs = [(sample, at, packed, ran) for at, (sample, ran) in enumerate(zip(samples, alone, strict=True)) if ran]
    if targets := next(filter(None, (_wrong_targets_of(*pair) for pair in pairs)), None):
        return WrongInputs(targets, "labels or loss weights of the sequence are not those of its samples")
    boundaries = boundaries_in(packed.slots)
    tokens = wrong_boundaries(packed.inputs, boundaries) if boundaries and samples else None
    tokens = tokens or next(filter(None, (wrong_positions(*pair) or wrong_tokens(*pair) for pair in pairs)), None)
    if tokens:
        return WrongInputs("compared as whole numbers, which no rounding moves", tokens)
    if None in alone:
        return None
    inputs = [{} if is_further_branch(packed.slots, at) else ran.inputs for _, at, _, ran in pairs]
    # In the order of the batch, which may be another than that of the samples.
    in_batch = [inputs[at] for at in sorted(range(len(inputs)), key=lambda at: packed.slots[at])]
    if (name := wrong_media(packed.inputs, in_batch)) is not None:
        return WrongInputs(
            f"{name} of a sequence is not that of its samples, one after the other",
            "media are in the wrong order: images, videos or sounds of the sequence, or their grids, are exchanged",
        )
    return None


def drops_media(samples: Sequence[Encoded], inputs: Mapping[str, Any]) -> bool:
    """Tell whether samples have images, videos or sounds, and their batch has none."""
    return any(map(kinds_of_media, samples)) and not kinds_of_media(dict(inputs))


def _wrong_targets_of(sample: Encoded, at: int, packed: Ran, alone: Ran) -> str | None:
    """Compare labels and loss weights of a sample with those of the host's un-packed batch."""
    labels, expected = _cut(packed, at, packed.labels), _cut(alone, 0, alone.labels)
    assert labels is not None
    assert expected is not None
    weights = _cut(packed, at, packed.weights), _cut(alone, 0, alone.weights)
    slot, name = packed.slots[at], name_of(sample, at)
    is_first = not any(one.row == slot.row and one.tokens.stop == slot.first for one in packed.slots)
    wrong = wrong_fork(name, labels, slot.num_prefix)
    return wrong or wrong_targets(name, labels, expected, *weights, is_first=is_first)


def _cut(ran: Ran, at: int, per_token: torch.Tensor | None) -> torch.Tensor | None:
    return None if per_token is None else ran.slots[at].of(per_token)


def wrong_positions(sample: Encoded, at: int, packed: Ran, alone: Ran) -> str | None:
    """Compare the positions of a sample with its positions alone.

    They must be equal up to one constant for all tokens and axes, because rotary embeddings see only differences of
    positions.
    """
    if packed.positions is None or alone.positions is None:
        return None
    here, there = (
        positions[:, slot.row, slot.places].long().cpu()
        for positions, slot in ((packed.positions, packed.slots[at]), (alone.positions, alone.slots[0]))
    )
    axes = max(len(here), len(there))
    moved = here.expand(axes, -1) - there.expand(axes, -1)
    wrong = torch.nonzero(moved != moved[0, 0])
    if not len(wrong):
        return None
    token = int(wrong[:, 1].min())
    axis = int(wrong[wrong[:, 1] == token][0, 0])
    named = f" ({_AXES[axis]})" if axes == len(_AXES) else ""
    place = f"from its token {token} on{named}"
    said = f"positions of {name_of(sample, at)} in the sequence are not those that it has alone, {place}"
    is_of_text = bool((here == here[:1]).all()) and not bool((there == there[:1]).all())
    return f"{said}{_why_of_text(packed.inputs)}" if is_of_text else said


def _why_of_text(inputs: Mapping[str, Any]) -> str:
    """Say why a model with three axes of positions may have got the same positions on all axes, which is for text."""
    given = inputs.get("position_ids")
    has = "they are positions of text, the same on all three axes"
    if isinstance(given, torch.Tensor) and given.dim() == 2:
        return f": {has}, because position_ids of the batch are 2-D; the model's get_rope_index makes those of a sample"
    if given is None:
        return f": {has}; without position_ids the model makes others only of mm_token_type_ids and grids"
    return f": {has}"


def wrong_tokens(sample: Encoded, at: int, packed: Ran, alone: Ran) -> str | None:
    """Compare all other inputs that have a whole number for each token, such as kinds of tokens."""
    for name in packed.inputs:
        joined, own = _of_tokens(packed, at, name), _of_tokens(alone, 0, name)
        if name in _OF_THE_BATCH or joined is None or own is None:
            continue
        if len(own) == length_of(sample) and not torch.equal(joined, own):
            return f"{name} of {name_of(sample, at)} in the sequence are not those that it has alone"
    return None


def _of_tokens(ran: Ran, at: int, name: str) -> torch.Tensor | None:
    """Return the part of an input that belongs to one sample; None if it has no whole number for each token."""
    value: Any = ran.inputs.get(name)
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    return ran.slots[at].of(value).cpu() if is_whole and value.shape == ran.inputs["input_ids"].shape else None


def boundaries_in(slots: Sequence[Slot]) -> Boundaries | None:
    """Return the boundaries of samples that lie end to end in one row, in their order; None if they lie otherwise."""
    lengths: list[int] = []
    parents: list[int] = []
    prefixes: dict[int, int] = {}  # by its first token, the number of its segment
    end = 0
    for slot in slots:
        if slot.row:
            return None
        if slot.num_prefix and slot.prefix_start == end:
            prefixes[end] = len(lengths)
            lengths.append(slot.num_prefix)
            parents.append(ROOT)
            end += slot.num_prefix
        if slot.start != end or (slot.num_prefix and slot.prefix_start not in prefixes):
            return None
        lengths.append(slot.length)
        parents.append(prefixes[slot.prefix_start] if slot.num_prefix else ROOT)
        end += slot.length
    return Boundaries(tuple(lengths), tuple(parents) if prefixes else ())


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
    slots, num_tokens = slots_in(record.boundaries), sum(record.lengths_in_sequence)
    media: list[dict[str, Any]] = []
    samples = marked(samples, record.shared)
    for at, (key, sample, slot) in enumerate(zip(record.sample_ids, samples, slots, strict=True)):
        alone = packed_sequence(template, [without_extras(sample)])
        if not set(alone) <= set(sequence):
            return f"the batch has no {', '.join(sorted(set(alone) - set(sequence)))}"
        if slot.num_prefix + slot.length != length_of(sample):
            return f"{key} has {slot.num_prefix + slot.length} tokens, and {length_of(sample)} when it is encoded anew"
        labels, weights = slot.of(sequence["labels"]), _weights_of(sequence, slot)
        if wrong := wrong_fork(str(key), labels, slot.num_prefix):
            return wrong
        own = torch.as_tensor(sample["labels"])
        own_weights = None if sample.get("loss_scale") is None else torch.as_tensor(sample["loss_scale"])
        if weighs_samples:
            weights = _rescaled(weights, own_weights, labels)
        if wrong := wrong_targets(str(key), labels, own, weights, own_weights, is_first=not at, tolerance=_LAST_BITS):
            return wrong
        media.append({})
        for name, value in alone.items():
            if not isinstance(value, torch.Tensor) or name in (*_ENDS, *_LONGEST, *_OF_LOSS):
                continue
            whole = sequence[name]
            if whole.dim() and whole.shape[-1] == num_tokens and value.shape[-1] == length_of(sample):
                if not torch.equal(whole[..., slot.places], value):
                    return f"{name} of {key} are not those that it has when it is encoded anew"
            else:
                media[-1][name] = value
        if is_further_branch(slots, at):
            media[-1] = {}  # those of its prefix
    wrong = wrong_media(sequence, media, tolerance=_LAST_BITS)
    return None if wrong is None else f"{wrong} are not those of the samples, one after the other"


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


def _weights_of(sequence: Mapping[str, Any], slot: Slot) -> torch.Tensor | None:
    weights = sequence.get("loss_scale")
    return None if weights is None else slot.of(weights)


def _rescaled(given: torch.Tensor | None, own: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Scale the weights of a sample's targets so that their largest is that of the sample's own weights."""
    is_target = labels[1:] != NO_LABEL
    weights, right = (torch.ones(len(labels)) if one is None else one.float() for one in (given, own))
    if not right[1:][is_target].any():
        return weights
    return weights * (right[1:][is_target].abs().max() / weights[1:][is_target].abs().max().clamp_min(1e-30))
