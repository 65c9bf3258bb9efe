"""Compare a batch of the trainer with its samples, encoded again in this process.

Tokens, labels, positions and boundaries must be equal, and pixels up to their last bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import torch

from swift_vlpack.feed.collate import UNUSED_COLUMNS, packed_row
from swift_vlpack.feed.packs import epoch_plan_of
from swift_vlpack.feed.planned import address_of
from swift_vlpack.feed.reader import PackReader
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.plan.shares import Share, share_of
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.cutting import in_parts
from swift_vlpack.rows.samples import Address, Encoded, PackRecord, SampleId
from swift_vlpack.rows.streams import StreamedRows

FARTHEST_ROW = 20_000
"""Highest row of a stream whose samples are encoded again: the stream has to be read again from its start."""
_ENDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_OF_LOSS = ("labels", "loss_scale")
_LAST_BITS = 1e-3
"""Tolerance for pixels and sounds: last bits may depend on the number of threads, another image differs by far more."""


def encoded_again(feed: Any, record: PackRecord, *, rank: int, num_workers: int) -> list[Encoded] | str:
    """Encode the samples of a batch again, in this process and with the same random draws.

    Returns the samples, or the reason why they cannot be encoded again.
    """
    if not record.sample_ids:  # this rank has no data left, but takes part in the step
        return []
    plan = epoch_plan_of(feed)
    if plan is not None:
        reader = PackReader(feed.dataset, feed.config, feed.seed, len(plan))
        found: Iterator[Any] = iter(reader.encoded(address_of(plan, record.number)))
    else:
        if feed.config.packing_strategy == WINDOW:
            return "where a stream cuts its rows depends on all that came before"
        shares = [share_of(rank, feed.num_ranks, worker, max(1, num_workers)) for worker in range(max(1, num_workers))]
        if isinstance(feed.dataset, StreamedRows):
            if isinstance(feed.dataset.rows, Iterator):
                return "the stream cannot be read again"
            if max(key.row for key in record.sample_ids) > FARTHEST_ROW:
                return f"the stream would have to be read again to row {max(key.row for key in record.sample_ids)}"
        found = _of_shares(feed.dataset, record, shares)
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


def _of_shares(rows: Any, record: PackRecord, shares: Sequence[Share]) -> Iterator[Any]:
    """Yield the samples of the batch's rows, or the parts they are cut into, from the shares of this rank's readers."""
    wanted = {key._replace(part=None) for key in record.sample_ids}
    for share in shares:
        if isinstance(rows, StreamedRows):
            rows_of = {key.row for key in wanted if key.row % share.num_shares == share.number}
            held = {row // share.num_shares for row in rows_of}
        else:
            schedule = rows.mix.schedule(record.epoch)
            positions = range(share.number, len(schedule), share.num_shares)
            held, missing = set(), set(wanted)
            for index, position in enumerate(positions):
                if not missing:
                    break
                if (key := rows.sample_id(Address(*schedule[position]))) in missing:
                    missing.remove(key)
                    held.add(index)
        for row in islice(rows.samples(record.epoch, share, start=sys.maxsize // 2**20, held=held), len(held)):
            yield from (sample for _, sample in in_parts(row, rows.encoder.cutter))


def difference(
    batch: Mapping[str, Any], samples: Sequence[Encoded], template: Any, record: PackRecord, *, weighs_samples: bool
) -> str | None:
    """Describe the first difference between a batch and its samples; None if there is none.

    `weighs_samples` says that training multiplies the loss weights of each sample by a factor of its own.
    """
    row = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ends = [0, *accumulate(record.lengths_in_row)]
    if wrong := _wrong_boundaries(row, ends):
        return wrong
    alone = [packed_row(template, [known(sample)]) for sample in samples]
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
    ends = [0, *accumulate(record.lengths_in_row)]
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
