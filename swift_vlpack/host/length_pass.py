"""Measure the sources of a run: call `lengths.measure` with ms-swift's template and arguments, and log the result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from swift.utils import get_logger, is_master

import swift_vlpack
from swift_vlpack.host import ranks
from swift_vlpack.host.headers import pixel_free, reading_urls
from swift_vlpack.host.same_on_ranks import check_equal
from swift_vlpack.lengths.cache import LengthCache, fingerprint
from swift_vlpack.lengths.cache_folder import About, lengths_folder, lengths_path, write_about
from swift_vlpack.lengths.context import dependencies_of, digest_of
from swift_vlpack.lengths.failures import log_failures, log_surplus_tags
from swift_vlpack.lengths.measure import Progress, measure
from swift_vlpack.lengths.prefixes import SourceToShare, with_prefixes
from swift_vlpack.lengths.rows_work import Encoders
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
    share_within: int | None = None,
) -> list[RowSource]:
    """Measure the rows of all sources, with one progress bar on rank 0.

    With `in_full`, every row is encoded in full, unless an earlier start has done so. With `share_within`, also find
    the rows that begin with the same media and have fewer tokens than that.
    """
    num_rows = sum(-(-len(source.rows) // ranks.num_ranks()) for source in sources)
    folder = lengths_folder(cache_dir, os.environ)
    # Before any row is encoded: encoding may change what templates and plugins hold.
    dependencies = dependencies_of(encoder.template, getattr(args, "external_plugins", None) or [])
    with _without_model(encoder.template):
        with Progress(num_rows, is_shown=is_master()) as progress:
            of_run = _Pass(args, folder, progress, dependencies, in_full)
            measured = [of_run.measured(source, encoder.for_source(source)) for source in sources]
        if share_within is None:
            return [one.source for one in measured]
        return with_prefixes(measured, share_within, ranks.RanksOfRun(), is_shown=is_master())


@contextmanager
def _without_model(template: Any) -> Iterator[None]:
    """Remove the model from the template: the forked processes of the length pass need no weights."""
    model, template.model = template.model, None
    try:
        yield
    finally:
        template.model = model


class _Pass(NamedTuple):
    """Measure the rows of each source. Each rank of the run measures some of them in `dataset_num_proc` processes."""

    args: Any
    folder: Path
    progress: Progress
    dependencies: Mapping[str, Any]
    in_full: bool

    def measured(self, source: RowSource, encoder: RowEncoder) -> SourceToShare:
        """Measure a source with its own encoder."""
        template, args = encoder.template, self.args
        urls = Urls()
        encoders = Encoders(
            by_header=None if self.in_full else encoder.using(pixel_free(template, urls)),
            in_full=encoder.using(reading_urls(template, urls)),
            urls=urls,
            is_strict=args.strict,
            num_processes=args.dataset_num_proc or 1,
        )
        cache = self._cache(source, encoder)
        sizes = measure(source, cache, encoders, ranks.RanksOfRun(), self.progress)
        # A text-only model trains every tag as words, so no tag is surplus.
        sizes = sizes if template.model_meta.is_multimodal else replace(sizes, surplus_tags=())
        if is_master():
            log_surplus_tags(source, sizes)
            log_failures(source, sizes)
        return SourceToShare(replace(source, sizes=sizes), encoders, cache.path)

    def _cache(self, source: RowSource, encoder: RowEncoder) -> LengthCache:
        """Open the cache for this source and template, after a check that all ranks have the same rows and settings."""
        dependencies = {
            **self.dependencies,
            "max_pixels": source.max_pixels,
            "targets": encoder.targets,  # sizes count supervised tokens, and targets are not in the template
        }
        context = digest_of(dependencies, 16)
        cutting = "" if encoder.divider is None else encoder.divider.digest()
        cache = LengthCache(lengths_path(self.folder, source.name, context), context, cutting)
        if ranks.num_ranks() > 1:
            _check_same_rows(source)
        if is_master():
            template = encoder.template
            of_model = (str(template.template_meta.template_type), str(template.model_meta.model_type))
            write_about(cache.path, About(source.name, source.origin, *of_model, swift_vlpack.__version__))
        return cache


def _check_same_rows(source: RowSource) -> None:
    """Raise `RanksDiffer` if ranks have different rows: every rank measures some rows for all."""
    last = max(0, len(source.rows) - 1)
    spread = np.unique(np.linspace(0, last, NUM_ROWS_EQUAL_ON_RANKS).astype(np.int64)).tolist()
    rows = rows_in_turn(source.rows, spread)
    check_equal(
        f"rows of source {source.name!r}",
        {"rows": len(source.rows), "content": fingerprint(rows), "max_pixels": source.max_pixels},
    )
