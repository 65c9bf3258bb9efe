"""Compare the inputs of a packed sequence with the inputs of its samples: exactly, because nothing here rounds.

Before training, a sequence of the proof is compared with each sample as the host collates it alone. On the first batch,
the trainer's own sequence is compared with its samples as they are encoded again; only pixels may differ there, in
their last bits. Each function returns a mistake in words, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from swift_vlpack.feed.collate import UNUSED_COLUMNS, packed_row
from swift_vlpack.proof.proof_model import RunResult, length_of
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded, PackRecord

_ENDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_OF_LOSS = ("labels", "loss_scale")
_OF_THE_BATCH = (*_ENDS, "position_ids", "attention_mask", "cache_position")
"""Inputs that rightly differ between a pack and a sample alone; `wrong_positions_of` compares positions."""
_AXES = ("time", "height", "width")
_LAST_BITS = 1e-3
"""Tolerance for pixels and sounds: last bits may depend on the number of threads, another image differs by far more."""


# -- before training: a sequence and its samples alone ----------------------------------------------------------------


def wrong_inputs_of(packed: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of a media input that is not in the order of the samples; None if all are right.

    Compares inputs with one entry for each image, video or sound, in the sequence as alone. Inputs that are padded to
    another shape are skipped; mistakes in them show in the logits. For inputs with one entry for each token see
    `wrong_tokens_of`.
    """
    for name, joined in packed.items():
        if name in _ENDS:  # two samples with padding have as many boundaries as both alone, but other values
            continue
        parts = [inputs[name] for inputs in alone if inputs.get(name) is not None]
        if parts and all(isinstance(part, torch.Tensor) and part.dim() for part in (joined, *parts)):
            is_joined = sum(map(len, parts)) == len(joined) and all(one.shape[1:] == joined.shape[1:] for one in parts)
            if is_joined and not torch.equal(torch.cat(parts), joined):
                return name
    return None


def wrong_boundaries_of(inputs: Mapping[str, Any], lengths: Sequence[int]) -> str | None:
    """Describe a mistake in the boundaries among the inputs, None if there is none. Padding may follow the samples."""
    ends = [0, *accumulate(lengths)]
    for name in _ENDS:
        if (given := inputs.get(name)) is None:
            continue
        found = [end for end in dict.fromkeys(given.flatten().tolist()) if end <= ends[-1]]
        if found == ends:
            continue
        lost = ", ".join(str(at + 1) for at, end in enumerate(ends[:-1]) if end not in found)
        if set(found) <= set(ends):
            return f"the boundary before sample {lost or len(ends)} of the sequence is lost (wrong {name})"
        place = f"where sample {lost} of the sequence starts"
        return f"a boundary is shifted: {place}, {name} has another token (wrong {name})"
    return None


def wrong_positions_of(sample: Encoded, at: int, packed: RunResult, alone: RunResult) -> str | None:
    """Describe a mistake in the positions of a sample in the sequence; None if there is none.

    They must equal its positions alone up to one constant for all tokens and axes, because rotary embeddings see only
    differences of positions.
    """
    if not packed.positions or not alone.positions:
        return None
    here, there = (ran.positions[number].long().cpu() for ran, number in ((packed, at), (alone, 0)))
    axes = max(len(here), len(there))
    moved = here.expand(axes, -1) - there.expand(axes, -1)
    wrong = torch.nonzero(moved != moved[0, 0])
    if not len(wrong):
        return None
    token = int(wrong[:, 1].min())
    axis = int(wrong[wrong[:, 1] == token][0, 0])
    named = f" ({_AXES[axis]})" if axes == len(_AXES) else ""
    place = f"from its token {token} on{named}"
    return f"positions of {_name(sample, at)} in the sequence are not those that it has alone, {place}"


def wrong_tokens_of(sample: Encoded, at: int, start: int, packed: RunResult, alone: RunResult) -> str | None:
    """Name another per-token integer input that differs from the sample alone; None if none does."""
    length = length_of(sample)
    for name, joined in packed.inputs.items():
        own: Any = alone.inputs.get(name)
        if name in _OF_THE_BATCH or not (_is_of_tokens(joined, start + length) and _is_of_tokens(own, length)):
            continue
        if own.shape[1] == length and not torch.equal(joined[:, start : start + length].cpu(), own.cpu()):
            return f"{name} of {_name(sample, at)} in the sequence are not those that it has alone"
    return None


def _is_of_tokens(value: Any, at_least: int) -> bool:
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    return is_whole and value.dim() == 2 and value.shape[0] == 1 and value.shape[1] >= at_least


def _name(sample: Encoded, at: int) -> str:
    return str(sample.get("sample_id", f"sample {at + 1}"))


def wrong_targets_of(sample: Encoded, at: int, packed: RunResult, alone: RunResult) -> str | None:
    """Describe how labels or loss weights of a sample differ from the sample alone; None if they do not."""
    name = _name(sample, at)
    labels, expected = packed.labels[at], alone.labels[0]
    assert labels is not None
    assert expected is not None
    if at and int(labels[0]) != NO_LABEL:
        return f"the first token of {name} is a target of the sample before it: labels are shifted over a boundary"
    if (wrong := _first_difference(labels, expected)) is not None:
        return f"labels of {name} in the sequence are not those that it has alone, from its token {wrong} on"
    ones = torch.ones(length_of(sample))
    weights, expected = (ones if one is None else one for one in (packed.weights[at], alone.weights[0]))
    counted = (labels != NO_LABEL).cpu()
    if (wrong := _first_difference(weights.cpu() * counted, expected.cpu() * counted)) is not None:
        return f"loss weights of {name} in the sequence are not those that it has alone, from its token {wrong} on"
    return None


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the first token whose values differ, None if none do. Skips token 0, which is never a target."""
    wrong = torch.nonzero(one[1:].cpu() != other[1:].cpu()).flatten()
    return int(wrong[0]) + 1 if len(wrong) else None


# -- the first batch: the trainer's sequence and its samples encoded again --------------------------------------------


def wrong_in_first_batch(
    batch: Mapping[str, Any], samples: Sequence[Encoded], template: Any, record: PackRecord, *, weighs_samples: bool
) -> str | None:
    """Describe the first difference between a batch and its samples; None if there is none.

    `weighs_samples` says that training multiplies the loss weights of each sample by a factor of its own.
    """
    sequence = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ends = [0, *accumulate(record.lengths_in_row)]
    if wrong := _wrong_boundaries(sequence, ends):
        return wrong
    alone = [packed_row(template, [without_extras(sample)]) for sample in samples]
    media: dict[str, list[torch.Tensor]] = {}
    for key, sample, own, (start, end) in zip(record.sample_ids, samples, alone, pairwise(ends), strict=False):
        if not set(own) <= set(sequence):
            return f"the batch has no {', '.join(sorted(set(own) - set(sequence)))}"
        if wrong := _wrong_loss(sequence, sample, start, end, weighs_samples):
            return f"{wrong} of {key} are not those that it has when it is encoded anew"
        for name, value in own.items():
            if not isinstance(value, torch.Tensor) or name in (*_ENDS, *_LONGEST, *_OF_LOSS):
                continue
            if sequence[name].dim() and sequence[name].shape[-1] == ends[-1] and value.shape[-1] == end - start:
                if not torch.equal(sequence[name][..., start:end], value):
                    return f"{name} of {key} are not those that it has when it is encoded anew"
            else:
                media.setdefault(name, []).append(value)
    for name, parts in media.items():
        whole = sequence[name]
        is_joined = all(part.dim() and part.shape[1:] == whole.shape[1:] for part in parts)
        if is_joined and sum(map(len, parts)) == len(whole) and not _equal(torch.cat(parts), whole):
            return f"{name} are not those of the samples, one after the other"
    return None


def wrong_without_samples(batch: Mapping[str, Any], record: PackRecord) -> str | None:
    """Describe a mistake in a batch that shows without its samples: in boundaries or labels; None if there is none."""
    sequence = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ends = [0, *accumulate(record.lengths_in_row)]
    if wrong := _wrong_boundaries(sequence, ends):
        return wrong
    labels, tokens = sequence["labels"], sequence["input_ids"]
    if not bool(((labels == NO_LABEL) | (labels == tokens)).all()):
        return "labels are not the tokens at their places"
    starts = labels[0, ends[1:-1]]
    return None if bool((starts == NO_LABEL).all()) else "the first token of a sample is a target of the one before it"


def without_extras(sample: Encoded) -> Encoded:
    """Copy a sample without the columns that the template does not know; the template may change the copy."""
    return {name: value for name, value in sample.items() if name != UNUSED_COLUMNS}


def _wrong_boundaries(sequence: Mapping[str, Any], ends: Sequence[int]) -> str | None:
    if sequence["input_ids"].shape != (1, ends[-1]):
        return f"the batch has {tuple(sequence['input_ids'].shape)} tokens, and its samples {ends[-1]}"
    for name in _ENDS:
        if name in sequence and sequence[name].tolist() != list(ends):
            return f"{name} of the batch are {sequence[name].tolist()}, and its samples end at {list(ends)}"
    longest = max(end - start for start, end in pairwise(ends))
    wrong = next((name for name in _LONGEST if name in sequence and int(sequence[name]) != longest), None)
    return f"{wrong} of the batch is {int(sequence[wrong])}, and its longest sample has {longest}" if wrong else None


def _wrong_loss(sequence: Mapping[str, Any], sample: Encoded, start: int, end: int, weighs_samples: bool) -> str | None:
    """Name what differs in a sample's loss, None if nothing does. Its first token is skipped: it is never a target."""
    labels = sequence["labels"][0, start:end]
    expected = torch.as_tensor(sample["labels"])
    if not torch.equal(labels[1:], expected[1:]) or (start and int(labels[0]) != NO_LABEL):
        return "labels"
    is_target = labels[1:] != NO_LABEL
    own = sample.get("loss_scale")
    weights = torch.ones(end - start) if own is None else torch.as_tensor(own, dtype=torch.float32)
    made = sequence.get("loss_scale")
    given = torch.ones(end - start) if made is None else made[0, start:end].float()
    given, weights = given[1:][is_target], weights[1:][is_target]
    if weighs_samples and weights.any():
        given = given * (weights.abs().max() / given.abs().max().clamp_min(1e-30))
    return None if _equal(given, weights) else "loss weights"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), rtol=_LAST_BITS, atol=_LAST_BITS)
