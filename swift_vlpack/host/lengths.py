"""The length pass: the size of every row of a source, from image headers where that proves exact, else in full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from datasets.fingerprint import generate_random_fingerprint
from swift.utils import get_logger

from swift_vlpack.core.shuffle import permutation
from swift_vlpack.data.fusion import Row, RowSource, encode_row, own_template, with_system
from swift_vlpack.data.lengths import RowSize, RowSizes, size_of
from swift_vlpack.data.samples import SampleError
from swift_vlpack.host.headers import pixel_free

logger = get_logger()

SIZE = "vlpack_size"
FAILURE = "vlpack_failure"
NUM_TRIED = 64
"""Rows that are encoded both ways before headers are trusted."""
NUM_EXTREMES = 2
"""Rows at either end of length and of patches that are encoded both ways afterwards."""


def measured(source: RowSource, template: Any, args: Any) -> RowSource:
    """Give a source the sizes of its rows, in `dataset_num_proc` processes.

    Trust is earned: rows drawn by a seed, and afterwards the extremes, are encoded both ways, and one difference
    sends the whole source through the full encoding. A row whose header is good and whose pixels are not is no
    difference: it is left out when its pack is loaded.
    """
    own = own_template(template, source)
    by_header = pixel_free(own)
    compare = partial(_difference, source=source, template=own, by_header=by_header)
    drawn = permutation(len(source.rows), "lengths", source.name)[:NUM_TRIED].tolist()
    difference = compare(drawn)
    if difference is None:
        sizes = _sizes(source, own, by_header, args)
        difference = compare(_extremes(sizes, known=drawn))
        if difference is None:
            return replace(source, sizes=sizes)
    logger.warning(
        f"source {source.name}: lengths are not taken from image headers, every row is encoded: {difference}"
    )
    return replace(source, sizes=_sizes(source, own, own, args))


def _sizes(source: RowSource, template: Any, by_header: Any, args: Any) -> RowSizes:
    rows: Any = source.rows
    sized = rows.map(
        partial(_size_row, source=replace(source, rows=()), template=template, by_header=by_header, strict=args.strict),
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=args.dataset_num_proc if len(rows) > args.dataset_num_proc > 1 else None,
        # Never from the map cache: its key does not see MAX_PIXELS and the like, and hashing the template for
        # it takes longer than measuring a small data set.
        new_fingerprint=generate_random_fingerprint(),
        keep_in_memory=True,
        desc=f"Lengths of {source.name}",
    )
    failures = {index: reason for index, reason in enumerate(sized[FAILURE]) if reason}
    return RowSizes.of(sized[SIZE], failures)


def _size_row(
    row: Row, index: int, *, source: RowSource, template: Any, by_header: Any, strict: bool
) -> dict[str, Any]:
    """The size of a row, or the reason why it has none."""
    size, error = _size(row, index, source, by_header if not row.get("videos") else template, strict=strict)
    if error is not None:
        logger.warning(f"{error.sample_id}: left out: {error.detail}")
    return {SIZE: list(size), FAILURE: "" if error is None else error.reason}


def _size(
    row: Row, index: int, source: RowSource, template: Any, *, strict: bool
) -> tuple[RowSize, SampleError | None]:
    try:
        encoded = encode_row(template, with_system(row, source.system), source.sample_id(index), strict=strict)
    except SampleError as error:
        return RowSize(0), error
    return size_of(encoded), None


def _difference(indices: Iterable[int], *, source: RowSource, template: Any, by_header: Any) -> str | None:
    """The first row of which headers and full encoding say different things, in words."""
    for index in indices:
        row = source.rows[index]
        if row.get("videos"):
            continue  # always encoded in full
        quick, quick_error = _size(row, index, source, by_header, strict=False)
        full, full_error = _size(row, index, source, template, strict=False)
        is_broken_behind_its_header = full_error is not None and quick_error is None
        if quick != full and not is_broken_behind_its_header:
            shown = quick_error.detail if quick_error is not None else tuple(quick)
            return f"{source.sample_id(index)}: {shown} by header, {tuple(full)} in full (tokens, images, patches)"
    return None


def _extremes(sizes: RowSizes, *, known: list[int]) -> list[int]:
    """The shortest and longest rows, and those with fewest and most patches, as far as they have a size."""
    usable = np.flatnonzero(sizes.lengths > 0)
    ends: list[int] = []
    for column in (sizes.lengths, sizes.patches):
        order = usable[np.argsort(column[usable], kind="stable")]
        ends += [*order[:NUM_EXTREMES].tolist(), *order[-NUM_EXTREMES:].tolist()]
    return sorted(set(ends) - set(known))
