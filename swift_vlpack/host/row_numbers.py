"""Which rows of the file a loaded data set has, found out beside ms-swift's own preprocessing.

ms-swift hands every data set to a `preprocess_func`, which may delete rows, make several of one, or be any function.
`NumberedPreprocess` stands in its place and gives the numbers without changing what comes out:

- For a `RowPreprocessor` a column of numbers travels along, taken off every row before `preprocess` sees it.
- Any other function could look at such a column, and take it for content when it drops duplicates, say. So what it
  makes of the rows without the column is what is trained, and what it makes of them with it gives the numbers, if both
  are otherwise the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray
from swift.dataset import AutoPreprocessor, RowPreprocessor
from swift.utils import get_logger

logger = get_logger()

ROW = "vlpack_row"
NUM_ROWS_COMPARED = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a `preprocess_func`: a split of a subset, most often everything there is."""

    num_read: int
    numbers: NDArray[np.int64] | None
    """The number of each row among those that were read; None where that is not known."""


class NumberedPreprocess:
    """A `preprocess_func` that makes of a data set what the given one does, and notes which rows these are."""

    def __init__(self, preprocess_func: Callable[..., Any], parts: list[Part]) -> None:
        self._preprocess_func = preprocess_func
        self._parts = parts

    def __deepcopy__(self, memo: dict[int, Any]) -> NumberedPreprocess:
        """As ms-swift copies the function for every subset; the notes are the same."""
        return NumberedPreprocess(copy.deepcopy(self._preprocess_func, memo), self._parts)

    def __call__(self, dataset: Any, **kwargs: Any) -> Any:
        """Preprocess, and note the numbers."""
        if not isinstance(dataset, Dataset):
            return self._preprocess_func(dataset, **kwargs)
        rows, numbers = _preprocessed(self._preprocess_func, dataset, kwargs)
        self._parts.append(Part(len(dataset), numbers))
        return rows


def column(dataset: Dataset, name: str) -> NDArray[Any]:
    """A column of numbers, of floats where one is missing."""
    table: pa.Table = dataset.select_columns(name).with_format("arrow")[:]
    return table.column(name).to_numpy()


def _preprocessed(
    preprocess_func: Callable[..., Any], dataset: Dataset, kwargs: dict[str, Any]
) -> tuple[Any, NDArray[np.int64] | None]:
    # A column of that name is the data's own; what is in it is nothing that we wrote.
    if ROW in dataset.column_names:
        return preprocess_func(dataset, **kwargs), None
    numbered = dataset.add_column(ROW, np.arange(len(dataset)))
    numbering = _numbering(preprocess_func)
    if numbering is None:
        rows = preprocess_func(dataset, **kwargs)
        again = _again(partial(preprocess_func, **kwargs), numbered, rows)
        return rows, None if again is None else _numbers(again, len(dataset))
    rows = numbering(numbered, **kwargs)
    numbers = _numbers(rows, len(dataset))
    return (rows.remove_columns(ROW) if ROW in rows.column_names else rows), numbers


def _numbering(preprocess_func: Any) -> Callable[..., Any] | None:
    """What does the same and hands the numbers on unseen; None where that cannot be arranged."""
    if type(preprocess_func) is AutoPreprocessor:
        auto = copy.copy(preprocess_func)
        auto._get_preprocessor = lambda dataset: _numbering(preprocess_func._get_preprocessor(dataset))
        return auto
    kind = type(preprocess_func)
    # A subclass that replaces what loops over rows may do anything with the column.
    if not isinstance(preprocess_func, RowPreprocessor) or any(
        getattr(kind, name) is not getattr(RowPreprocessor, name) for name in ("__call__", "batched_preprocess")
    ):
        return None
    numbering: Any = copy.copy(preprocess_func)
    numbering.preprocess = _NumberedRow(preprocess_func.preprocess)
    if kind.prepare_dataset is not RowPreprocessor.prepare_dataset:
        numbering.prepare_dataset = partial(_prepared, preprocess_func.prepare_dataset)
    return numbering


class _NumberedRow:
    """`RowPreprocessor.preprocess` for a row with a number, which every row made of it gets."""

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


def _prepared(prepare_dataset: Callable[[Any], Any], numbered: Dataset) -> Any:
    """What a preprocessor does to the data set as a whole, with the numbers where they can be kept."""
    rows = prepare_dataset(numbered.remove_columns(ROW))
    again = _again(prepare_dataset, numbered, rows)
    return rows if again is None else again


def _again(function: Callable[[Any], Any], numbered: Dataset, rows: Any) -> Dataset | None:
    """What the function makes of numbered rows, if that is `rows` with numbers."""
    try:
        again = function(numbered)
    except Exception as error:  # whatever a function does not like about one more column
        logger.info(f"a preprocess_func refuses a data set with one more column: {error!r}")
        return None
    if not (isinstance(again, Dataset) and isinstance(rows, Dataset) and ROW in again.column_names):
        return None
    return again if _is_same(rows, again.remove_columns(ROW)) else None


def _is_same(one: Dataset, other: Dataset) -> bool:
    if len(one) != len(other) or one.column_names != other.column_names:
        return False
    batches = (dataset.with_format("arrow").iter(NUM_ROWS_COMPARED) for dataset in (one, other))
    return all(mine.equals(yours) for mine, yours in zip(*batches, strict=True))


def _numbers(rows: Dataset, num_read: int) -> NDArray[np.int64] | None:
    """The column of numbers, if it is one still."""
    if len(rows) == 0:
        return np.empty(0, dtype=np.int64)
    if ROW not in rows.column_names or rows.features[ROW].dtype != "int64":
        return None
    numbers = column(rows, ROW)
    return numbers if numbers.dtype == np.int64 and numbers.min() >= 0 and numbers.max() < num_read else None
