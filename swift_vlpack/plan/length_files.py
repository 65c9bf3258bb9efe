"""Read a file of lengths, which `vlpack plan --lengths` plans without any data: a JSON list, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift_vlpack.config import SAMPLES, PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.epoch import Recipe
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.plan.planner import columns_of

_KNOWN = "a JSON list, or JSON lines; a row is a number, or an object with length or lengths"


class Lengths(NamedTuple):
    """Sizes of all rows of a file. Images and patches are None unless every row has them."""

    tokens: list[int]
    images: list[int] | None
    patches: list[int] | None

    def recipe(self, config: PackingConfig, seed: int) -> Recipe:
        """Return the recipe of an epoch of these rows: packs keep their order, steps of samples draw them at random."""
        columns = columns_of(self.tokens, config, self.images, self.patches)
        sizes = np.stack([*columns.values(), columns["lengths"]])
        mix = Mix(
            sources=(Source("lengths", len(self.tokens)),),
            rows=(None,),
            seed=seed,
            shuffle=config.packing_batch == SAMPLES,
        )
        return Recipe(sizes=(sizes,), mix=mix, config=config, seed=seed)


def read_lengths(path: Path) -> Lengths:
    """Read a file of lengths. Raises `DataError`, which names the file and the wrong line or row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read as text ({error})"
        raise DataError(f"{path}: {why}; expected {_KNOWN}") from None
    rows = _rows(text, path)
    if not rows:
        raise DataError(f"{path} has no lengths; expected {_KNOWN}")
    lengths = [_length(row, f"{path}: row {number}") for number, row in enumerate(rows, start=1)]
    return Lengths(lengths, _counts(rows, "images"), _counts(rows, "patches"))


def _rows(text: str, path: Path) -> list[Any]:
    if text.lstrip().startswith("["):
        return list(_parsed(text, path, 1))
    return [_parsed(line, path, number) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _parsed(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}: line {line}: not JSON ({error.msg}); expected {_KNOWN}") from None


def _length(row: Any, where: str) -> int:
    if isinstance(row, dict):
        row = row.get("length", row.get("lengths"))
        if row is None:
            raise DataError(f"{where}: the object has neither length nor lengths")
    parts = row if isinstance(row, list) and row else [row]  # ms-swift's `lengths` has the parts of a row
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int):
            raise DataError(f"{where}: a length must be an integer, got {part!r} ({type(part).__name__})")
    if sum(parts) < 1:
        raise DataError(f"{where}: a length must be at least 1, got {sum(parts)}")
    return sum(parts)


def _counts(rows: list[Any], name: str) -> list[int] | None:
    # Use the counts only if all rows have them: after a gap, they would belong to the wrong rows.
    if all(isinstance(row, dict) and isinstance(row.get(name), int) for row in rows):
        return [row[name] for row in rows]
    return None
