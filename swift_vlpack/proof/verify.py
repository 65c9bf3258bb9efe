"""Run the isolation proof on any model and any collator, without a template, packs or a trainer.

    samples -> each alone: collator([sample])  ->  what the model makes of it
            -> together:   collator(samples)   ->  must be the same, for each sample

A sample is whatever the collator takes. Rows of documents (`document_starts`) are taken apart into their documents,
and put together again into one row.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from swift_vlpack.attention import attention
from swift_vlpack.attention.prepare import unwrapped
from swift_vlpack.errors import BoundaryError, DataError
from swift_vlpack.proof.branches import PREFIX, Prefix
from swift_vlpack.proof.choose_samples import FEWEST, short_of_each_kind
from swift_vlpack.proof.perturb import can_be_replaced, media_of
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.reference import configs_of
from swift_vlpack.proof.runner import Collated, Runner, Slot, length_of
from swift_vlpack.proof.same_inputs import WHERE_SAMPLES_START, name_of
from swift_vlpack.rows.contents import NO_LABEL, num_supervised
from swift_vlpack.rows.samples import Encoded

NUM_SAMPLES = 16
"""Most samples, or rows of documents, that are read. All are compared in one batch, a few short samples in detail."""

Sample = Mapping[str, Any]
Collator = Callable[[list[Any]], Mapping[str, Any]]

Tokens = np.ndarray[Any, Any]
_GIVEN = "_given"
_STARTS = "document_starts"
_SPECIAL = re.compile(r"token_(id|index)s?$")
"""Names of config fields with ids of tokens that are not words: tokens of images, turns and padding."""
_MEDIA = re.compile(r"(image|video|audio)_token_(id|index)$")
_TYPES, _OF_MEDIA = "mm_token_type_ids", (("image_token_id", 1), ("video_token_id", 2))


def verify(
    model: Any,
    collator: Collator,
    samples: Iterable[Sample],
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Prove that samples of a batch do not see each other in `model(**collator(samples))`. Returns a line for the log.

    `samples` are as the collator takes them: mappings with `input_ids`, `labels`, pixels and grids, or what the
    collator makes these of; or rows of documents, `input_ids` with `document_starts`. The collator may lay them end to
    end, in several rows, or padded. Each must give the logits, labels, positions and gradients that the model's own
    attention gives `collator([sample])`. Raises `IsolationError` with the likeliest cause. The model is one of
    transformers; it may be wrapped, and is left as it was. `forward_context` makes the context of a forward, such as
    autocast.
    """
    inner = unwrapped(model)
    if not hasattr(inner, "config"):
        raise DataError(f"{type(inner).__name__} has no config; give verify a model of transformers")
    sequences: list[list[Sample]] = [list(islice(samples, NUM_SAMPLES))]
    batches = CollatorBatches(collator, inner)
    if any(row.get(_STARTS) is not None for row in sequences[0]):
        sequences = [documents_of(row, number) for number, row in enumerate(sequences[0], start=1)]
        batches.collator = lambda documents: collator([joined(documents)])
    encoded = [batches.marked([batches.sample(row, at) for at, row in enumerate(rows)]) for rows in sequences if rows]
    runner = Runner(inner, batches, _is_ordinary(inner, collator), forward_context, has_own_collator=True)
    usable = [
        one for rows in encoded for one in rows if num_supervised(one) and can_be_replaced(one, runner.is_ordinary)
    ]
    if not usable:
        raise DataError("verify found no sample with a target and two different tokens of text; give it others")
    of_kinds = short_of_each_kind(usable)
    shortest = {id(one): one for one in [*of_kinds, *sorted(usable, key=length_of)]}
    chosen = list(shortest)[: max(FEWEST, len(of_kinds))]
    few = [one for one in usable if id(one) in chosen]
    proof = run_proof(runner, few if len(few) > 1 else few * 2, encoded, what="the whole batch")
    return proof.line(attention.name_of(inner.config))


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)  # no tuple: media are looked for in tuples
class Given:
    """A sample as the caller gave it, and its tokens in a batch of this sample alone."""

    row: Sample
    tokens: list[int]
    slot: Slot
    made: Mapping[str, Any]


class CollatorBatches:
    """Make inputs with the caller's collator, of several samples together or of one alone.

    Media are replaced in the samples, because the collator may exchange them. Tokens are replaced in the batch, because
    the collator may make them of text; no collator reads a meaning out of plain words.
    """

    def __init__(self, collator: Collator, model: Any) -> None:
        self.collator = collator
        self.config = model.config
        self.parts = list(model.modules())
        self.media_tokens = _tokens_of(configs_of(model), _MEDIA)

    def sample(self, row: Sample, at: int) -> Encoded:
        """Collate a sample alone, and return it with its tokens and labels as the proof handles them."""
        made, name = self._collated([row]), name_of({**row}, at)
        slot, num_rows = _own_slot(made, row), len(made["input_ids"])
        if num_rows != 1 or not slot.length:
            raise DataError(f"the collator made {num_rows} rows of {slot.length} tokens of {name} alone; give it one")
        tokens, labels = (slot.of(made[field]).tolist() for field in ("input_ids", "labels"))
        given = Given(row, tokens, slot, made)
        return {**row, "input_ids": tokens, "labels": labels, "length": len(tokens), "sample_id": name, _GIVEN: given}

    def marked(self, samples: Sequence[Encoded]) -> list[Encoded]:
        """Mark the samples that share their first tokens in the collator's batch, as in a tree of prefixes."""
        try:
            slots = slots_of(samples, self._collated(list(map(_as_given, samples)))["input_ids"])
        except BoundaryError:  # the proof says it
            return list(samples)
        marks = {(slot.row, slot.prefix_start): Prefix(slot.num_prefix) for slot in slots if slot.num_prefix}
        found = [marks.get((slot.row, slot.first)) for slot in slots]
        return [{**one, PREFIX: mark} if mark else one for one, mark in zip(samples, found, strict=True)]

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        """Yield the batch of all samples; or of one sample alone, without padding, boundaries and positions."""
        if packed:
            made = self._collated(list(map(_as_given, samples)))
            slots = slots_of(samples, made["input_ids"])
        else:
            (sample,) = samples
            made, slot = self._without_padding(sample[_GIVEN].made, sample[_GIVEN].slot)
            made = self._with_positions({name: one for name, one in made.items() if name not in WHERE_SAMPLES_START})
            slots = [slot]
        tokens = made["input_ids"].clone()
        for slot, sample in zip(slots, samples, strict=True):
            tokens[slot.row, slot.places] = torch.tensor(sample["input_ids"], dtype=tokens.dtype)
        yield replace(Collated.of({**made, "input_ids": tokens}), slots=slots)

    def _with_positions(self, made: dict[str, Any]) -> dict[str, Any]:
        """Add the types of tokens, and the positions that the model makes of these and of grids.

        A hook may hand the model only embeddings, of which it can make no positions.
        """
        make = next((part.get_rope_index for part in self.parts if hasattr(part, "get_rope_index")), None)
        if make is None or not any(name.endswith("_grid_thw") for name in made):
            return made
        if _TYPES not in made:
            made = {**made, _TYPES: torch.zeros_like(made["input_ids"])}
            for name, number in _OF_MEDIA:
                made[_TYPES][made["input_ids"] == getattr(self.config, name, -1)] = number
        known = inspect.signature(make).parameters
        positions, _ = make(**{name: value for name, value in made.items() if name in known})
        return {**made, "position_ids": positions}

    def _without_padding(self, made: Mapping[str, Any], slot: Slot) -> tuple[dict[str, Any], Slot]:
        """Cut a batch of one sample to the sample's tokens, so that it needs no mask."""
        tokens = made["input_ids"]
        made = {name: value for name, value in made.items() if name != "attention_mask"}
        is_own = torch.zeros_like(tokens)
        is_own[0, slot.tokens] = 1
        # Some collators add a dummy picture after the tokens of a text. Its tokens must stay, because the model checks
        # that pictures and their tokens match.
        if any(int(token) in self.media_tokens for token in tokens[is_own == 0].unique()):
            return {**made, "attention_mask": is_own}, slot
        width = tokens.shape[1]
        cut = {
            name: value[:, slot.tokens] if isinstance(value, torch.Tensor) and value.shape[:2] == (1, width) else value
            for name, value in made.items()
        }
        return cut, Slot(0, 0, slot.length)

    def _collated(self, rows: Sequence[Sample]) -> dict[str, Any]:
        """Call the collator on copies of the samples, because it may take fields out."""
        made = _tensors(self.collator([dict(row) for row in rows]))
        tokens, labels = made.get("input_ids"), made.get("labels")
        if tokens is None or tokens.dim() != 2:
            raise DataError("the collator made no input_ids of (rows, tokens), so nothing can be compared")
        if labels is None or labels.shape != tokens.shape:
            raise DataError(
                "the collator made no labels for each of input_ids, so it trains nothing that could be proved"
            )
        return made


def slots_of(samples: Sequence[Encoded], rows: torch.Tensor) -> list[Slot]:
    """Find the tokens of each sample in the rows of a batch. Equal samples are found in the order in which they come.

    A sample may leave out the first tokens that it shares with the sample before it. Raises `BoundaryError` if the
    tokens of a sample are not there.
    """
    lines = [np.array(row) for row in rows.tolist()]
    taken: list[Slot] = []
    for at, sample in enumerate(samples):
        tokens = np.array(sample[_GIVEN].tokens)
        found = _found(lines, tokens, taken)
        if found is None and taken:
            before = np.array(samples[at - 1][_GIVEN].tokens)
            shorter = min(len(before), len(tokens) - 1)
            differ = np.flatnonzero(before[:shorter] != tokens[:shorter])
            num_prefix = int(differ[0]) if len(differ) else shorter
            # The first tokens of a branch of a branch lie where those of the first branch do.
            own, first = _found(lines, tokens[num_prefix:], taken), taken[-1].first
            found = (own and num_prefix and own._replace(prefix_start=first, num_prefix=num_prefix)) or None
        if found is None:
            raise BoundaryError(
                f"the {len(tokens)} tokens of {name_of(sample, at)} are not in the batch in one piece: the collator "
                "cut, dropped or changed them"
            )
        taken.append(found)
    return taken


def _found(lines: Sequence[Tokens], tokens: Tokens, taken: Sequence[Slot]) -> Slot | None:
    """Return the first place of these tokens that no other sample has taken, after the last of these or before it."""
    last = taken[-1] if taken else Slot(0, 0, 0)
    places = [(row, at) for row, line in enumerate(lines) for at in np.flatnonzero(line == tokens[0]).tolist()]
    for row, at in sorted(places, key=lambda place: place < (last.row, last.tokens.stop)):
        slot = Slot(row, at, len(tokens))
        is_free = not any(one.row == row and one.start < slot.tokens.stop and at < one.tokens.stop for one in taken)
        if is_free and np.array_equal(lines[row][slot.tokens], tokens):
            return slot
    return None


def _own_slot(made: Mapping[str, Any], row: Sample) -> Slot:
    """Find a sample in a batch of this sample alone. Tokens that the collator added count, padding does not."""
    tokens, mask, own = made["input_ids"], made.get("attention_mask"), row.get("input_ids")
    if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
        kept = torch.nonzero(mask[0]).flatten()
        return Slot(0, int(kept[0]), int(kept[-1] - kept[0]) + 1) if len(kept) else Slot(0, 0, 0)
    # Without a mask, a run of one token on either side is padding; a single one may have been added by the collator.
    line = tokens[0].tolist()
    start, stop = len(line) - _without_tail(line[::-1]), _without_tail(line)
    start += start > 0
    targets = torch.nonzero(made["labels"][0] != NO_LABEL).flatten()
    if own is not None and len(own := np.asarray(own).reshape(-1)):
        found = _found([tokens[0].numpy()], own, ())
        start, stop = (min(start, found.start), found.tokens.stop) if found else (0, len(line))
    stop = max(stop, int(targets[-1]) + 1 if len(targets) else 0)
    return Slot(0, start, stop - start)


def _without_tail(tokens: Sequence[int]) -> int:
    """Return the number of tokens if a run of equal tokens at the end counts as one, because the rest is padding."""
    return next((at + 2 for at in range(len(tokens) - 2, -1, -1) if tokens[at] != tokens[-1]), len(tokens))


def _as_given(sample: Encoded) -> Sample:
    """Return a sample as the caller gave it, but with the media that it has now."""
    row: Sample = sample[_GIVEN].row
    return {**row, **{name: value for name, value in media_of(sample).items() if name in row}}


def _tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists and arrays of numbers into tensors. Words, which no model reads, are left out."""
    kept = {name: value for name, value in batch.items() if not _is_of_words(value)}
    return {
        name: torch.as_tensor(value) if isinstance(value, (list, np.ndarray)) else value for name, value in kept.items()
    }


def _is_of_words(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or (isinstance(value, (list, tuple)) and any(map(_is_of_words, value)))


def _is_ordinary(model: Any, collator: Any) -> Callable[[int], bool]:
    """Make a function that tells whether a token has no special meaning to the model, collator and chat templates."""
    tokenizer = getattr(collator, "tokenizer", None) or getattr(getattr(collator, "processor", None), "tokenizer", None)
    special: set[Any] = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    special |= set(getattr(tokenizer, "all_special_ids", ()))
    special |= _tokens_of(configs_of(model), _SPECIAL)
    return lambda token: token not in special


def _tokens_of(configs: Iterable[Any], names: re.Pattern[str]) -> set[Any]:
    """Return the ids of tokens that configs hold under some names."""
    found = [value for config in configs for name, value in vars(config).items() if names.search(name)]
    return {token for value in found for token in (value if isinstance(value, (list, tuple)) else [value])}


# -- rows of documents ------------------------------------------------------------------------------------------------


def documents_of(row: Sample, number: int) -> list[Sample]:
    """Split a row into its documents, each a row of its own."""
    labels = row["input_ids"] if row.get("labels") is None else row["labels"]
    parts = (np.split(np.asarray(one), np.asarray(row.get(_STARTS, [0]))[1:]) for one in (row["input_ids"], labels))
    return [
        {"input_ids": ids.tolist(), "labels": own.tolist(), "sample_id": f"document {at} of row {number}"}
        for at, (ids, own) in enumerate(zip(*parts, strict=True), start=1)
    ]


def joined(documents: Sequence[Sample]) -> Sample:
    """Join documents to one row."""
    starts = np.cumsum([0, *(len(one["input_ids"]) for one in documents[:-1])]).tolist()
    return {_STARTS: starts, **{name: [n for one in documents for n in one[name]] for name in ("input_ids", "labels")}}
