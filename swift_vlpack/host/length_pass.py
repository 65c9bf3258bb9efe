"""The lengths of a source of a run: what is ms-swift's goes into `lengths.measure`, what comes out is logged."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from swift.utils import get_logger, is_master

import swift_vlpack
from swift_vlpack.host import ranks
from swift_vlpack.host.headers import pixel_free, reading_urls
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.context import dependencies_of, is_of_length
from swift_vlpack.lengths.environment import Reads
from swift_vlpack.lengths.failure_log import log_failures, log_surplus_tags
from swift_vlpack.lengths.folders import lengths_folder
from swift_vlpack.lengths.inputs import Encoders, Known
from swift_vlpack.lengths.measure import measure
from swift_vlpack.lengths.observed import Memory, Observed, dependencies_in, late_imports, observe
from swift_vlpack.lengths.rank_rows import rows_at
from swift_vlpack.lengths.remembered import About, tell_about
from swift_vlpack.lengths.retry_key import digest_of_cures
from swift_vlpack.lengths.source_code import is_installed
from swift_vlpack.lengths.trust import Trust
from swift_vlpack.lengths.values import digest_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.urls import Urls

logger = get_logger()

NUM_ROWS_EQUAL_ON_RANKS = 1024
"""Rows, spread over a source, that have to be the same on all ranks: files that differ do so in more than one row in a
thousand, and a million rows need not be read for it."""


def with_lengths(source: RowSource, encoder: RowEncoder, args: Any, cache_dir: str | None = None) -> RowSource:
    """Give a source the lengths of its rows; each rank of the run measures some in `dataset_num_proc` processes."""
    encoder = encoder.for_source(source)
    own = encoder.template
    memory_of_urls = lengths_folder(cache_dir, os.environ) / "unreachable.urls"
    # Under `strict` a failing URL ends the run, so failures are not remembered and every URL is requested again.
    urls = Urls(None if args.strict else memory_of_urls)
    encoders = Encoders(
        by_header=encoder.using(pixel_free(own, urls)),
        in_full=encoder.using(reading_urls(own, urls)),
        is_strict=args.strict,
        num_processes=args.dataset_num_proc or 1,
    )
    # Targets are counted too, and no part of the template.
    dependencies = dependencies_of(own, getattr(args, "external_plugins", None) or []) | {"targets": encoder.targets}
    memory = Memory(memory_of_urls.with_name(f"{digest_of(dependencies, 16)}.observed"), source.name)
    observed = _observed(source, encoders, memory)
    found = dependencies_in(observed, but=dependencies["variables"])
    # Values that modules keep may be of one rank only, such as its number: the key has those of the first.
    of_first = ranks.results_of_all(partial(found.pop, "modules", None))[0]
    if of_first is not None:
        found["modules"] = of_first
    if found:
        dependencies["observed"] = found
    context = digest_of(dependencies, 16)
    cutting = "" if encoder.cutter is None else encoder.cutter.digest()
    cache = LengthCache(cache_path(source, context, cache_dir), context, digest_of_cures(), cutting)
    if ranks.num_ranks() > 1:
        _check_same_rows(source, cache, {name: digest_of(part, 4) for name, part in dependencies.items()})
    # A resumed run goes on with the plan it had; the notes wait for the next new one.
    if not getattr(args, "resume_from_checkpoint", None):
        cache.take_over_notes()
    if is_master():
        of = (own.template_meta.template_type, own.model_meta.model_type)
        tell_about(cache.path, About(source.name, source.origin, *map(str, of), swift_vlpack.__version__))
    known = Known(cache=cache, trust=Trust(cache.path.with_name(f"{context}.trust")), urls=urls)
    with late_imports():
        sizes = measure(source, known, encoders, ranks.RanksOfRun())
    _note_reads(source, memory, observed.variables.union(dependencies["variables"]), known.reads)
    # A text-only model trains every tag as words, so no tag is surplus.
    sizes = sizes if own.model_meta.is_multimodal else replace(sizes, surplus_tags=())
    if is_master():
        log_surplus_tags(source, sizes)
        log_failures(source, sizes, memory_of_urls)
    return replace(source, sizes=sizes, remember_size=cache.remember)


def _observed(source: RowSource, encoders: Encoders, memory: Memory) -> Observed:
    """Return what earlier starts observed, united over ranks. Without any, the first rank encodes rows to observe."""

    def of_this_rank() -> Observed:
        if (known := memory.load()) is not None or ranks.rank() > 0:
            return known or Observed()
        with late_imports():
            found, reads = observe(source, encoders)
        memory.add(found)
        _warn_of_whole_environment(source, reads)
        return found

    return Observed.united(ranks.results_of_all(of_this_rank))


def _note_reads(source: RowSource, memory: Memory, known: frozenset[str], reads: Reads) -> None:
    """Remember the variables that only some rows read, and warn of what cannot be followed."""
    if more := set(filter(is_of_length, reads.names)) - known:
        memory.add(Observed(variables=frozenset(more)))
        logger.info(
            f"source {source.name}: some of its rows read {', '.join(sorted(more))}, "
            "which lengths are remembered under from the next start on"
        )
    _warn_of_whole_environment(source, reads)


def _warn_of_whole_environment(source: RowSource, reads: Reads) -> None:
    own = sorted(place for place in reads.whole if not is_installed(place.rpartition(":")[0]))
    if own and is_master():
        logger.warning(
            f"source {source.name}: {', '.join(own)} reads the whole environment; which variables are "
            "meant nothing tells, so another value of theirs measures no row again. Read them by name "
            "(os.environ.get), or run `vlpack cache clear` when one has changed"
        )


def cache_path(source: RowSource, context: str, cache_dir: str | None) -> Path:
    """The file that remembers the lengths of a source under these settings."""
    name = re.sub(r"[^\w.-]+", "_", source.name)[-60:]
    # The settings are in the name, so that sizes found under others stay beside these.
    digest = hashlib.blake2b(f"{source.name}\n{context}".encode(), digest_size=6).hexdigest()
    return lengths_folder(cache_dir, os.environ) / f"{name}-{digest}.lengths"


def _check_same_rows(source: RowSource, cache: LengthCache, settings: dict[str, str]) -> None:
    """Every rank measures some rows for all, so all must have the same."""
    last = max(0, len(source.rows) - 1)
    spread = np.unique(np.linspace(0, last, NUM_ROWS_EQUAL_ON_RANKS).astype(np.int64)).tolist()
    rows = (row for index in spread for row in rows_at(source.rows, [index]))
    seen_here = {"rows": len(source.rows), "content": cache.fingerprint(rows), **settings}
    ranks.check_equal(f"rows of source {source.name!r} and the settings that lengths depend on", seen_here)
