"""Collate blocks into a batch: positions restart with every document, no token sees padding, and labels are set."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.text.checks import check_whole
from swift_vlpack.text.documents import IGNORED, Block, Specials, has_boundaries, joined, read_block
from swift_vlpack.text.tokenizer import token_id, tokenizer_of

logger = logging.getLogger(__name__)
MASK = "attention_mask"


class PackedBatch(dict[str, Any]):
    """The inputs of one step, for `model(**batch)`. The 2-D mask of packed rows is not among the items.

    Given a 2-D mask, transformers ignores positions (masking_utils) and flash-attn ignores boundaries, so documents
    would see each other. Padding needs no mask in packed rows, because it is a segment of its own. So `**batch` and
    other iteration skip the mask; access by name (`[]`, `in`, `get`, `pop`) finds it.
    """

    mask: Any = None
    """The 2-D mask of packed rows, 0 for padding; None if the mask is among the items."""

    def to(self, device: Any, non_blocking: bool = False) -> PackedBatch:
        """Move the batch to a device."""
        moved = PackedBatch({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})
        moved.mask = None if self.mask is None else self.mask.to(device, non_blocking=non_blocking)
        return moved

    def __missing__(self, name: str) -> Any:
        if name == MASK and self.mask is not None:
            return self.mask
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name == MASK and self.mask is not None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, also of the mask."""
        return self.mask if name == MASK and self.mask is not None else super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a value and return it, also the mask."""
        if name == MASK and self.mask is not None:
            mask, self.mask = self.mask, None
            return mask
        return super().pop(name, *default)


def batch_of(arrays: dict[str, NDArray[Any]], *, is_packed: bool, return_tensors: str) -> PackedBatch:
    """Make a batch of tensors or of arrays. A mask stays among arrays, because no transformers model takes arrays."""
    if return_tensors == "np":
        return PackedBatch(arrays)
    import torch

    batch = PackedBatch({name: torch.from_numpy(value) for name, value in arrays.items()})
    if is_packed:
        batch.mask = batch.pop(MASK)
    return batch


class PackedCollator:
    """A collator for `transformers.Trainer` (with `remove_unused_columns=False`), a `DataLoader`, or your own loop."""

    def __init__(  # noqa: PLR0913 - the options of one line, as collators have them
        self,
        tokenizer: Any,
        packed_sequences: bool | None = None,
        padding: str | int = "longest",
        max_length: int | None = None,
        return_tensors: str = "pt",
        segment_ids: bool = False,
        cu_seqlens: bool = False,
        mask_boundary_loss: bool = True,
        train_on_eos: bool = True,
    ) -> None:
        """Check the options.

        `packed_sequences`: None makes positions if rows say where documents start (by `document_starts`, by
        `seq_lengths` as TRL's `pack_dataset` writes them, or by `position_ids` that restart); True always makes them;
        False never does.

        `padding`: pad to the longest row, to `max_length`, or to a multiple. No row may exceed `max_length`.
        `segment_ids`: add `segment_ids`, which number the documents of a row from 1. `cu_seqlens`: join the rows of the
        batch end to end, and add `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, which
        variable-length attention reads. `mask_boundary_loss`: do not train the first token of a document.
        `train_on_eos=False`: do not train EOS.
        """
        self.tokenizer = tokenizer_of(tokenizer)
        self.packed_sequences = packed_sequences
        self.padding = "longest" if padding is True else padding
        self.max_length = max_length
        self.return_tensors = return_tensors
        self.segment_ids = segment_ids
        self.cu_seqlens = cu_seqlens
        self.mask_boundary_loss = mask_boundary_loss
        self.train_on_eos = train_on_eos
        self._specials = Specials(*(token_id(self.tokenizer, name) for name in ("bos", "eos", "pad")))
        self._has_warned = False
        _check(self)

    def __call__(self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None) -> PackedBatch:
        """Make a batch of these rows. Fields are `(num_rows, num_tokens)`, or `(1, num_tokens)` with `cu_seqlens`."""
        if not features:
            raise DataError("a batch of no rows cannot be collated")
        kind = self.return_tensors if return_tensors is None else return_tensors
        _check_kind(kind)
        is_packed = self._is_packed(features)
        rows = [
            read_block(row, f"row {number} of the batch", self._specials, by_tokens=self.packed_sequences is True)
            for number, row in enumerate(features, start=1)
        ]
        self._check_lengths([len(row.tokens) for row in rows])
        lines = [joined(rows)] if self.cu_seqlens else rows
        width = self._width(max(len(line.tokens) for line in lines), len(rows) // len(lines))
        fields = [self._fields(line, width, is_packed) for line in lines]
        arrays = {name: np.stack([field[name] for field in fields]) for name in fields[0]}
        if self.cu_seqlens:
            arrays |= _boundaries(lines[0].documents, width)
        return batch_of(arrays, is_packed=is_packed, return_tensors=kind)

    def _is_packed(self, features: Sequence[Mapping[str, Any]]) -> bool:
        if self.packed_sequences is not None:
            return self.packed_sequences
        if any(map(has_boundaries, features)):
            return True
        if not self._has_warned and any(_looks_packed(feature["input_ids"], self._specials) for feature in features):
            self._has_warned = True
            logger.warning(
                "rows without document_starts have EOS inside. If they are packed documents, keep that column (Trainer "
                "drops it unless remove_unused_columns=False) or set packed_sequences=True; if not, set it to False"
            )
        return self.cu_seqlens  # this joins rows into one line, so positions have to keep them apart

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise DataError(
                f"row {lengths.index(longest) + 1} of the batch has {longest} tokens, more than max_length="
                f"{self.max_length}; make blocks of that length, or raise max_length"
            )

    def _width(self, longest: int, rows_per_line: int) -> int:
        """Return the padded length of every line of the batch."""
        if self.padding == "longest":
            return longest
        if self.padding == "max_length":
            assert self.max_length is not None
            return self.max_length * rows_per_line
        return -(-longest // int(self.padding)) * int(self.padding)

    def _fields(self, row: Block, width: int, is_packed: bool) -> dict[str, NDArray[Any]]:
        num_tokens, pad = len(row.tokens), self._specials.pad
        pad = (self._specials.eos or 0) if pad is None else pad  # padding is masked, so any token will do
        fields = {
            "input_ids": _padded(row.tokens, width, pad),
            "labels": _padded(self._labels(row), width, IGNORED),
            MASK: _padded(np.ones(num_tokens, dtype=np.int64), width, 0),
        }
        segments = _segments(row, is_packed)
        if is_packed:
            fields["position_ids"] = np.concatenate([np.arange(length) for length in _lengths(segments, width)])
        if self.segment_ids:
            numbers = np.repeat(np.arange(1, len(segments.lengths) + 1), segments.lengths)
            fields["segment_ids"] = _padded(numbers, width, 0)
        return fields

    def _labels(self, row: Block) -> NDArray[np.int64]:
        labels = row.labels.copy()
        if self.mask_boundary_loss:
            labels[list(row.documents.document_starts)] = IGNORED
        if not self.train_on_eos and self._specials.eos is not None:
            labels[labels == self._specials.eos] = IGNORED
        return labels


def _check(collator: PackedCollator) -> None:
    """Raise `ConfigError` for options that are invalid or contradict each other."""
    padding, max_length = collator.padding, collator.max_length
    is_multiple = isinstance(padding, Integral) and not isinstance(padding, bool) and padding >= 1
    if padding not in ("longest", "max_length") and not is_multiple:
        raise ConfigError(f"padding must be 'longest', 'max_length' or a multiple of at least 1, got {padding!r}")
    if padding == "max_length" and max_length is None:
        raise ConfigError("padding='max_length' needs max_length")
    check_whole(1, max_length=max_length)
    if collator.packed_sequences is not None and not isinstance(collator.packed_sequences, bool):
        raise ConfigError(f"packed_sequences must be None, True or False, got {collator.packed_sequences!r}")
    if collator.cu_seqlens and collator.packed_sequences is False:
        raise ConfigError("cu_seqlens lays rows end to end, which needs positions; leave packed_sequences out")
    _check_kind(collator.return_tensors)


def _check_kind(return_tensors: str) -> None:
    if return_tensors not in ("pt", "np"):
        raise ConfigError(f"return_tensors must be 'pt' or 'np', got {return_tensors!r}")


def _segments(row: Block, is_packed: bool) -> Boundaries:
    """Return the segments of a row: its documents if it is packed, else the whole row."""
    return row.documents if is_packed else Boundaries((len(row.tokens),))


def _lengths(segments: Boundaries, width: int) -> tuple[int, ...]:
    """Return the lengths of the segments, and of the padding after them if there is any."""
    num_padding = width - segments.num_tokens
    return (*segments.lengths, *([num_padding] if num_padding else ()))


def _boundaries(segments: Boundaries, width: int) -> dict[str, NDArray[Any]]:
    """Return the fields that variable-length attention reads. Padding counts as a segment."""
    lengths = _lengths(segments, width)
    ends, longest = np.array(Boundaries(lengths).cu_seqlens, dtype=np.int32), np.array(max(lengths))
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _padded(values: NDArray[Any], width: int, value: int) -> NDArray[np.int64]:
    made = np.full(width, value, dtype=np.int64)
    made[: len(values)] = values
    return made


def _looks_packed(tokens: Any, specials: Specials) -> bool:
    """Tell whether EOS comes before the last token of the row; padding does not count, even if it is EOS."""
    row = np.asarray(tokens)
    if specials.eos is None:
        return False
    ends = np.flatnonzero(row == specials.eos)
    others = np.flatnonzero((row != specials.eos) & (row != specials.pad))
    return bool(len(ends) and len(others) and ends[0] < others[-1])
