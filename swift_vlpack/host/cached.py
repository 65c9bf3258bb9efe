"""Load cached data sets (`--cached_dataset`) as sources: the rows that plain ms-swift would train, with their numbers.

ms-swift trusts the column `lengths` of such a data set, which does not say by which settings it was made, nor how many
patches and targets a row has. So all rows are measured as those of every source are, and `compare_lengths` says where
the column has other lengths.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset as HfDataset
from swift.dataset import DatasetLoader
from swift.pipelines import utils as swift_utils
from swift.utils import get_logger, is_master

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.host.messages import said_by_swift
from swift_vlpack.host.row_numbers import ROW, column
from swift_vlpack.rows.source import RowSource
from swift_vlpack.words import counted

logger = get_logger()

_LENGTHS = ("lengths", "length")
"""Names of the column in this version of ms-swift and in older ones."""


def cached_sources(args: Any, config: PackingConfig) -> list[RowSource]:
    """Load the training sources that `--cached_dataset` names."""
    if not getattr(args, "cached_dataset", None):
        return []
    loaded, _ = _load(args, config)
    names = [_name_of(path) for path in args.cached_dataset]
    return [
        _source(name if names.count(name) == 1 else f"{name}-{number}", one)
        for number, (name, one) in enumerate(zip(names, loaded, strict=True))
    ]


def with_cached_validation(rows: Any, args: Any, config: PackingConfig) -> Any:
    """Add the validation rows that `--cached_val_dataset` names to those of the run; either may be None."""
    if not getattr(args, "cached_val_dataset", None):
        return rows
    _, loaded = _load(args, config)
    own = [one.rows.remove_columns([name for name in (ROW, *_LENGTHS) if name in one.rows.column_names])
           for one in loaded]  # fmt: skip
    return DatasetLoader.concat_datasets([*own, *([] if rows is None else [rows])])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cached:
    """A cached data set as ms-swift loads it, with the number of each row in the column `ROW`."""

    rows: HfDataset
    folder: Path
    too_long: Sequence[int]
    """Numbers of the rows that ms-swift leaves out for `--max_length`."""


def _load(args: Any, config: PackingConfig) -> tuple[list[_Cached], list[_Cached]]:
    """Load both lists in one call, as plain ms-swift does: it draws the `#N` rows of all from one random stream."""
    if config.cuts_rows:  # keep ms-swift from deleting long rows, which are cut later
        args = copy.copy(args)
        args.truncation_strategy = None
    found: list[tuple[Path, Sequence[int]]] = []
    with said_by_swift("cannot load the cached data"), _noting(found, args):
        both = swift_utils.get_cached_dataset(args)
    noted = iter(found)
    train, val = ([_Cached(rows=rows, folder=at[0], too_long=at[1]) for rows, at in zip(some, noted)] for some in both)  # noqa: B905
    return train, val


@contextmanager
def _noting(found: list[tuple[Path, Sequence[int]]], args: Any) -> Iterator[None]:
    """Number the rows of every data set that ms-swift reads inside this block, and append its folder to `found`."""
    read = swift_utils.load_from_disk

    def numbered(path: str) -> HfDataset:
        rows = read(path)
        known = next((name for name in _LENGTHS if name in rows.column_names), None)
        if known is None:
            raise DataError(
                f"--cached_dataset {path} has no column lengths; `vlpack export` and `swift export` write it"
            )
        is_limited = args.truncation_strategy == "delete" and args.max_length is not None
        lengths = np.array([max(_numbers(one)) for one in rows[known]], dtype=np.int64)
        too_long = np.flatnonzero(lengths > args.max_length).tolist() if is_limited else ()
        found.append((Path(path).absolute(), too_long))
        return rows.add_column(ROW, np.arange(len(rows)))

    swift_utils.load_from_disk = numbered
    try:
        yield
    finally:
        swift_utils.load_from_disk = read


def _numbers(lengths: Any) -> list[int]:
    return lengths if isinstance(lengths, list) else [lengths]


def _name_of(path: str) -> str:
    """Return the name of a source: `captions_cached/train`."""
    folder = Path(path.rpartition("#")[0] if not os.path.exists(path) else path).absolute()
    return f"{folder.parent.name}/{folder.name}"


def _source(name: str, one: _Cached) -> RowSource:
    known = next(column for column in _LENGTHS if column in one.rows.column_names)
    if one.too_long:
        logger.warning(f"source {name}: {counted(len(one.too_long), 'row')} over --max_length left out")
    return RowSource(
        name=name,
        rows=one.rows.remove_columns([ROW, known]),
        row_numbers=column(one.rows, ROW),
        num_lost=len(one.too_long),
        lost_rows=dict.fromkeys(one.too_long, "the row has more tokens than --max_length"),
        origin=str(one.folder),
        cached_lengths=np.array([sum(_numbers(of_row)) for of_row in one.rows[known]], dtype=np.int64),
    )


def compare_lengths(sources: Sequence[RowSource]) -> None:
    """Warn if cached lengths differ from the lengths of this run, with which packs are planned."""
    for source in sources:
        if source.cached_lengths is None or source.sizes is None or not is_master():
            continue
        own = source.sizes.lengths
        differing = np.flatnonzero((own > 0) & (own != source.cached_lengths))
        if len(differing):
            first = int(differing[0])
            example = f"{source.where(first)}: {source.cached_lengths[first]} there, {own[first]} here"
            logger.warning(
                f"source {source.name}: {len(differing)} of {counted(len(own), 'length')} in the cached data set are "
                f"not those of this run, which were measured anew ({example}); it was exported by other settings"
            )
