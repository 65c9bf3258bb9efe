"""Measure the sources of a run: call `lengths.measure` with ms-swift's template and arguments, and log the result."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from swift.utils import get_logger, is_master

import swift_vlpack
from swift_vlpack.host import ranks
from swift_vlpack.host.headers import pixel_free, reading_urls
from swift_vlpack.host.same_on_ranks import check_equal
from swift_vlpack.lengths.cache import LengthCache, fingerprint
from swift_vlpack.lengths.cache_folder import UNREACHABLE_URLS, About, lengths_folder, lengths_path, write_about
from swift_vlpack.lengths.context import dependencies_of, digest_of, is_of_length
from swift_vlpack.lengths.environment import Reads
from swift_vlpack.lengths.failures import log_failures, log_surplus_tags, retry_key
from swift_vlpack.lengths.measure import Progress, measure
from swift_vlpack.lengths.measured_sizes import LengthCaches
from swift_vlpack.lengths.observed import Observed, ObservedFile, dependencies_in, late_imports, observe
from swift_vlpack.lengths.prefixes import SharingLimits, SourceToShare, with_prefixes
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.lengths.source_code import is_installed
from swift_vlpack.lengths.trust import Trust
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.source import RowSource, rows_in_turn
from swift_vlpack.rows.urls import Urls

logger = get_logger()

NUM_ROWS_EQUAL_ON_RANKS = 1024
"""Rows, spread over a source, that are compared between ranks. Files that differ do so in more than one row of a
thousand, so there is no need to read a million rows to see it."""


def with_all_lengths(
    sources: Sequence[RowSource],
    encoder: RowEncoder,
    args: Any,
    cache_dir: str | None = None,
    *,
    in_full: bool = False,
    sharing: SharingLimits | None = None,
) -> list[RowSource]:
    """Measure the rows of all sources, with one progress bar on rank 0.

    With `in_full`, every row is encoded in full, unless an earlier start has done so. With `sharing`, also find the
    rows that begin with the same media.
    """
    num_rows = sum(-(-len(source.rows) // ranks.num_ranks()) for source in sources)
    with _without_model(encoder.template):
        with Progress(num_rows, is_shown=is_master()) as progress:
            measured = [_measured(source, encoder, args, cache_dir, progress, in_full=in_full) for source in sources]
        if sharing is None:
            return [one.source for one in measured]
        folder = lengths_folder(cache_dir, os.environ)
        return with_prefixes(measured, sharing, ranks.RanksOfRun(), folder=folder, is_shown=is_master())


@contextmanager
def _without_model(template: Any) -> Iterator[None]:
    """Remove the model from the template: the forked processes of the length pass need no weights."""
    model, template.model = template.model, None
    try:
        yield
    finally:
        template.model = model


def _measured(
    source: RowSource,
    encoder: RowEncoder,
    args: Any,
    cache_dir: str | None,
    progress: Progress,
    *,
    in_full: bool,
) -> SourceToShare:
    """Measure the rows of a source. Each rank of the run measures some of them in `dataset_num_proc` processes."""
    encoder = encoder.for_source(source)
    template = encoder.template
    folder = lengths_folder(cache_dir, os.environ)
    # Under `strict` a failing URL ends the run, so do not remember failures, and request every URL again.
    urls = Urls(None if args.strict else folder / UNREACHABLE_URLS)
    encoders = Encoders(
        by_header=None if in_full else encoder.using(pixel_free(template, urls)),
        in_full=encoder.using(reading_urls(template, urls)),
        urls=urls,
        is_strict=args.strict,
        num_processes=args.dataset_num_proc or 1,
    )
    dependencies = dependencies_of(template, getattr(args, "external_plugins", None) or [])
    dependencies["targets"] = encoder.targets  # sizes count supervised tokens, and targets are not in the template
    observed_file = ObservedFile(folder / f"{digest_of(dependencies, 16)}.observed", source.name)
    observed = _observed(source, encoders, observed_file)
    dependencies |= _observed_dependencies(observed, but=dependencies["variables"])
    cache = _cache(source, encoder, dependencies, folder)
    # A resumed run keeps its plan, so the notes wait for the next new run.
    if not getattr(args, "resume_from_checkpoint", None):
        cache.take_over_notes()
    caches = LengthCaches(cache=cache, trust=Trust(folder / f"{digest_of(dependencies, 16)}.trust"))
    with late_imports():
        sizes = measure(source, caches, encoders, ranks.RanksOfRun(), progress)
    _save_reads(source, observed_file, observed.variables.union(dependencies["variables"]), caches.reads)
    # A text-only model trains every tag as words, so no tag is surplus.
    sizes = sizes if template.model_meta.is_multimodal else replace(sizes, surplus_tags=())
    if is_master():
        log_surplus_tags(source, sizes)
        log_failures(source, sizes, folder / UNREACHABLE_URLS)
    return SourceToShare(replace(source, sizes=sizes, remember_size=cache.remember), encoders, cache.path)


def _cache(source: RowSource, encoder: RowEncoder, dependencies: dict[str, Any], folder: Path) -> LengthCache:
    """Open the cache for this source and template, after a check that all ranks have the same rows and settings."""
    context = digest_of(dependencies, 16)
    cutting = "" if encoder.divider is None else encoder.divider.digest()
    cache = LengthCache(lengths_path(folder, source.name, context), context, retry_key(), cutting)
    if ranks.num_ranks() > 1:
        _check_same_rows(source, {name: digest_of(part, 4) for name, part in dependencies.items()})
    if is_master():
        template = encoder.template
        of_model = (str(template.template_meta.template_type), str(template.model_meta.model_type))
        write_about(cache.path, About(source.name, source.origin, *of_model, swift_vlpack.__version__))
    return cache


def _check_same_rows(source: RowSource, settings: dict[str, str]) -> None:
    """Raise `RanksDiffer` if ranks have different rows or settings: every rank measures some rows for all."""
    last = max(0, len(source.rows) - 1)
    spread = np.unique(np.linspace(0, last, NUM_ROWS_EQUAL_ON_RANKS).astype(np.int64)).tolist()
    rows = rows_in_turn(source.rows, spread)
    check_equal(
        f"rows of source {source.name!r} and the settings that lengths depend on",
        {"rows": len(source.rows), "content": fingerprint(rows), **settings},
    )


# -- observed dependencies --------------------------------------------------------------------------------------------


def _observed(source: RowSource, encoders: Encoders, file: ObservedFile) -> Observed:
    """Return what earlier starts observed, united over ranks. If nothing is saved, rank 0 encodes rows to observe."""

    def of_this_rank() -> Observed:
        if (known := file.load()) is not None or ranks.rank() > 0:
            return known or Observed()
        with late_imports():
            found, reads = observe(source, encoders)
        file.add(found)
        _warn_of_whole_environment(source, reads)
        return found

    return Observed.united(ranks.results_of_all(of_this_rank))


def _observed_dependencies(observed: Observed, but: Container[str]) -> dict[str, Any]:
    """Return the present values of all observed inputs as one dependency; empty if nothing was observed."""
    found = dependencies_in(observed, but)
    # Modules may hold values that differ between ranks, such as the rank's number, so all keys use those of rank 0.
    of_first = ranks.results_of_all(partial(found.pop, "modules", None))[0]
    if of_first is not None:
        found["modules"] = of_first
    return {"observed": found} if found else {}


def _save_reads(source: RowSource, file: ObservedFile, known: frozenset[str], reads: Reads) -> None:
    """Save the variables that only some rows read, and warn of code that reads the whole environment."""
    if more := set(filter(is_of_length, reads.names)) - known:
        file.add(Observed(variables=frozenset(more)))
        logger.info(
            f"source {source.name}: some of its rows read {', '.join(sorted(more))}; "
            "cached lengths depend on these variables from the next start on"
        )
    _warn_of_whole_environment(source, reads)


def _warn_of_whole_environment(source: RowSource, reads: Reads) -> None:
    own = sorted(place for place in reads.whole if not is_installed(place.rpartition(":")[0]))
    if own and is_master():
        logger.warning(
            f"source {source.name}: {', '.join(own)} reads the whole environment, so it is not known which variables "
            "lengths depend on, and no row is measured again when one changes. Read them by name (os.environ.get), or "
            "run `vlpack cache clear` after a change"
        )
