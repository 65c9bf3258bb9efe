"""Define the boundaries of samples in a sequence. Only their lengths are stored; everything else is derived.

>>> Boundaries((3, 2)).cu_seqlens
(0, 3, 5)
>>> Boundaries((3, 2)).position_ids
(0, 1, 2, 0, 1)
>>> Boundaries((3, 2)).segment_ids(num_tokens=7)
(1, 1, 1, 2, 2, 0, 0)

A *segment* is a run of tokens. Usually each sample is one segment, and sees no other. Rows that begin with the same
media can share that beginning: it is there once, as a *prefix*, and the rest of each row is a *branch*, which sees the
prefix and itself. So boundaries are a forest of depth one, and positions of a branch go on from its prefix:

>>> shared = Boundaries((3, 2, 1, 4), parents=(ROOT, 0, 0, ROOT))  # a prefix, its two branches, a sample of its own
>>> shared.position_ids
(0, 1, 2, 3, 4, 3, 0, 1, 2, 3)
>>> shared.samples
(((0, 3), (3, 5)), ((0, 3), (5, 6)), ((6, 10),))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from swift_vlpack.errors import BoundaryError

ROOT = -1
"""The parent of a segment that has none: a sample of its own, or a prefix."""
Tokens = tuple[int, int]
"""Some tokens of a sequence: the first of them, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The lengths of the segments of one pack, in the order of the sequence."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()
    """The index of the prefix of each segment, or `ROOT`; empty if no segment has a prefix."""

    def __post_init__(self) -> None:
        for number, length in enumerate(self.lengths, start=1):
            if length <= 0:
                raise BoundaryError(f"sample {number} of the pack has length {length}; it must be positive")
        if self.parents:
            self._check_parents()

    def _check_parents(self) -> None:
        if len(self.parents) != len(self.lengths):
            raise BoundaryError(f"{len(self.parents)} parents for {len(self.lengths)} segments")
        for segment, parent in enumerate(self.parents):
            # Directly after the prefix or after another of its branches, so a unit is one run of tokens.
            if parent != ROOT and not (parent == segment - 1 or (segment and self.parents[segment - 1] == parent)):
                raise BoundaryError(f"segment {segment} does not follow its prefix, segment {parent}")
            if parent != ROOT and self.parents[parent] != ROOT:
                raise BoundaryError(f"the prefix of segment {segment}, segment {parent}, is itself a branch")

    @classmethod
    def of_samples(cls, lengths: Sequence[int], shared: Sequence[int] = ()) -> Boundaries:
        """Lay out samples end to end; `shared` counts the tokens that each shares with the sample before it.

        >>> Boundaries.of_samples((5, 4, 4), shared=(0, 3, 0))
        Boundaries(lengths=(3, 2, 1, 4), parents=(-1, 0, 0, -1))
        """
        if not any(shared):
            return cls(tuple(lengths))
        segments: list[int] = []
        parents: list[int] = []
        prefix = ROOT
        for at, (length, num_shared) in enumerate(zip(lengths, shared, strict=True)):
            begins_unit = not num_shared
            if begins_unit:
                of_next = shared[at + 1] if at + 1 < len(shared) else 0
                prefix = len(segments) if of_next else ROOT
                if of_next:
                    segments.append(of_next)
                    parents.append(ROOT)
            segments.append(length if prefix == ROOT else length - segments[prefix])
            parents.append(prefix)
        return cls(tuple(segments), tuple(parents))

    @property
    def samples(self) -> tuple[tuple[Tokens, ...], ...]:
        """Return the tokens of each sample: of its segment, or of its prefix and its branch."""
        tokens = tuple(pairwise(self.cu_seqlens))
        if not self.parents:
            return tuple((one,) for one in tokens)
        prefixes = set(self.parents)
        return tuple(
            (one,) if parent == ROOT else (tokens[parent], one)
            for segment, (one, parent) in enumerate(zip(tokens, self.parents, strict=True))
            if segment not in prefixes
        )

    @property
    def starts_of_positions(self) -> tuple[int, ...]:  # (num_segments,)
        """Return the position of the first token of each segment: 0, or the length of its prefix."""
        if not self.parents:
            return (0,) * len(self.lengths)
        return tuple(0 if parent == ROOT else self.lengths[parent] for parent in self.parents)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the pack, without padding."""
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:  # (num_segments + 1,)
        """Return the cumulative lengths, from 0, which variable-length attention kernels take."""
        return (0, *accumulate(self.lengths))

    @property
    def document_starts(self) -> tuple[int, ...]:  # (num_segments,)
        """Return the index of the first token of each segment."""
        return self.cu_seqlens[:-1]

    @property
    def position_ids(self) -> tuple[int, ...]:  # (num_tokens,)
        """Return positions that restart at 0 with every sample; those of a branch go on from its prefix."""
        each = zip(self.starts_of_positions, self.lengths, strict=True)
        return tuple(chain.from_iterable(range(start, start + length) for start, length in each))

    def segment_ids(self, num_tokens: int | None = None) -> tuple[int, ...]:  # (num_tokens,)
        """Return the number of the segment of every token, from 1; 0 for the padding up to `num_tokens`."""
        total = self.num_tokens if num_tokens is None else num_tokens
        if total < self.num_tokens:
            raise BoundaryError(f"a sequence of {total} tokens cannot hold the {self.num_tokens} tokens of the pack")
        numbered = chain.from_iterable([n] * length for n, length in enumerate(self.lengths, start=1))
        return (*numbered, *([0] * (total - self.num_tokens)))

    def check_positions(self, position_ids: Sequence[int]) -> None:
        """Raise `BoundaryError`, which names the first wrong token, unless these are the positions."""
        if len(position_ids) != self.num_tokens:
            raise BoundaryError(f"{len(position_ids)} positions for a pack of {self.num_tokens} tokens")
        for index, (found, expected) in enumerate(zip(position_ids, self.position_ids, strict=True)):
            if found != expected:
                raise BoundaryError(f"token {index} has position {found}; in its sample alone it has {expected}")

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
