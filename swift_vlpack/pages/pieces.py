"""The tokens of a sample by what they are: prompt, supervised, masked, vision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from swift_vlpack.pages.values import MASKED, PROMPT, SUPERVISED, VISION, Picture, Piece
from swift_vlpack.rows.contents import NO_LABEL


class Tokens(NamedTuple):
    """A sample as it is in the row."""

    ids: Sequence[int]
    labels: Sequence[int]
    answer: Sequence[int] | None = None
    """The labels it would have if every answer were trained; None where that is not known."""


def kinds_of(tokens: Tokens, placeholders: Collection[int]) -> list[str]:
    """What each token is. A token of an answer that is not trained is masked.

    >>> kinds_of(Tokens([1, 9, 9, 2, 3, 4], [-100, -100, -100, -100, 3, -100], [-100, -100, -100, 2, 3, -100]), {9})
    ['prompt', 'vision', 'vision', 'masked', 'supervised', 'prompt']
    """
    answer = tokens.labels if tokens.answer is None else tokens.answer

    def kind(token: int, label: int, of_answer: int) -> str:
        if token in placeholders:
            return VISION
        if label != NO_LABEL:
            return SUPERVISED
        return PROMPT if of_answer == NO_LABEL else MASKED

    return [kind(*each) for each in zip(tokens.ids, tokens.labels, answer, strict=True)]


def pieces_of(
    ids: Sequence[int], kinds: Sequence[str], pictures: Sequence[Picture], decode: Callable[[list[int]], str]
) -> list[Piece]:
    """The sample as text, each image as `[image 640x480 = 391 tokens]`."""
    runs = list(_runs(kinds))
    is_known = sum(kind == VISION for kind, _, _ in runs) == len(pictures)
    left = iter(pictures)
    made = []
    for kind, start, stop in runs:
        if kind != VISION:
            made.append(Piece(kind, stop - start, decode(list(ids[start:stop]))))
            continue
        picture = next(left)._replace(num_tokens=stop - start) if is_known else Picture("vision", stop - start)
        made.append(Piece(VISION, stop - start, f"[{picture}]"))
    return made


def vision_runs(kinds: Sequence[str]) -> list[int]:
    """The tokens of each run of vision tokens."""
    return [stop - start for kind, start, stop in _runs(kinds) if kind == VISION]


def _runs(kinds: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    at = 0
    for kind, group in groupby(kinds):
        num_tokens = sum(1 for _ in group)
        yield kind, at, at + num_tokens
        at += num_tokens
