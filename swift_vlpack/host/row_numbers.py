"""Find out which rows of its file a loaded data set has, without changing what ms-swift's preprocessing returns.

ms-swift passes every data set to a `preprocess_func`, which may delete rows, make several rows of one, or do anything
else. `NumberedPreprocess` takes its place and records the numbers of the rows that it returns: a column of numbers is
added for a `RowPreprocessor`, and removed from every row before `preprocess` sees the row. Any other function could
mistake the column for content, so nothing is known of the rows that it returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from swift.dataset import AutoPreprocessor, RowPreprocessor

ROW = "vlpack_row"


@dataclass(frozen=True, slots=True)
class PreprocessedRows:
    """The result of one call of a `preprocess_func`, for a split of a subset; mostly that is the whole data set."""

    num_read: int
    numbers: NDArray[np.int64] | None
    """The number of each row among the rows that were read; None if that is not known."""


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
        self._calls.append(PreprocessedRows(len(dataset), numbers))
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
