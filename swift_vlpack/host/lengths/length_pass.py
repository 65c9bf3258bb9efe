"""The lengths of a source of a run: what is ms-swift's goes into `data.lengths.measure`, what comes out is logged."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from swift.utils import is_master

import swift_vlpack
from swift_vlpack.core.checkup.folders import lengths_folder
from swift_vlpack.data.audit.remembered import About, tell_about
from swift_vlpack.data.lengths.cache import LengthCache
from swift_vlpack.data.lengths.cures import digest_of_cures
from swift_vlpack.data.lengths.failure_log import log_failures
from swift_vlpack.data.lengths.inputs import Encoders, Known
from swift_vlpack.data.lengths.measure import measure
from swift_vlpack.data.lengths.rank_rows import rows_at
from swift_vlpack.data.lengths.trust import Trust
from swift_vlpack.data.parts.row_cutter import cutter_of
from swift_vlpack.data.rows.fusion import RowSource, own_template
from swift_vlpack.data.rows.urls import Urls
from swift_vlpack.host import ranks
from swift_vlpack.host.lengths.context import context_of, digests_of
from swift_vlpack.host.lengths.headers import pixel_free, reading_urls

NUM_ROWS_EQUAL_ON_RANKS = 1024
"""Rows, spread over a source, that have to be the same on all ranks: files that differ do so in more than one row in a
thousand, and a million rows need not be read for it."""


def with_lengths(source: RowSource, template: Any, args: Any, cache_dir: str | None = None) -> RowSource:
    """Give a source the lengths of its rows; each rank of the run measures some in `dataset_num_proc` processes."""
    own = own_template(template, source)
    plugins = getattr(args, "external_plugins", None) or []
    context = context_of(own, plugins)
    cutter = cutter_of(own)
    cutting = "" if cutter is None else cutter.digest()
    cache = LengthCache(cache_path(source, context, cache_dir), context, digest_of_cures(), cutting)
    if ranks.num_ranks() > 1:
        _check_same_rows(source, cache, digests_of(own, plugins))
    # A resumed run goes on with the plan it had; the notes wait for the next new one.
    if not getattr(args, "resume_from_checkpoint", None):
        cache.take_over_notes()
    if is_master():
        of = (own.template_meta.template_type, own.model_meta.model_type)
        tell_about(cache.path, About(source.name, source.origin, *map(str, of), swift_vlpack.__version__))
    memory = cache.path.with_name("unreachable.urls")
    # Under `strict` a failure ends the run, so that one is asked for again and not remembered.
    urls = Urls(None if args.strict else memory)
    known = Known(cache=cache, trust=Trust(cache.path.with_name(f"{context}.trust")), urls=urls)
    encoders = Encoders(
        by_header=pixel_free(own, urls),
        in_full=reading_urls(own, urls),
        is_strict=args.strict,
        num_processes=args.dataset_num_proc or 1,
    )
    sizes = measure(source, known, encoders, ranks.RanksOfRun())
    if is_master():
        log_failures(source, sizes, memory)
    return replace(source, sizes=sizes, cache=cache)


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
