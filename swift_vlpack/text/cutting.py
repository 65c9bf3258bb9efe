"""How documents become pieces that fit: pure functions over lengths; nobody has to look at a token.

>>> [(piece.start, piece.end, piece.num_repeated) for piece in pieces_of(10, max_length=4, stride=1)]
[(0, 4, 0), (3, 7, 1), (6, 10, 1)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens `start` to `end` of a document; the first `num_repeated` are in the piece before too, as context."""

    document: int
    start: int
    end: int
    num_repeated: int = 0

    @property
    def length(self) -> int:
        """Tokens, with those that are repeated."""
        return self.end - self.start

    @property
    def num_new(self) -> int:
        """Tokens that are in no piece before."""
        return self.length - self.num_repeated


def pieces_of(num_tokens: int, *, max_length: int, stride: int = 0, document: int = 0) -> list[Piece]:
    """Pieces of at most `max_length` that cover a document, each but the first with `stride` tokens of context."""
    pieces = [Piece(document, 0, min(num_tokens, max_length))]
    while pieces[-1].end < num_tokens:
        start = pieces[-1].end - stride
        pieces.append(Piece(document, start, min(num_tokens, start + max_length), stride))
    return pieces


def windows_of(lengths: Sequence[int], max_length: int) -> list[list[Piece]]:
    """All documents end to end, cut every `max_length` tokens: the pieces of each window.

    >>> [[tuple(piece[:3]) for piece in window] for window in windows_of([3, 4], 5)]
    [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4)]]
    """
    windows: list[list[Piece]] = []
    for piece, is_first in _window_pieces(lengths, max_length):
        if is_first:
            windows.append([])
        windows[-1].append(piece)
    return windows


def _window_pieces(lengths: Iterable[int], max_length: int) -> Iterator[tuple[Piece, bool]]:
    """Every piece, and whether a window begins with it."""
    free = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            is_first = free == 0
            free = free or max_length
            end = min(length, start + free)
            yield Piece(document, start, end), is_first
            free -= end - start
            start = end
