"""Plan a file of lengths, without any data: a JSON list, JSON lines, or a numpy array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.planner import plan, whole_numbers
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.plan.windows import end_to_end

_KNOWN = "a JSON list, JSON lines (a number, or an object with length or lengths), or a .npy array"


class Lengths(NamedTuple):
    """Sizes of all rows of a file. Images and patches are None unless every row has them."""

    tokens: list[Any] | NDArray[Any]
    images: list[Any] | None = None
    patches: list[Any] | None = None


def read_lengths(path: Path) -> Lengths:
    """Read a file of lengths. Raises `DataError`, which names the file and the wrong line."""
    if not path.is_file():
        raise DataError(f"{path}: {'a directory' if path.is_dir() else 'no such file'}; expected {_KNOWN}")
    if path.suffix == ".npy":
        return Lengths(_numpy(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); expected {_KNOWN}") from None
    rows = _json_list(text, path) if text.lstrip().startswith("[") else _json_lines(text, path)
    if not rows:
        raise DataError(f"{path} has no lengths; expected {_KNOWN}")
    return Lengths(
        [_length(row, f"{path}: row {number}") for number, row in enumerate(rows, start=1)],
        _counts(rows, "images"),
        _counts(rows, "patches"),
    )


def plan_of_rows(
    lengths: ArrayLike,
    config: PackingConfig,
    *,
    images: ArrayLike | None = None,
    patches: ArrayLike | None = None,
    **options: Any,
) -> tuple[Plan, dict[str, Any]]:
    """Plan rows of which only sizes are known. Returns (plan, report of what the strategy `window` cut).

    A file of lengths does not say where the images of a row are, so a row with images stays in one piece.
    """
    if config.packing_strategy != WINDOW:
        return plan(lengths, config, images=images, patches=patches, **options), {}
    rows = whole_numbers(lengths, "length", least=1)
    given = [np.zeros_like(rows) if column is None else column for column in (images, patches)]
    counts = [whole_numbers(column, name, least=0) for column, name in zip(given, ("images", "patches"), strict=True)]
    pieces = end_to_end(np.stack([rows, *counts, np.zeros_like(rows)]), lambda place: (), config)
    tokens, *of_pieces, _ = pieces.sizes[:, pieces.sizes[0] > 0]
    made = plan(tokens, config, images=of_pieces[0], patches=of_pieces[1], **options)
    return made, {"cut": pieces.report(counts[0])}


def _numpy(path: Path) -> NDArray[Any]:
    try:
        # Do not allow pickles: they can run code, and the file may come from anybody.
        numbers = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a numpy array ({error})") from None
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or not len(numbers):
        raise DataError(f"{path}: expected a flat array with at least one length")
    return numbers


def _json_list(text: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _json_lines(text, path)  # JSON lines, the first of which is a list
        raise DataError(f"{path}: line {error.lineno}: not JSON ({error.msg}); expected {_KNOWN}") from None
    return list(rows)


def _json_lines(text: str, path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: line {number}: not JSON ({error.msg}); expected {_KNOWN}") from None
    return rows


def _length(row: Any, where: str) -> Any:
    if isinstance(row, dict):
        row = row.get("length", row.get("lengths"))
        if row is None:
            raise DataError(f"{where}: the object has neither length nor lengths")
    if isinstance(row, list):  # ms-swift's `lengths` column: the parts of one row
        if not row or not all(isinstance(part, int) for part in row):
            raise DataError(f"{where}: lengths must be a list of integers, got {row!r}")
        return sum(row)
    if isinstance(row, bool) or not isinstance(row, int):
        raise DataError(f"{where}: length must be an integer, got {row!r} ({type(row).__name__})")
    if row < 1:
        raise DataError(f"{where}: length must be at least 1, got {row}")
    return row


def _counts(rows: list[Any], name: str) -> list[Any] | None:
    # Use the counts only if all rows have them: after a gap, they would belong to the wrong rows.
    if all(isinstance(row, dict) and isinstance(row.get(name), int) for row in rows):
        return [row[name] for row in rows]
    return None
