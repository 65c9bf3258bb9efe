"""Lay the rows of an epoch end to end, and cut them wherever a pack is full (`packing_strategy=window`).

The place where a row is cut depends on all rows before it, so it is decided for an epoch and not for a row. The packer
says what its open pack holds; the row is cut to the room that is left, and its pieces are pushed in order.
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
"""Function that returns the runs of the row at a place, as parts; none if the row is a single run."""
_WHOLE = Span(0, 0, 0)


class Pieces(NamedTuple):
    """The pieces of all rows, in order."""

    at: NDArray[np.int64]  # (num_pieces,): the place of the row
    sizes: NDArray[np.int32]  # (4, num_pieces): 0 for a piece that fits no pack
    spans: NDArray[np.int32]  # (5, num_pieces): the fields of `Span`; 0 for a row in one piece

    def report(self, images: NDArray[Any]) -> dict[str, Any]:
        """Report what was cut and lost, if only the sizes of rows are known. `images` are the images of each row."""
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
        if has_media or taken.tokens + length > config.packing_length:  # skip most rows, which are texts that fit
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
    """Return the part of a piece that fits no pack, with its sizes and its reason."""
    of_row = _parts(runs, cutting, NOTHING)  # pieces that fit no pack are the same, whatever came before the row
    return next(part for part in of_row if (part.start, part.stop) == span[1:3])._replace(number=span.number)


def can_be_in_windows(sizes: NDArray[Any], runs: CutRows | None, config: PackingConfig) -> NDArray[np.bool_]:
    """Return a mask of the rows that have a piece which fits a pack."""
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
    """Return how many supervised tokens of a run are in a part, assuming that they are spread evenly over the run."""
    before, behind = (min(max(at - run.start, 0), run.stop - run.start) for at in (part.start, part.stop))
    return run.supervised * behind // (run.stop - run.start) - run.supervised * before // (run.stop - run.start)
