"""Compare a batch of the trainer with its samples, encoded again in this process.

Tokens, labels, positions and boundaries must be equal, and pixels up to their last bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from swift_vlpack.feed.collate import UNUSED_COLUMNS
from swift_vlpack.feed.feed import CannotReadAgain, Feed
from swift_vlpack.feed.sequence import packed_sequence
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded, PackRecord, SampleId

_ENDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_OF_LOSS = ("labels", "loss_scale")
_LAST_BITS = 1e-3
"""Tolerance for pixels and sounds: last bits may depend on the number of threads, another image differs by far more."""


def encoded_again(feed: Feed, record: PackRecord, *, rank: int, num_workers: int) -> list[Encoded] | str:
    """Encode the samples of a batch again, in this process and with the same random draws.

    Returns the samples, or the reason why they cannot be encoded again.
    """
    if not record.sample_ids:  # this rank has no data left, but takes part in the step
        return []
    try:
        found = feed.samples_again(record, rank=rank, num_workers=num_workers)
    except CannotReadAgain as error:
        return str(error)
    samples: dict[SampleId, list[Encoded]] = {}
    for sample in found:
        if isinstance(sample, dict):
            samples.setdefault(sample["sample_id"], []).append(sample)
    chosen = []
    for key in record.sample_ids:
        if key not in samples:
            return f"{key} cannot be encoded again"
        of_key = samples[key]  # a row that comes twice may have other random draws each time
        chosen.append(of_key.pop(0) if len(of_key) > 1 else of_key[0])
    return chosen


def difference(
    batch: Mapping[str, Any], samples: Sequence[Encoded], template: Any, record: PackRecord, *, weighs_samples: bool
) -> str | None:
    """Describe the first difference between a batch and its samples; None if there is none.

    `weighs_samples` says that training multiplies the loss weights of each sample by a factor of its own.
    """
    row = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ends = [0, *accumulate(record.lengths_in_sequence)]
    if wrong := _wrong_boundaries(row, ends):
        return wrong
    alone = [packed_sequence(template, [known(sample)]) for sample in samples]
    media: dict[str, list[torch.Tensor]] = {}
    for key, sample, own, (start, end) in zip(record.sample_ids, samples, alone, pairwise(ends), strict=False):
        if not set(own) <= set(row):
            return f"the batch has no {', '.join(sorted(set(own) - set(row)))}"
        if wrong := _wrong_loss(row, sample, start, end, weighs_samples):
            return f"{wrong} of {key} are not those that it has when it is encoded anew"
        for name, value in own.items():
            if not isinstance(value, torch.Tensor) or name in (*_ENDS, *_LONGEST, *_OF_LOSS):
                continue
            if row[name].dim() and row[name].shape[-1] == ends[-1] and value.shape[-1] == end - start:
                if not torch.equal(row[name][..., start:end], value):
                    return f"{name} of {key} are not those that it has when it is encoded anew"
            else:
                media.setdefault(name, []).append(value)
    for name, parts in media.items():
        whole = row[name]
        is_joined = all(part.dim() and part.shape[1:] == whole.shape[1:] for part in parts)
        if is_joined and sum(map(len, parts)) == len(whole) and not _equal(torch.cat(parts), whole):
            return f"{name} are not those of the samples, one after the other"
    return None


def wrong_by_itself(batch: Mapping[str, Any], record: PackRecord) -> str | None:
    """Describe a mistake in a batch that shows without its samples: in boundaries or labels; None if there is none."""
    row = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ends = [0, *accumulate(record.lengths_in_sequence)]
    if wrong := _wrong_boundaries(row, ends):
        return wrong
    labels, tokens = row["labels"], row["input_ids"]
    if not bool(((labels == NO_LABEL) | (labels == tokens)).all()):
        return "labels are not the tokens at their places"
    starts = labels[0, ends[1:-1]]
    return None if bool((starts == NO_LABEL).all()) else "the first token of a sample is a target of the one before it"


def known(sample: Encoded) -> Encoded:
    """Copy a sample without the columns that the template does not know; the template may change the copy."""
    return {name: value for name, value in sample.items() if name != UNUSED_COLUMNS}


def _wrong_boundaries(row: Mapping[str, Any], ends: Sequence[int]) -> str | None:
    if row["input_ids"].shape != (1, ends[-1]):
        return f"the batch has {tuple(row['input_ids'].shape)} tokens, and its samples {ends[-1]}"
    for name in _ENDS:
        if name in row and row[name].tolist() != list(ends):
            return f"{name} of the batch are {row[name].tolist()}, and its samples end at {list(ends)}"
    longest = max(end - start for start, end in pairwise(ends))
    wrong = next((name for name in _LONGEST if name in row and int(row[name]) != longest), None)
    return f"{wrong} of the batch is {int(row[wrong])}, and its longest sample has {longest}" if wrong else None


def _wrong_loss(row: Mapping[str, Any], sample: Encoded, start: int, end: int, weighs_samples: bool) -> str | None:
    """Name what differs in a sample's loss, None if nothing does. Its first token is skipped: it is never a target."""
    labels = row["labels"][0, start:end]
    expected = torch.as_tensor(sample["labels"])
    if not torch.equal(labels[1:], expected[1:]) or (start and int(labels[0]) != NO_LABEL):
        return "labels"
    is_target = labels[1:] != NO_LABEL
    own = sample.get("loss_scale")
    weights = torch.ones(end - start) if own is None else torch.as_tensor(own, dtype=torch.float32)
    made = row.get("loss_scale")
    given = torch.ones(end - start) if made is None else made[0, start:end].float()
    given, weights = given[1:][is_target], weights[1:][is_target]
    if weighs_samples and weights.any():
        given = given * (weights.abs().max() / given.abs().max().clamp_min(1e-30))
    return None if _equal(given, weights) else "loss weights"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), rtol=_LAST_BITS, atol=_LAST_BITS)
