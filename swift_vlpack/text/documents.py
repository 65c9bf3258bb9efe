"""Read one row of a batch: its tokens, its labels, and where its documents start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import BoundaryError, DataError
from swift_vlpack.plan.boundaries import Boundaries

IGNORED = -100
"""Label of a token that is not trained."""
_TRAINED = ("completion_mask", "assistant_masks")
"""Columns that TRL's data sets have: 1 for every token that is trained."""


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens of a row without padding, their labels, and the lengths of its documents."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: Boundaries


@dataclass(frozen=True, slots=True)
class Specials:
    """Ids of the special tokens by which documents can be found; None if the tokenizer has no such token."""

    bos: int | None
    eos: int | None
    pad: int | None


def has_boundaries(feature: Mapping[str, Any]) -> bool:
    """Tell whether a field of the row says where its documents start.

    Such fields are `document_starts`, `seq_lengths` (of TRL's `pack_dataset`), and `position_ids` that restart. None in
    a field counts as missing: data sets that were joined have None in columns of the other data set.
    """
    if any(feature.get(name) is not None for name in ("document_starts", "seq_lengths")):
        return True
    positions = feature.get("position_ids")
    return positions is not None and int((np.asarray(positions) == 0).sum()) > 1


def read_block(feature: Mapping[str, Any], name: str, specials: Specials, *, by_tokens: bool) -> Block:
    """Read a row. Errors begin with `name`. With `by_tokens`, EOS or BOS mark documents if no field does.

    Tokens that a mask of TRL's leaves out have no label.
    """
    tokens = _whole_numbers(feature["input_ids"], f"{name}: input_ids")
    tokens = tokens[: _num_real(feature, len(tokens), name)]
    labels = tokens
    if feature.get("labels") is not None:
        labels = _whole_numbers(feature["labels"], f"{name}: labels")[: len(tokens)]
        if len(labels) < len(tokens):
            raise DataError(f"{name} has {len(labels)} labels for {len(tokens)} tokens")
    for field in _TRAINED:
        if feature.get(field) is not None:
            labels = np.where(_trained(feature[field], len(tokens), f"{name}: {field}"), labels, IGNORED)
    documents = _documents(feature, tokens, name, specials, by_tokens) if len(tokens) else Boundaries(())
    if not documents.num_tokens:
        raise DataError(f"{name} has no tokens; leave it out")
    return Block(tokens[: documents.num_tokens], labels[: documents.num_tokens], documents)


def _trained(mask: Any, num_tokens: int, name: str) -> NDArray[np.bool_]:
    """Return True for the tokens that a mask of TRL's trains."""
    numbers = _whole_numbers(mask, name)
    if len(numbers) < num_tokens:
        raise DataError(f"{name} has {len(numbers)} entries for {num_tokens} tokens")
    return numbers[:num_tokens] != 0


def joined(rows: Sequence[Block]) -> Block:
    """Join all rows into one, end to end."""
    return Block(
        np.concatenate([row.tokens for row in rows]),
        np.concatenate([row.labels for row in rows]),
        Boundaries(tuple(length for row in rows for length in row.documents.lengths)),
    )


def _num_real(feature: Mapping[str, Any], num_tokens: int, name: str) -> int:
    """Return the number of tokens before the padding, by the row's own `attention_mask`."""
    if feature.get("attention_mask") is None:
        return num_tokens
    mask = _whole_numbers(feature["attention_mask"], f"{name}: attention_mask")
    num_real = int(mask.astype(bool).sum())
    if len(mask) != num_tokens or not mask[:num_real].all():
        raise DataError(f"{name}: its attention_mask must have a 1 for each of its tokens, then zeros for padding")
    return num_real


def _documents(
    feature: Mapping[str, Any], tokens: NDArray[np.int64], name: str, specials: Specials, by_tokens: bool
) -> Boundaries:
    said = {
        field: read(_whole_numbers(feature[field], f"{name}: {field}"), len(tokens), f"{name}: {field}")
        for field, read in _BOUNDARY_FIELDS.items()
        if feature.get(field) is not None
    }
    if len(set(said.values())) > 1:
        different = " and ".join(f"{field} says {documents.document_starts}" for field, documents in said.items())
        raise BoundaryError(f"{name}: its fields disagree on where documents start: {different}; keep the right one")
    if said and (len(said) > 1 or "position_ids" not in said or has_boundaries(feature)):
        return next(iter(said.values()))
    if not by_tokens:
        return Boundaries((len(tokens),))
    if specials.eos is None and specials.bos is None:
        raise DataError(
            f"{name} has no document_starts, and the tokenizer neither EOS nor BOS to find its documents by; keep that "
            "column, or leave packed_sequences out"
        )
    try:
        return _from_tokens(tokens.tolist(), specials)
    except BoundaryError as error:
        raise BoundaryError(f"{name}: {error}") from None


def _from_starts(starts: NDArray[np.int64], num_tokens: int, where: str) -> Boundaries:
    ends = [*starts.tolist(), num_tokens]
    ascend = all(before < after for before, after in pairwise(ends))
    if len(ends) == 1 or ends[0] != 0 or not ascend:
        raise BoundaryError(
            f"{where} must begin with 0 and ascend to less than its {num_tokens} tokens, got {ends[:-1]}"
        )
    return Boundaries(tuple(after - before for before, after in pairwise(ends)))


def _from_lengths(lengths: NDArray[np.int64], num_tokens: int, where: str) -> Boundaries:
    if not len(lengths) or lengths.min() < 1 or lengths.sum() != num_tokens:
        raise BoundaryError(
            f"{where} must be at least 1 each and add up to its {num_tokens} tokens, got {lengths.tolist()}"
        )
    return Boundaries(tuple(lengths.tolist()))


def _from_positions(positions: NDArray[np.int64], num_tokens: int, where: str) -> Boundaries:
    positions = positions[:num_tokens]  # positions after the tokens are padding
    starts = np.flatnonzero(positions == 0)
    if len(positions) < num_tokens or not len(starts) or starts[0] != 0:
        raise BoundaryError(f"{where} must have a number for each of its {num_tokens} tokens, and begin with 0")
    documents = _from_starts(starts, num_tokens, where)
    counted = np.concatenate([np.arange(length) for length in documents.lengths])
    if (wrong := np.flatnonzero(positions != counted)).size:
        at = int(wrong[0])
        raise BoundaryError(
            f"{where} must count up from 0 and begin again with 0 where a document does; number {at} is "
            f"{positions[at]} after {positions[at - 1]}"
        )
    return documents


_BOUNDARY_FIELDS = {
    "document_starts": _from_starts,
    "seq_lengths": _from_lengths,
    "position_ids": _from_positions,
}


def _from_tokens(tokens: list[int], specials: Specials) -> Boundaries:
    """Find documents by EOS, or by BOS if there is no EOS. A row with neither is one document."""
    eos, bos, pad = specials.eos, specials.bos, specials.pad
    if eos is not None and eos in tokens:
        return Boundaries.from_tokens(tokens, eos_id=eos, pad_id=pad)
    if bos is not None and bos in tokens:
        return Boundaries.from_tokens(tokens, bos_id=bos, pad_id=pad)
    num_real = len(tokens)
    while pad is not None and num_real > 1 and tokens[num_real - 1] == pad:
        num_real -= 1
    return Boundaries((num_real,))


def _whole_numbers(values: Any, what: str) -> NDArray[np.int64]:
    """Read a flat list, array or tensor of integers."""
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
        raise DataError(f"{what} must be a flat list of integers, got {array.ndim} dimensions of {array.dtype}")
    return array.astype(np.int64)


def positions_of(
    input_ids: Any, eos_token_id: int | None = None, *, document_starts: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """Return positions that restart with every document of a row: after each EOS, or at `document_starts`.

    >>> positions_of([5, 6, 1, 7, 1], eos_token_id=1).tolist()
    [0, 1, 2, 0, 1]
    >>> positions_of([5, 6, 7, 8], document_starts=[0, 3]).tolist()
    [0, 1, 2, 0]
    """
    tokens = _whole_numbers(input_ids, "input_ids")
    if document_starts is None:
        document_starts = document_starts_of(tokens, eos_token_id)
    starts = _whole_numbers(document_starts, "document_starts")
    if not len(tokens):
        return tokens
    return np.concatenate([np.arange(n) for n in _from_starts(starts, len(tokens), "document_starts").lengths])


def document_starts_of(input_ids: Any, eos_token_id: int | None) -> list[int]:
    """Return the starts of the documents of a row, each of which ends with EOS.

    >>> document_starts_of([5, 6, 1, 7, 1], 1)
    [0, 3]
    """
    tokens = _whole_numbers(input_ids, "input_ids")
    if eos_token_id is None:
        raise DataError("documents are found by EOS, but eos_token_id is None; give eos_token_id, or document_starts")
    ends = np.flatnonzero(tokens[:-1] == eos_token_id) + 1
    return [0, *ends.tolist()] if len(tokens) else []
