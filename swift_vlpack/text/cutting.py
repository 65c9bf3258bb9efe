"""Cut documents into pieces that fit: pure functions over lengths, which never see tokens.

>>> [(piece.start, piece.end, piece.num_repeated) for piece in pieces_of(10, max_length=4, stride=1)]
[(0, 4, 0), (3, 7, 1), (6, 10, 1)]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens `start` to `end` of a document; the first `num_repeated` are in the piece before too, as context."""

    document: int
    start: int
    end: int
    num_repeated: int = 0
    num_edge: int = 0
    """Tokens put before the piece: a BOS, if later pieces of a document get one."""

    @property
    def length(self) -> int:
        """Return the number of tokens, with those that are repeated or put before the piece."""
        return self.end - self.start + self.num_edge

    @property
    def is_first(self) -> bool:
        """Tell whether the document begins here; a later piece may repeat it from its start."""
        return self.start == 0 and not self.num_repeated

    @property
    def num_new(self) -> int:
        """Return the number of tokens that no earlier piece has."""
        return self.end - self.start - self.num_repeated


def pieces_of(
    num_tokens: int, *, max_length: int, stride: int = 0, num_edge: int = 0, document: int = 0
) -> list[Piece]:
    """Cut a document into pieces of at most `max_length`; each but the first repeats `stride` tokens as context."""
    pieces = [Piece(document, 0, min(num_tokens, max_length))]
    while pieces[-1].end < num_tokens:
        start = pieces[-1].end - stride
        pieces.append(Piece(document, start, min(num_tokens, start + max_length - num_edge), stride, num_edge))
    return pieces


def windows_of(
    lengths: Sequence[int], max_length: int, *, stride: int = 0, num_edge: int = 0, least: int = 1
) -> list[list[Piece]]:
    """Lay documents end to end and cut wherever a window is full. Returns the pieces of each window.

    A document that goes on in the next window repeats up to `stride` tokens there. A window with room for less than
    `least` tokens is full.

    >>> [[tuple(piece[:3]) for piece in window] for window in windows_of([3, 4], 5)]
    [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4)]]
    """
    windows: list[list[Piece]] = []
    free = 0
    for document, length in enumerate(lengths):
        done = 0
        while done < length:
            if free < least:
                windows.append([])
                free = max_length
            num_repeated, edge = min(stride, done), num_edge if done else 0
            piece = Piece(
                document, done - num_repeated, min(length, done - num_repeated + free - edge), num_repeated, edge
            )
            windows[-1].append(piece)
            free -= piece.length
            done = piece.end
    return windows
