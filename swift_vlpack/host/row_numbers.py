"""Find out which rows of its file a loaded data set has, without changing what ms-swift's preprocessing returns.

ms-swift passes every data set to a `preprocess_func`, which may delete rows, make several rows of one, or do anything
else. `NumberedPreprocess` takes its place and records the numbers of the rows that it returns: a column of numbers is
added for a `RowPreprocessor`, and removed from every row before `preprocess` sees the row. Any other function could
mistake the column for content, so nothing is known of the rows that it returns.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from swift.dataset import AutoPreprocessor, RowPreprocessor
from swift.utils import get_logger

ROW = "vlpack_row"
LEFT_OUT = "ms-swift's loader or preprocess_func left the row out"
NUM_CAUSES = 1000
"""Most deleted rows of a data set whose cause is looked for."""


@dataclass(frozen=True, slots=True)
class PreprocessedRows:
    """The result of one call of a `preprocess_func`, for a split of a subset; mostly that is the whole data set."""

    num_read: int
    numbers: NDArray[np.int64] | None
    """The number of each row among the rows that were read; None if that is not known."""
    causes: Mapping[int, str] = field(default_factory=dict)
    """Why ms-swift deleted a row, by its number among the rows that were read."""


class NumberedPreprocess:
    """A `preprocess_func` that returns what the given function returns, and appends the row numbers to `calls`."""

    def __init__(self, preprocess_func: Callable[..., Any], calls: list[PreprocessedRows]) -> None:
        self._preprocess_func = preprocess_func
        self._calls = calls

    def __deepcopy__(self, memo: dict[int, Any]) -> NumberedPreprocess:
        """Copy the function, as ms-swift does for every subset, but keep the same list of calls."""
        return NumberedPreprocess(copy.deepcopy(self._preprocess_func, memo), self._calls)

    def __call__(self, dataset: Any, **kwargs: Any) -> Any:
        """Preprocess a data set, and record the numbers of the rows that are returned."""
        if not isinstance(dataset, Dataset):
            return self._preprocess_func(dataset, **kwargs)
        rows, numbers = _preprocessed(self._preprocess_func, dataset, kwargs)
        lost = [] if numbers is None else np.setdiff1d(np.arange(len(dataset)), numbers)[:NUM_CAUSES].tolist()
        causes = _causes(self._preprocess_func, dataset.select(lost)) if lost else []
        self._calls.append(PreprocessedRows(len(dataset), numbers, dict(zip(lost, causes, strict=False))))
        return rows


def column(dataset: Dataset, name: str) -> NDArray[Any]:
    """Return a column of numbers, as floats if any is missing."""
    values: NDArray[Any] = dataset.data.column(name).to_numpy()
    # Use numpy, because `datasets` takes 3 us a row to gather shuffled rows.
    return values if dataset._indices is None else values[dataset._indices.column(0).to_numpy()]


def _preprocessed(
    preprocess_func: Callable[..., Any], dataset: Dataset, kwargs: dict[str, Any]
) -> tuple[Any, NDArray[np.int64] | None]:
    numbering = _numbering(preprocess_func)
    # A column of that name is the user's own, and its values are no row numbers.
    if numbering is None or ROW in dataset.column_names:
        return preprocess_func(dataset, **kwargs), None
    rows = numbering(dataset.add_column(ROW, np.arange(len(dataset))), **kwargs)
    numbers = _numbers(rows, len(dataset))
    return (rows.remove_columns(ROW) if ROW in rows.column_names else rows), numbers


def _numbering(preprocess_func: Any) -> Callable[..., Any] | None:
    """Return a function that does the same and hides the column of numbers from the user's code; None if impossible."""
    if type(preprocess_func) is AutoPreprocessor:
        auto = copy.copy(preprocess_func)
        auto._get_preprocessor = lambda dataset: _numbering(preprocess_func._get_preprocessor(dataset))
        return auto
    kind = type(preprocess_func)
    # A subclass that replaces the loop over rows, or sees the whole data set, may do anything with the column.
    if not isinstance(preprocess_func, RowPreprocessor) or any(
        getattr(kind, name) is not getattr(RowPreprocessor, name)
        for name in ("__call__", "batched_preprocess", "prepare_dataset")
    ):
        return None
    numbering: Any = copy.copy(preprocess_func)
    numbering.preprocess = _NumberedRow(preprocess_func.preprocess)
    return numbering


def _causes(preprocess_func: Any, deleted: Dataset) -> Iterator[str]:
    """Yield why ms-swift deleted each of these rows, by doing it again; nothing for code of the user."""
    if type(preprocess_func) is AutoPreprocessor:
        deleted = RowPreprocessor.safe_rename_columns(deleted, preprocess_func.columns)
        preprocess_func = preprocess_func._get_preprocessor(deleted)
    if not type(preprocess_func).__module__.startswith("swift."):
        return
    again = copy.deepcopy(preprocess_func)
    deleted = RowPreprocessor.safe_rename_columns(deleted, again.columns)
    logger, level = get_logger(), get_logger().level
    logger.setLevel(logging.ERROR)  # ms-swift has logged the rows already
    try:
        yield from (_cause(again, {name: [value] for name, value in row.items()}) for row in deleted)
    finally:
        logger.setLevel(level)


def _cause(preprocessor: RowPreprocessor, batch: dict[str, list[Any]]) -> str:
    try:
        preprocessor.batched_preprocess(copy.deepcopy(batch), strict=True, ignore_max_length_error=False)
    except Exception as error:  # whatever ms-swift takes for a reason to delete a row
        return f"ms-swift's loader deleted the row: {type(error).__name__}: {error}"[:300]
    given = {name: value for name, (value,) in batch.items() if value is not None}
    return f"ms-swift's {type(preprocessor).__name__} makes nothing of the row {given}"[:300]


class _NumberedRow:
    """Call `RowPreprocessor.preprocess` without the row's number, and give the number to every row that it returns."""

    def __init__(self, preprocess: Callable[[dict[str, Any]], Any]) -> None:
        self._preprocess = preprocess

    def __call__(self, row: dict[str, Any]) -> Any:
        if ROW not in row:
            return self._preprocess(row)
        number = row.pop(ROW)
        made = self._preprocess(row)
        if isinstance(made, dict):
            return {**made, ROW: number}
        return [{**one, ROW: number} for one in made] if isinstance(made, list) else made


def _numbers(rows: Dataset, num_read: int) -> NDArray[np.int64] | None:
    """Return the column of numbers; None if the function removed or changed it."""
    if len(rows) == 0:
        return np.empty(0, dtype=np.int64)
    if ROW not in rows.column_names or rows.features[ROW].dtype != "int64":
        return None
    numbers = column(rows, ROW)
    return numbers if numbers.dtype == np.int64 and numbers.min() >= 0 and numbers.max() < num_read else None
