"""Define the boundaries of samples in a sequence. Only their lengths are stored; everything else is derived.

>>> Boundaries((3, 2)).cu_seqlens
(0, 3, 5)
>>> Boundaries((3, 2)).position_ids
(0, 1, 2, 0, 1)
>>> Boundaries((3, 2)).segment_ids(num_tokens=7)
(1, 1, 1, 2, 2, 0, 0)

Each sample is a segment that sees no other sample. If rows shared a prefix (the same image, the same chat), boundaries
would become a forest of depth one: a prefix, and branches that each see the prefix and themselves. An entry of
`lengths` would then get a parent, which is absent in the flat case; `cu_seqlens` would stay the same, and positions of
a branch would continue those of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from swift_vlpack.errors import BoundaryError


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The lengths of the samples of one pack, in the order of the sequence."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, length in enumerate(self.lengths, start=1):
            if length <= 0:
                raise BoundaryError(f"sample {number} of the pack has length {length}; it must be positive")

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the pack, without padding."""
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:  # (num_samples + 1,)
        """Return the cumulative lengths, from 0, which variable-length attention kernels take."""
        return (0, *accumulate(self.lengths))

    @property
    def document_starts(self) -> tuple[int, ...]:  # (num_samples,)
        """Return the index of the first token of each sample."""
        return self.cu_seqlens[:-1]

    @property
    def position_ids(self) -> tuple[int, ...]:  # (num_tokens,)
        """Return positions that restart at 0 with every sample."""
        return tuple(chain.from_iterable(range(length) for length in self.lengths))

    def segment_ids(self, num_tokens: int | None = None) -> tuple[int, ...]:  # (num_tokens,)
        """Return the number of the sample of every token, from 1; 0 for the padding up to `num_tokens`."""
        total = self.num_tokens if num_tokens is None else num_tokens
        if total < self.num_tokens:
            raise BoundaryError(f"a sequence of {total} tokens cannot hold the {self.num_tokens} tokens of the pack")
        numbered = chain.from_iterable([n] * length for n, length in enumerate(self.lengths, start=1))
        return (*numbered, *([0] * (total - self.num_tokens)))

    def check_positions(self, position_ids: Sequence[int]) -> None:
        """Raise `BoundaryError` unless positions count up from 0 and restart at 0 at the start of every sample."""
        if len(position_ids) != self.num_tokens:
            raise BoundaryError(f"{len(position_ids)} positions for a pack of {self.num_tokens} tokens")
        # Attention that reads boundaries from positions takes every 0 for a start, so a wrong 0 cuts a sample in two.
        starts = {index for index, position in enumerate(position_ids) if position == 0}
        expected = set(self.document_starts)
        if missing := sorted(expected - starts):
            raise BoundaryError(
                f"positions do not restart at token {missing[0]}, where sample "
                f"{self.document_starts.index(missing[0])} starts (position {position_ids[missing[0]]} there)"
            )
        if extra := sorted(starts - expected):
            raise BoundaryError(f"positions restart at token {extra[0]}, in the middle of a sample")
        self._check_steps(position_ids, expected)

    def _check_steps(self, position_ids: Sequence[int], starts: set[int]) -> None:
        for index, (before, after) in enumerate(pairwise(position_ids), start=1):
            if index not in starts and after != before + 1:
                raise BoundaryError(f"positions jump from {before} to {after} at token {index}, inside a sample")

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[int],
        *,
        eos_id: int | None = None,
        bos_id: int | None = None,
        pad_id: int | None = None,
    ) -> Boundaries:
        """Find the samples of a right-padded sequence by its tokens.

        Give `eos_id` (each sample ends with it) or `bos_id` (each sample starts with it). Padding at the end belongs to
        no sample. If the pad token is the EOS token and several of them end the sequence, the first one ends the last
        sample and the others are padding.

        >>> Boundaries.from_tokens([5, 6, 2, 7, 2, 2, 2], eos_id=2, pad_id=2).lengths
        (3, 2)
        """
        if (eos_id is None) == (bos_id is None):
            raise BoundaryError("give either eos_id or bos_id: one of them says where samples meet")
        end = _end_of_samples(tokens, eos_id, bos_id, pad_id)
        if end and pad_id is not None and tokens[0] == pad_id and pad_id != bos_id:
            raise BoundaryError(f"the sequence starts with the pad token {pad_id}; strip the padding on the left first")
        if bos_id is not None:
            starts = [index for index in range(end) if tokens[index] == bos_id]
            if end and (not starts or starts[0] != 0):
                raise BoundaryError(f"the sequence starts with token {tokens[0]}, not with the BOS token {bos_id}")
        else:
            starts = [0, *(index + 1 for index in range(end - 1) if tokens[index] == eos_id)] if end else []
        return cls(tuple(after - before for before, after in pairwise([*starts, end])))


def _end_of_samples(tokens: Sequence[int], eos_id: int | None, bos_id: int | None, pad_id: int | None) -> int:
    """Return the index after the last token of the last sample, where the padding begins."""
    end = len(tokens)
    if pad_id is None or pad_id == bos_id:
        return end
    while end and tokens[end - 1] == pad_id:
        end -= 1
    if pad_id == eos_id and 0 < end < len(tokens):
        return end + 1  # the first EOS ends the last sample, the others are padding
    return end
