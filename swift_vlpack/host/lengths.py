"""The length pass: the size of every row of a source, from image headers where that proves exact, else in full.

Trust is earned: rows drawn by a seed, and afterwards the extremes of size and aspect, are encoded both ways, and one
difference sends the whole source through the full encoding. Sizes are remembered in one file a source. The ranks of a
run measure every n-th row each and tell each other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from modelscope.hub.utils.utils import get_cache_dir
from numpy.typing import NDArray
from swift.utils import get_logger, is_master
from tqdm import tqdm

from swift_vlpack.core.shuffle import permutation
from swift_vlpack.data.fusion import RowSource, own_template
from swift_vlpack.data.length_cache import SIZE, LengthCache, Sizes
from swift_vlpack.data.length_pass import Measurer, in_chunks, log_failures, row_sizes, rows_at
from swift_vlpack.host.context import context_of
from swift_vlpack.host.headers import pixel_free
from swift_vlpack.host.ranks import check_equal, num_ranks, rank, together

logger = get_logger()

NUM_TRIED = 64
"""Rows that are encoded both ways before headers are trusted."""
NUM_EXTREMES = 2
"""Rows at either end of length, patches and aspect that are encoded both ways afterwards."""
NUM_COMPARED = 1024
"""Rows, spread over a source, that have to be the same on all ranks."""


def measured(source: RowSource, template: Any, args: Any, cache_dir: str | None = None) -> RowSource:
    """Give a source the sizes of its rows; each rank of the run in `dataset_num_proc` processes."""
    own = own_template(template, source)
    context = context_of(own)
    cache = LengthCache(cache_path(source, context, cache_dir), context)
    _check_same_rows(source, cache)
    by_header = pixel_free(own)
    measurer = Measurer(source, by_header, own, cache, cache.load(), strict=args.strict)
    drawn = permutation(len(source.rows), "lengths", source.name)[:NUM_TRIED]
    difference = _difference(measurer, drawn, args, "Checking lengths")
    if difference is None:
        measurer = replace(measurer, known=cache.load())  # with those that were just compared
        sizes = _sizes(measurer, args)
        difference = _difference(measurer, _extremes(sizes), args, "Checking extremes")
    if difference is not None:
        logger.warning(
            f"source {source.name}: lengths are not taken from image headers, every row is encoded: {difference}"
        )
        sizes = _sizes(replace(measurer, by_header=None, known=cache.load()), args)
    return replace(source, sizes=row_sizes(sizes), cache=cache)


def cache_path(source: RowSource, context: str, cache_dir: str | None) -> Path:
    """The file that remembers the lengths of a source under these settings."""
    folder = Path(cache_dir) if cache_dir else Path(get_cache_dir()) / "vlpack" / "lengths"
    name = re.sub(r"[^\w.-]+", "_", source.name)[-60:]
    digest = hashlib.blake2b(f"{source.name}\n{context}".encode(), digest_size=6).hexdigest()
    return folder.expanduser() / f"{name}-{digest}.lengths"


def _check_same_rows(source: RowSource, cache: LengthCache) -> None:
    """Every rank measures some rows for all, so all must have the same."""
    if num_ranks() == 1:
        return
    spread = np.unique(np.linspace(0, len(source.rows) - 1, NUM_COMPARED).astype(np.int64))
    keys = cache.keys(rows_at(source.rows, spread.tolist()))
    facts = {"rows": len(source.rows), "content": hashlib.sha256(keys.tobytes()).hexdigest()[:16]}
    check_equal(f"rows of source {source.name!r} and the settings that lengths depend on", facts)


def _sizes(measurer: Measurer, args: Any) -> Sizes:
    """The sizes of all rows, a share of them measured here."""
    num_rows = len(measurer.source.rows)
    share = np.arange(rank(), num_rows, num_ranks())

    def work() -> tuple[Sizes, list[tuple[int, str]]]:
        sizes, failures = np.zeros(num_rows, SIZE), []
        with _bar(f"Lengths of {measurer.source.name}", len(share)) as bar:
            for chunk in in_chunks(measurer.measure, share, args.dataset_num_proc, bar):
                sizes[chunk.indices] = chunk.sizes
                failures += chunk.failures
        return sizes[share], failures

    everyone = together(work)
    if is_master():
        log_failures(measurer.source, sorted(failure for _, failures in everyone for failure in failures))
    sizes = np.zeros(num_rows, SIZE)
    for number, (part, _) in enumerate(everyone):
        sizes[number :: num_ranks()] = part
    return sizes


def _difference(measurer: Measurer, indices: NDArray[np.int64], args: Any, text: str) -> str | None:
    """The first difference between header and full encoding that any rank finds among these rows."""

    def work() -> str | None:
        share = indices[rank() :: num_ranks()]
        with _bar(f"{text} of {measurer.source.name}", len(share)) as bar:
            chunks = in_chunks(measurer.compare, share, args.dataset_num_proc, bar)
            return next((chunk.difference for chunk in chunks if chunk.difference is not None), None)

    return next((difference for difference in together(work) if difference is not None), None)


def _extremes(sizes: Sizes) -> NDArray[np.int64]:
    """Rows at both ends of length, patches and aspect, as far as they have a size."""
    usable = np.flatnonzero(sizes["length"])

    def ends() -> Iterator[NDArray[np.int64]]:
        for column in ("length", "patches", "aspect"):
            order = usable[np.argsort(sizes[column][usable], kind="stable")]
            yield order[:NUM_EXTREMES]
            yield order[-NUM_EXTREMES:]

    return np.unique(np.concatenate(list(ends())))


def _bar(text: str, num_rows: int) -> tqdm[Any]:
    return tqdm(desc=text, total=num_rows, unit="row", dynamic_ncols=True, disable=not is_master(), smoothing=0.1)
