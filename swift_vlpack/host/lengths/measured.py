"""The length pass: the size of every row of a source, from image headers where that proves exact, else in full.

Trust is earned: the first rows of every kind of row and image, some drawn by a seed, and the extremes of size and
aspect are encoded both ways, and one difference sends the whole source through the full encoding, now and at later
starts. Kinds that were found equal are trusted in other sources too. Sizes are remembered in one file a source. The
ranks of a run measure every n-th row each and tell each other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from modelscope.hub.utils.utils import get_cache_dir
from numpy.typing import NDArray
from swift.utils import get_logger, is_master

from swift_vlpack.core.account.reasons import Reason
from swift_vlpack.core.words import counted
from swift_vlpack.data.lengths.cache import SIZE, LengthCache, Sizes
from swift_vlpack.data.lengths.cures import digest_of_cures
from swift_vlpack.data.lengths.passes import LengthPass, log_failures, row_sizes, rows_at
from swift_vlpack.data.lengths.sizes import LengthIndex
from swift_vlpack.data.lengths.trust import Trust
from swift_vlpack.data.rows.fusion import RowSource, own_template
from swift_vlpack.data.rows.urls import NUM_FAILURES, SECONDS_REMEMBERED, Urls
from swift_vlpack.host.lengths.context import context_of, digests_of
from swift_vlpack.host.lengths.headers import pixel_free, reading_urls
from swift_vlpack.host.ranks import check_equal, num_ranks, rank, together

logger = get_logger()

NUM_TRIED = 64
"""Rows, out of those whose size is not known yet, that are encoded both ways at most, beside the first of each kind."""
NUM_EXTREMES = 1
"""Rows at either end of length, patches and aspect that are encoded both ways afterwards."""
NUM_COMPARED = 1024
"""Rows, spread over a source, that have to be the same on all ranks."""


def measured(source: RowSource, template: Any, args: Any, cache_dir: str | None = None) -> RowSource:
    """Give a source the sizes of its rows; each rank of the run in `dataset_num_proc` processes."""
    own = own_template(template, source)
    plugins = getattr(args, "external_plugins", None) or []
    context = context_of(own, plugins)
    cache = LengthCache(cache_path(source, context, cache_dir), context, digest_of_cures())
    if num_ranks() > 1:
        _check_same_rows(source, cache, digests_of(own, plugins))
    if not getattr(args, "resume_from_checkpoint", None):
        cache.take_over_notes()
    urls = Urls(None if args.strict else cache.path.with_name("unreachable.urls"))
    share = LengthPass(
        source,
        np.arange(rank(), len(source.rows), num_ranks()),
        cache,
        by_header=pixel_free(own, urls),
        in_full=reading_urls(own, urls),
        urls=urls,
        known_kinds=Trust(cache.path.with_name(f"{context}.trust")),
        num_processes=args.dataset_num_proc or 1,
        strict=args.strict,
        is_shown=is_master(),
    )
    num_tried = -(-NUM_TRIED // num_ranks())
    difference = _first(together(lambda: share.look_up() or share.measure(num_tried)))
    if difference is None:
        sizes = _joined(together(lambda: share.sizes))
        difference = _first(together(lambda: share.compare(_own(_extremes(sizes)))))
    if difference is not None:
        logger.warning(
            f"source {source.name}: lengths are not taken from image headers, every row is encoded: {difference}"
        )
        share.distrust()
        together(share.measure)
        sizes = _joined(together(lambda: share.sizes))
    faults = {index: fault for some in together(lambda: share.faults) for index, fault in some.items()}
    result = row_sizes(sizes, faults)
    if is_master():
        log_failures(source, result)
        _log_unreachable(source, result, cache)
    return replace(source, sizes=result, cache=cache)


def _log_unreachable(source: RowSource, sizes: LengthIndex, cache: LengthCache) -> None:
    num_rows = list(sizes.failures.values()).count(Reason.URL_UNREACHABLE)
    if num_rows:
        logger.warning(
            f"source {source.name}: {counted(num_rows, 'row')} left out for want of an image behind a URL. Each was "
            f"asked once, and a host that failed {NUM_FAILURES} times in a row no more; SWIFT_TIMEOUT gives them more "
            f"seconds. They are asked again by runs that start {SECONDS_REMEMBERED // 60} minutes later, or when "
            f"{cache.path.with_name('unreachable.urls')} is deleted"
        )


def cache_path(source: RowSource, context: str, cache_dir: str | None) -> Path:
    """The file that remembers the lengths of a source under these settings."""
    folder = Path(cache_dir) if cache_dir else Path(get_cache_dir()) / "vlpack" / "lengths"
    name = re.sub(r"[^\w.-]+", "_", source.name)[-60:]
    digest = hashlib.blake2b(f"{source.name}\n{context}".encode(), digest_size=6).hexdigest()
    return folder.expanduser() / f"{name}-{digest}.lengths"


def _check_same_rows(source: RowSource, cache: LengthCache, settings: dict[str, str]) -> None:
    """Every rank measures some rows for all, so all must have the same."""
    spread = np.unique(np.linspace(0, max(0, len(source.rows) - 1), NUM_COMPARED).astype(np.int64)).tolist()
    rows = (row for index in spread for row in rows_at(source.rows, [index]))
    facts = {"rows": len(source.rows), "content": cache.fingerprint(rows), **settings}
    check_equal(f"rows of source {source.name!r} and the settings that lengths depend on", facts)


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def _joined(shares: list[Sizes]) -> Sizes:
    """The sizes of all rows; rank r measured the rows r, r + n, ..."""
    sizes = np.zeros(sum(map(len, shares)), SIZE)
    for number, share in enumerate(shares):
        sizes[number :: len(shares)] = share
    return sizes


def _own(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions in this rank's share of those rows that are in it."""
    return indices[indices % num_ranks() == rank()] // num_ranks()


def _extremes(sizes: Sizes) -> NDArray[np.int64]:
    """Rows at both ends of length, patches and aspect, as far as they have a size."""
    usable = np.flatnonzero(sizes["length"])

    def ends() -> Iterator[NDArray[np.int64]]:
        for column in ("length", "patches", "aspect"):
            order = usable[np.argsort(sizes[column][usable], kind="stable")]
            if len(order) and sizes[column][order[0]] != sizes[column][order[-1]]:
                yield order[:NUM_EXTREMES]
                yield order[max(0, len(order) - NUM_EXTREMES) :]

    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *ends()]))
