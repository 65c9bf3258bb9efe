"""The rows of an epoch end to end: where each is cut because a pack was full, and goes on in the next one.

Where that is follows from all rows before it, so it is decided for an epoch and not for a row. The packer itself says
what its open pack holds; what it makes of the pieces in their order are the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.items import Item, is_left_out
from swift_vlpack.plan.packer import Packer
from swift_vlpack.plan.parts import NOTHING, CutRows, Cutting, Part, Run, Span, Taken, window_parts
from swift_vlpack.reasons import Reason

RunsOf = Callable[[int], Sequence[Part]]
"""What a row with media is made of, by its place; a text, and what nobody knows more of, is one run."""
_WHOLE = Span(0, 0, 0)


class Pieces(NamedTuple):
    """What rows are cut into, in their order."""

    at: NDArray[np.int64]  # (num_pieces,): the place of its row
    sizes: NDArray[np.int32]  # (4, num_pieces): of a piece that no pack has room for 0
    spans: NDArray[np.int32]  # (5, num_pieces): the fields of `Span`; of a row in one piece 0

    def report(self, images: NDArray[Any]) -> dict[str, Any]:
        """What became of rows of which nothing is known but their sizes; `images` of each."""
        number, start, stop, *_ = self.spans
        is_part, is_lost = stop > 0, (stop > 0) & (self.sizes[0] == 0)
        lost = {
            "num_parts": int(is_lost.sum()),
            "num_tokens": int((stop - start)[is_lost].sum()),
            "num_images": int(images[self.at[is_lost]].sum()),
        }
        return {
            "num_rows_cut": int((is_part & (number == 0)).sum()),
            "num_parts": int(is_part.sum()),
            "num_samples": len(self.at),
            "lost_by_cutting": {Reason.CANNOT_BE_CUT.value: lost} if is_lost.any() else {},
            "rows": {},
        }


def end_to_end(sizes: NDArray[Any], runs_of: RunsOf, config: PackingConfig) -> Pieces:
    """Lay rows of these sizes, (4, num_rows), end to end.

    >>> config = PackingConfig(packing_length=5, packing_strategy="window")
    >>> end_to_end(np.array([[3, 4], [0, 0], [0, 0], [3, 4]]), lambda place: (), config).spans.T.tolist()
    [[0, 0, 0, 0, 0], [0, 0, 2, 0, 4], [1, 2, 4, 0, 4]]
    """
    packer, made = Packer(config, label=None), []
    cutting = Cutting.of(config)
    assert cutting is not None
    for place, size in enumerate(sizes.T.tolist()):
        length, images, patches, supervised = size
        taken, has_media = packer.taken, images or patches
        parts: list[Part] = []
        if has_media or taken.tokens + length > config.packing_length:  # most rows are texts that fit
            known = runs_of(place) if has_media else ()
            runs = known or [Part(0, 0, length, 0, images, patches, supervised=supervised)]
            parts = _parts(runs, cutting, taken)
        if not parts:
            made.append((place, *size, *_WHOLE))
            if length:
                packer.push_checked(Item(place, length, images, patches))
        for part in sorted(parts, key=lambda part: part.start):
            made.append((place, *_size_of(part, runs), *part.span._replace(row_length=length)))
            if part.reason is None:
                packer.push_checked(Item(place, part.length, part.images, part.patches))
    columns = np.array(made, dtype=np.int64).reshape(-1, 1 + len(sizes) + len(_WHOLE)).T
    return Pieces(columns[0], columns[1 : 1 + len(sizes)].astype(np.int32), columns[1 + len(sizes) :].astype(np.int32))


def lost_part(runs: Sequence[Part], span: Span, cutting: Cutting) -> Part:
    """A piece that no pack has room for, with what it holds and why."""
    of_row = _parts(runs, cutting, NOTHING)  # whatever came before, these are the same
    return next(part for part in of_row if (part.start, part.stop) == span[1:3])._replace(number=span.number)


def can_be_in_windows(sizes: NDArray[Any], runs: CutRows | None, config: PackingConfig) -> NDArray[np.bool_]:
    """Which rows have a piece that some pack has room for."""
    usable: NDArray[np.bool_] = sizes[0] > 0
    if runs is None or not len(runs):
        return usable
    start, stop, _, images, patches, _, reason = runs.columns
    is_whole = (images > 0) | (patches > 0) | (reason > 0)
    has_room = (stop - start <= config.packing_length) & ~is_left_out(stop - start, images, patches, config)
    usable[runs.rows] = np.logical_or.reduceat(~is_whole | has_room, runs.offsets[:-1])
    return usable


def _parts(runs: Sequence[Part], cutting: Cutting, taken: Taken) -> list[Part]:
    whole = Run(runs[-1].stop, sum(run.images for run in runs), sum(run.patches for run in runs))
    if any(run.reason for run in runs):
        return window_parts(None, cutting, whole, taken)
    of_core = [
        Run(run.stop - run.start, run.images, run.patches, is_whole=bool(run.images or run.patches)) for run in runs
    ]
    return window_parts(of_core, cutting, whole, taken)


def _size_of(part: Part, runs: Sequence[Part]) -> tuple[int, int, int, int]:
    if part.reason is not None:
        return 0, 0, 0, 0
    return part.length, part.images, part.patches, sum(_share(run, part) for run in runs)


def _share(run: Part, part: Part) -> int:
    """Of the supervised tokens of a run those in a part: as if they were spread evenly, which they are in documents."""
    before, behind = (min(max(at - run.start, 0), run.stop - run.start) for at in (part.start, part.stop))
    return run.supervised * behind // (run.stop - run.start) - run.supervised * before // (run.stop - run.start)
