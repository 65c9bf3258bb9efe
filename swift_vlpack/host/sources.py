"""Rows by ms-swift's own loader, one source at a time, with the number that each row has in its file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from datasets import Dataset as HfDataset
from swift.dataset import DatasetSyntax, RowPreprocessor, load_dataset
from swift.utils import get_logger

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.errors import DataError
from swift_vlpack.data.fusion import RowSource
from swift_vlpack.data.streams import StreamedRows
from swift_vlpack.host.fusion_config import SourceSpec, read_fusion_config, specs_of

logger = get_logger()

ROW = "vlpack_row"
NUM_SHOWN = 20


def load_sources(args: Any, config: PackingConfig) -> tuple[list[RowSource], HfDataset | None]:
    """The training sources, and the validation rows if there are any."""
    specs = read_fusion_config(config.fusion_config) if config.fusion_config else specs_of(args.dataset)
    loaded = [_load(spec, args) for spec in specs]
    parts = [part for _, part in loaded if part is not None]
    val_dataset = _validation(args) if args.val_dataset else _joined(parts)
    return [source for source, _ in loaded], val_dataset


def _load(spec: SourceSpec, args: Any) -> tuple[RowSource, HfDataset | None]:
    rows, val_dataset = None, None
    with numbered_rows() as counts, suppress(ZeroDivisionError):  # which is how ms-swift says that no row is left
        rows, val_dataset = load_dataset(
            [spec.dataset], split_dataset_ratio=args.split_dataset_ratio, shuffle=False, **args.get_dataset_kwargs()
        )
    if rows is None or len(rows) == 0:
        raise DataError(f"source {spec.name!r} ({spec.dataset}): no usable row in it")
    row_numbers = None
    if ROW in rows.column_names:
        row_numbers = np.asarray(rows[ROW], dtype=np.int64)
        rows = rows.remove_columns(ROW)
    lost = _report_lost(spec.name, counts)
    if val_dataset is not None and ROW in val_dataset.column_names:
        val_dataset = val_dataset.remove_columns(ROW)
    source = RowSource(
        name=spec.name,
        rows=rows,
        ratio=spec.ratio,
        sample_limit=spec.sample_limit,
        system=spec.system,
        max_pixels=spec.max_pixels,
        seed=spec.seed,
        row_numbers=row_numbers,
        num_lost=len(lost),
        lost_rows=lost,
        origin=_origin(spec.dataset),
    )
    return source, val_dataset


def _origin(dataset: str) -> str:
    """The local file or folder with its whole path, otherwise the name on the hub."""
    name = DatasetSyntax.parse(dataset).dataset
    return os.path.abspath(name) if os.path.exists(name) else name


def load_stream(args: Any, template: Any) -> tuple[StreamedRows, HfDataset | None]:
    """The rows of `--streaming true`, one after the other, by ms-swift's own loader, and the validation rows."""
    rows, part = load_dataset(
        args.dataset,
        split_dataset_ratio=args.split_dataset_ratio,
        shuffle=args.dataset_shuffle,
        **args.get_dataset_kwargs(),
    )
    val_dataset = None if part is None else HfDataset.from_list(list(part))
    return StreamedRows(rows, template, strict=args.strict), _validation(args) if args.val_dataset else val_dataset


def _validation(args: Any) -> HfDataset | None:
    """Sized, also where the training rows are a stream: every evaluation is over the same rows, and ends."""
    options = {**args.get_dataset_kwargs(), "streaming": False}
    _, val_dataset = load_dataset(
        args.val_dataset, split_dataset_ratio=1.0, shuffle=args.val_dataset_shuffle, **options
    )
    return val_dataset


def _joined(parts: list[HfDataset]) -> HfDataset | None:
    from datasets import concatenate_datasets

    return concatenate_datasets(parts) if parts else None


@contextmanager
def numbered_rows() -> Iterator[list[tuple[int, set[int]]]]:
    """While ms-swift loads, give every row its number in the file before rows are deleted.

    Yields a list that gets, for every data set that is preprocessed, its number of rows and the numbers deleted.
    """
    call, batched = RowPreprocessor.__call__, RowPreprocessor.batched_preprocess
    counts: list[tuple[int, set[int]]] = []

    def numbered_call(self: Any, dataset: Any, **kwargs: Any) -> Any:
        if not isinstance(dataset, HfDataset) or ROW in dataset.column_names:
            return call(self, dataset, **kwargs)
        first = sum(num_rows for num_rows, _ in counts)
        numbers = np.arange(first, first + len(dataset))
        mapped = call(self, dataset.add_column(ROW, numbers), **kwargs)
        kept = set(mapped[ROW]) if ROW in mapped.column_names else set(numbers.tolist())
        counts.append((len(dataset), set(numbers.tolist()) - kept if self.dataset_sample is None else set()))
        return mapped

    def numbered_batch(self: Any, batched_row: Any, **kwargs: Any) -> Any:
        columns = dict(batched_row)
        numbers = columns.pop(ROW, None)
        if numbers is None:
            return batched(self, columns, **kwargs)
        rows: list[dict[str, Any]] = []
        for at, number in enumerate(numbers):  # one at a time: a row may be deleted, or become several
            result = batched(self, {key: values[at : at + 1] for key, values in columns.items()}, **kwargs)
            rows += [{**row, ROW: number} for row in self.batched_to_rows(result)]
        return self.rows_to_batched(rows) if rows else {"messages": [], ROW: []}

    RowPreprocessor.__call__, RowPreprocessor.batched_preprocess = numbered_call, numbered_batch
    RowPreprocessor.standard_keys.append(ROW)
    try:
        yield counts
    finally:
        RowPreprocessor.__call__, RowPreprocessor.batched_preprocess = call, batched
        RowPreprocessor.standard_keys.remove(ROW)


def _report_lost(name: str, counts: list[tuple[int, set[int]]]) -> list[int]:
    lost = sorted(number for _, numbers in counts for number in numbers)
    if lost:
        shown = ", ".join(map(str, lost[:NUM_SHOWN])) + (", ..." if len(lost) > NUM_SHOWN else "")
        total = sum(num_rows for num_rows, _ in counts)
        logger.warning(f"source {name}: ms-swift's loader deleted {len(lost)} of {total} rows: {shown}")
    return lost
