"""Load the rows of all sources with ms-swift's own loader, and keep the number of each row in its file.

`load_dataset` draws `#N`, validation rows and orders for one data set after the other from one stream of random
numbers. So it is called once for all, as plain `swift sft` calls it, and its result is divided into sources again.
During the call, every source is registered with ms-swift under a temporary name, with its `preprocess_func` and loader
wrapped. The wrapped `preprocess_func` records the rows of the file that are left, and the wrapped loader numbers the
rows of all sources.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset as HfDataset
from datasets.exceptions import DatasetGenerationError
from numpy.typing import NDArray
from swift.dataset import DATASET_MAPPING, DatasetLoader, DatasetMeta, DatasetSyntax, load_dataset
from swift.utils import get_logger, safe_ddp_context, use_hf_hub

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError, VLPackError
from swift_vlpack.host.args import data_seed
from swift_vlpack.host.cached import cached_sources
from swift_vlpack.host.messages import Refused, said_by_swift
from swift_vlpack.host.row_numbers import LEFT_OUT, NumberedPreprocess, PreprocessedRows, column
from swift_vlpack.json_lines import broken_line
from swift_vlpack.pages.safe_text import visible
from swift_vlpack.rows.fusion_config import SourceSpec, read_fusion_config, specs_of
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows

logger = get_logger()

PLACE = "vlpack_place"
NUM_LOST_NAMED = 20
"""Most deleted rows that the log names; `left_out.jsonl` lists all of them."""


@dataclass(kw_only=True, eq=False)
class _Loading:
    """A source while ms-swift loads it, and what is recorded about it meanwhile."""

    spec: SourceSpec
    name: str
    """The name under which the source is registered."""
    meta: DatasetMeta
    """The registered description of its data set."""
    syntax: DatasetSyntax
    calls: list[PreprocessedRows] = field(default_factory=list)
    first: int = 0
    """Place of its first row among the loaded rows of all sources."""
    num_rows: int = 0
    columns: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Return the full path of the local file or folder, otherwise the name on the hub."""
        name = self.meta.dataset_path or self.syntax.dataset
        return os.path.abspath(name) if os.path.exists(name) else name

    @property
    def numbers(self) -> NDArray[np.int64] | None:
        """Return the number of each loaded row among all rows that were read; None if that is not known."""
        read = np.cumsum([0, *(call.num_read for call in self.calls)])
        found = [
            first + call.numbers for first, call in zip(read, self.calls, strict=False) if call.numbers is not None
        ]
        is_known = len(found) == len(self.calls) and sum(map(len, found)) == self.num_rows
        # Trust the numbers only with ms-swift's standard loader: another one may change rows after preprocessing.
        return np.concatenate(found) if is_known and found and self.meta.loader is DatasetLoader else None

    @property
    def num_read(self) -> int:
        """Return the number of rows in the file."""
        return sum(call.num_read for call in self.calls)


def load_sources(args: Any, config: PackingConfig) -> tuple[list[RowSource], HfDataset | None]:
    """Load the training sources and the validation rows (or None): the same rows as plain `swift sft`."""
    cached = cached_sources(args, config)
    if not (args.dataset or config.fusion_config):
        return _after(cached, []), _validation(args) if args.val_dataset else None
    specs = read_fusion_config(config.fusion_config).sources if config.fusion_config else specs_of(args.dataset)
    options = args.get_dataset_kwargs()
    datasets = [spec.dataset for spec in specs]
    with _errors_in_one_line(datasets), _registered(specs, options.get("use_hf")) as loading:
        train, val_dataset = load_dataset(
            [_dataset_argument(one) for one in loading],
            split_dataset_ratio=args.split_dataset_ratio,
            shuffle=args.dataset_shuffle,
            **options,
        )
    if train is None:
        raise DataError(f"split_dataset_ratio {args.split_dataset_ratio} leaves no row to train on")
    if val_dataset is not None:
        val_dataset = val_dataset.remove_columns(PLACE)
    if args.val_dataset:
        val_dataset = _validation(args)
    places = column(train, PLACE)
    train = train.remove_columns(PLACE)
    sources = [_source(one, train, places, loading, _deleted_rows(one)) for one in loading]
    if config.fusion_config:  # no un-packed run has a fusion_config, so rows have no place in one
        sources = [replace(source, places=None) for source in sources]
    return _after(cached, sources), val_dataset


def _after(cached: list[RowSource], sources: list[RowSource]) -> list[RowSource]:
    """Put sources after cached ones, as plain ms-swift joins them."""
    if not cached:
        return sources
    ends = np.cumsum([0, *(len(source.rows) for source in cached)]).tolist()
    placed = [replace(one, places=start + np.arange(len(one.rows))) for one, start in zip(cached, ends, strict=False)]
    later = [replace(one, places=None if one.places is None else one.places + ends[-1]) for one in sources]
    return [*placed, *later]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnRows:
    """Rows in the order in which ms-swift drew them, and their sources."""

    rows: HfDataset
    """All rows, with all columns."""
    sources: list[RowSource]
    """Their `places` are those among `rows`."""


def load_drawn(args: Any) -> tuple[DrawnRows | None, DrawnRows | None]:
    """Load training and validation rows as `args.load_dataset()` does, in its order; None if there are none."""
    train = val = None
    if args.dataset:
        options = {"split_dataset_ratio": args.split_dataset_ratio, "shuffle": args.dataset_shuffle}
        train, val = _drawn(args.dataset, {**args.get_dataset_kwargs(), **options})
    if args.val_dataset:
        options = {"split_dataset_ratio": 1.0, "shuffle": args.val_dataset_shuffle, "interleave_prob": None}
        _, val = _drawn(args.val_dataset, {**args.get_dataset_kwargs(), **options})
    return train, val


def _drawn(datasets: list[str], options: dict[str, Any]) -> list[DrawnRows | None]:
    """Load data sets. Returns [training rows, validation rows], as ms-swift divides them."""
    with _errors_in_one_line(datasets), _registered(specs_of(datasets), options.get("use_hf")) as loading:
        both = load_dataset([_dataset_argument(one) for one in loading], **options)
    lost = [_deleted_rows(one) for one in loading]
    found: list[DrawnRows | None] = []
    for rows in both:
        found.append(None if rows is None else _divided(rows, loading, lost))
        # Only the first of both that has rows of a source lists its deleted rows, so that none is listed twice.
        names = set() if found[-1] is None else {source.name for source in found[-1].sources}
        lost = [known and {} if one.spec.name in names else known for one, known in zip(loading, lost, strict=True)]
    return found


def _divided(rows: HfDataset, loading: Sequence[_Loading], lost: Sequence[dict[int, str] | None]) -> DrawnRows:
    places = column(rows, PLACE)
    rows = rows.remove_columns(PLACE)
    return DrawnRows(
        rows=rows,
        sources=[
            _source(one, rows, places, loading, of_source)
            for one, of_source in zip(loading, lost, strict=True)
            if len(_rows_of(one, places))
        ],
    )


def load_stream(args: Any, template: Any) -> tuple[StreamedRows, Any]:
    """Load the rows of `--streaming true` by ms-swift's own loader, and the validation rows or None."""
    with _errors_in_one_line(args.dataset):
        rows, _ = load_dataset(args.dataset, shuffle=args.dataset_shuffle, **args.get_dataset_kwargs())
    stream = StreamedRows(rows, template, strict=args.strict, seed=data_seed(args))
    return stream, _validation(args) if args.val_dataset else None


def _validation(args: Any) -> Any:
    """Load `--val_dataset`, even of a stream as a list: every evaluation has to be over the same rows, and to end."""
    with _errors_in_one_line(args.val_dataset):
        _, rows = load_dataset(
            args.val_dataset, split_dataset_ratio=1.0, shuffle=args.val_dataset_shuffle, **args.get_dataset_kwargs()
        )
        return list(rows) if args.streaming else rows


@contextmanager
def _errors_in_one_line(datasets: Sequence[str]) -> Iterator[None]:
    """Turn an error of loading into one line that names the broken line of a file, or the data set."""
    datasets = list(map(str, datasets))
    try:
        with said_by_swift("cannot load the data", datasets):
            yield
    except Exception as error:
        if isinstance(error, VLPackError) and not isinstance(error, Refused):
            raise
        for path in map(Path, datasets):
            if path.suffix in (".json", ".jsonl") and path.is_file() and (broken := broken_line(path)):
                raise DataError(f"{path}:{broken[0]}: {broken[1]}") from None
        if isinstance(error, StopIteration):
            raise DataError(f"there is no row in {' nor in '.join(datasets)}") from None
        if isinstance(error, DatasetGenerationError):
            raise DataError(f"{', '.join(datasets)} cannot be loaded: {error.__cause__ or error}") from error
        raise


@contextmanager
def _registered(specs: Sequence[SourceSpec], use_hf: bool | None) -> Iterator[list[_Loading]]:
    """Register every source under a temporary name inside this block. Yields the records of their loading."""
    loading = [_looked_up(spec, f"vlpack-source-{number}", use_hf) for number, spec in enumerate(specs)]
    for number, one in enumerate(loading):
        DATASET_MAPPING[one.name] = _numbered_meta(one, loading[:number])
    try:
        yield loading
    # Remove the names even if loading fails: another run in the same process must not find them.
    finally:
        for one in loading:
            del DATASET_MAPPING[one.name]


def _looked_up(spec: SourceSpec, name: str, use_hf: bool | None) -> _Loading:
    """Look up a data set by ms-swift's rules: a registered name, else an id or a path that is not registered."""
    syntax = DatasetSyntax.parse(spec.dataset)
    if syntax.dataset in DATASET_MAPPING:
        return _Loading(spec=spec, name=name, meta=DATASET_MAPPING[syntax.dataset], syntax=syntax)
    on_hf = use_hf_hub() if use_hf is None else use_hf
    meta = copy.copy(syntax.get_dataset_meta(on_hf if syntax.use_hf is None else syntax.use_hf))
    if syntax.dataset_type == "path":
        meta.dataset_path, syntax.use_hf = syntax.dataset, None
    else:
        meta.dataset_path, meta.ms_dataset_id, meta.hf_dataset_id = None, syntax.dataset, syntax.dataset
    return _Loading(spec=spec, name=name, meta=meta, syntax=syntax)


def _dataset_argument(one: _Loading) -> str:
    """Write a source as `--dataset` takes it, with its temporary name."""
    hub = {True: "hf::", False: "ms::", None: ""}[one.syntax.use_hf]
    subsets = f":{'/'.join(one.syntax.subsets)}" if one.syntax.subsets else ""
    sample = "" if one.syntax.dataset_sample is None else f"#{one.syntax.dataset_sample}"
    return f"{hub}{one.name}{subsets}{sample}"


def _numbered_meta(one: _Loading, before: Sequence[_Loading]) -> DatasetMeta:
    """Return the description of a data set with its preprocessing and loader wrapped: they record into `one`."""
    # Copy the description, because everything that is loaded in this process shares ms-swift's registry.
    meta = copy.copy(one.meta)
    meta.preprocess_func = NumberedPreprocess(meta.preprocess_func, one.calls)
    meta.subsets = [copy.copy(subset) for subset in meta.subsets]
    for subset in meta.subsets:
        if subset.preprocess_func is not None:
            subset.preprocess_func = NumberedPreprocess(subset.preprocess_func, one.calls)

    def numbered_loader(**kwargs: Any) -> Any:
        loader = one.meta.loader(**kwargs)
        load = loader.load
        loader.load = lambda *args, **kwargs: _with_places(load(*args, **kwargs), one, before)
        return loader

    meta.loader = numbered_loader
    return meta


def _with_places(rows: HfDataset, one: _Loading, before: Sequence[_Loading]) -> HfDataset:
    if len(rows) == 0:  # ms-swift would divide by zero
        raise DataError(
            f"source {one.spec.name!r} ({one.spec.dataset}) has no usable row: ms-swift found none, or deleted all"
        )
    one.first = sum(loaded.num_rows for loaded in before)
    one.num_rows = len(rows)
    one.columns = tuple(rows.column_names)
    with safe_ddp_context(None, True):  # a new column rewrites filtered rows on disk, so one rank at a time
        return rows.add_column(PLACE, one.first + np.arange(len(rows)))


def _rows_of(one: _Loading, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of a source's rows among rows with these places."""
    return np.flatnonzero((places >= one.first) & (places < one.first + one.num_rows))


def _source(
    one: _Loading,
    train: HfDataset,
    places: NDArray[np.int64],
    everything: Sequence[_Loading],
    lost: dict[int, str] | None,
) -> RowSource:
    """Make a `RowSource` of the rows of one source, in the order in which ms-swift drew them.

    `train` and `places` are the rows of all sources and their places. `lost` are the rows of the file that the loader
    deleted; None if that cannot be known.
    """
    spec = one.spec
    here = _rows_of(one, places)
    if len(here) == 0:
        raise DataError(f"source {spec.name!r} ({spec.dataset}): no row is left to train on")
    rows = train if len(here) == len(train) else train.select(here)
    numbers = one.numbers
    loaded = places[here] - one.first
    return RowSource(
        name=spec.name,
        rows=rows.remove_columns(_columns_of_others(one, rows, everything)),
        ratio=spec.ratio,
        sample_limit=spec.sample_limit,
        system=spec.system,
        max_pixels=spec.max_pixels,
        seed=spec.seed,
        row_numbers=loaded if numbers is None else numbers[loaded],
        is_numbered=numbers is not None,
        num_lost=None if lost is None else len(lost),
        lost_rows=lost or {},
        origin=one.origin,
        places=here,
    )


def _columns_of_others(one: _Loading, rows: HfDataset, everything: Sequence[_Loading]) -> list[str]:
    """Return the columns that are there, and empty, only because another source has them."""
    others = {column for other in everything for column in other.columns} - set(one.columns)
    return [column for column in rows.column_names if column in others]


def _deleted_rows(one: _Loading) -> dict[int, str] | None:
    """Find the rows of the file that the loader deleted, and why, and log them; None if that cannot be known."""
    name, numbers = one.spec.name, one.numbers
    if numbers is None:
        counts = (
            f"{one.num_read} rows went into it and {one.num_rows} came out" if one.calls else "it has its own loader"
        )
        logger.warning(
            f"source {name}: what its preprocess_func or loader returns cannot be matched with the rows of the file "
            f"({counts}). Its rows are named by their place in what was returned ({name}:loaded-0, ...), not by their "
            "row in the file, and how many were lost is unknown"
        )
        return None
    lost: list[int] = np.setdiff1d(np.arange(one.num_read), numbers).tolist()
    both = zip(np.cumsum([0, *(call.num_read for call in one.calls)]).tolist(), one.calls, strict=False)
    causes = {first + row: said for first, call in both for row, said in call.causes.items()}
    if lost:
        shown = ", ".join(str(row + 1) for row in lost[:NUM_LOST_NAMED]) + (
            ", ..." if len(lost) > NUM_LOST_NAMED else ""
        )
        logger.warning(
            f"source {name}: ms-swift's loader or preprocess_func deleted {len(lost)} of {one.num_read} rows, "
            f"counted from 1: {shown} (the first: {visible(causes.get(lost[0], LEFT_OUT))})"
        )
    return {row: causes.get(row, LEFT_OUT) for row in lost}
