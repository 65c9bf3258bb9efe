"""Digest the rows of a loaded data set in blocks, straight from its Arrow data: 300,000 texts in 0.2 s.

The key of a row (`cache.py`) is made of its content in Python, which takes 16 us for a text. So keys are saved by block
(`known_keys.py`): if a block of neighbouring rows has the same digest as before, its rows have the same keys as before.
Neither the name nor the time of a data file matters, because the content itself is compared.

Shuffled, drawn or split rows are an index into an Arrow table that has the order of the file. Blocks are cut from the
table, so shuffling or splitting does not change them. Blocks are counted from the first row of the file, so that
appended rows change the last block only.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from swift_vlpack.rows.source import RowSource

NUM_ROWS = 1024
"""Rows of a block. If one row changes, the keys of the whole block are computed again, which takes 16 ms."""
_LEAST_SHARE_USED = 1 / 8
"""Least share of a block's rows that the source must have (`#500` draws only some). With fewer, to digest the block
would cost as much as to compute the keys of its rows."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """The blocks of a source: which block each row is in, and at which place."""

    block: NDArray[np.int64]
    """The block of each row of the source; -1 if the source has too few rows of the block to digest it."""
    place: NDArray[np.int64]
    """The place of each row in its block."""
    starts: NDArray[np.int64]
    """First row of each block in the table."""
    stops: NDArray[np.int64]
    table: Any
    settings: bytes
    """Everything but the Arrow data that decides the rows of the source and their keys."""

    @classmethod
    def of(cls, source: RowSource, context: str) -> RowBlocks | None:
        """Cut the rows of a source into blocks; None if they are not plain rows of a `datasets.Dataset`.

        `context` is the digest of everything but the rows that their keys depend on (`context.py`).
        """
        rows: Any = source.rows
        if not _is_plain(rows):
            return None
        table = rows.data.table
        if not all(_is_supported(field.type) for field in table.schema):
            return None
        indices = rows._indices
        at = np.arange(len(rows)) if indices is None else indices.column(0).to_numpy().astype(np.int64)
        block, place, starts, stops = _cut(at, source.row_numbers)
        version = sys.modules["datasets"].__version__  # datasets turns Arrow values into rows, so its version matters
        settings = repr((version, sorted(rows.features.items()), [(one.name, str(one.type)) for one in table.schema]))
        return cls(block, place, starts, stops, table, f"{context}\n{settings}\n{source.system!r}".encode())

    def __len__(self) -> int:
        return len(self.starts)

    def layout(self) -> bytes:
        """Return a digest of the block and place of every row."""
        arrays = (self.block, self.place, self.starts, self.stops)
        return hashlib.blake2b(b"".join(one.tobytes() for one in arrays), digest_size=_DIGEST_BYTES).digest()

    @property
    def num_bytes(self) -> int:
        """Return roughly how many bytes of the table digesting reads."""
        num_rows = max(1, self.table.num_rows)
        return int(self.table.nbytes * int((self.stops - self.starts).sum()) / num_rows)

    def digests(self, blocks: Iterable[int]) -> list[bytes]:
        """Return the digests of blocks. Two digests are equal if the blocks have equal rows in the same order."""
        return [self._digest(int(self.starts[block]), int(self.stops[block])) for block in blocks]

    def _digest(self, start: int, stop: int) -> bytes:
        total = hashlib.blake2b(self.settings, digest_size=_DIGEST_BYTES)
        for column in self.table.columns:
            # Digest by part and not by chunk: the same rows may be divided into other chunks.
            parts: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
            for chunk in column.slice(start, stop - start).chunks:
                for name, content in _parts(chunk, ""):
                    parts[name].update(content)
            for name, part in sorted(parts.items()):
                total.update(name.encode() + part.digest())
        return total.digest()


def _is_plain(rows: Any) -> bool:
    """Tell whether rows are made of Arrow data by their features alone, without a transform or another format."""
    # Compare the name of the class: `datasets` is not imported only to find out that rows are something else.
    is_dataset = f"{type(rows).__module__}.{type(rows).__qualname__}" == "datasets.arrow_dataset.Dataset"
    return is_dataset and rows.format["type"] is None and set(rows.format["columns"]) == set(rows.column_names)


def _cut(
    at: NDArray[np.int64], row_numbers: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut rows, which have the places `at` in a table, into blocks. Returns (block, place, starts, stops)."""
    nothing = np.zeros(0, dtype=np.int64)
    if not len(at):
        return nothing, nothing, nothing, nothing
    first, last = int(at.min()), int(at.max())
    base = first
    if row_numbers is not None:
        numbers = np.asarray(row_numbers)
        lowest = int(numbers.argmin())
        base = min(first, int(at[lowest] - numbers[lowest]))
    block = (at - base) // NUM_ROWS
    starts = base + NUM_ROWS * np.arange(int(block.max()) + 1)
    starts, stops = np.maximum(starts, first), np.minimum(starts + NUM_ROWS, last + 1)
    num_used = np.bincount(block, minlength=len(starts))
    is_worth = num_used >= np.maximum(1, _LEAST_SHARE_USED * (stops - starts))
    # Count places from the start of the digested block: the same digest must mean the same row at a place.
    place = at - starts[block]
    number = np.where(is_worth, np.cumsum(is_worth) - 1, -1)
    return number[block], place, starts[is_worth], stops[is_worth]


def _is_supported(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):  # such as the JSON type in which ms-swift keeps messages
        return _is_supported(kind.storage_type)
    if pa.types.is_struct(kind):
        return all(_is_supported(kind.field(at).type) for at in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_supported(kind.value_type)
    return bool(_is_text(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind) or _is_number(kind))


def _is_text(kind: Any) -> bool:
    are = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_one(kind) for is_one in are)


def _is_number(kind: Any) -> bool:
    are = (pa.types.is_integer, pa.types.is_floating, pa.types.is_temporal)
    return any(is_one(kind) for is_one in are) and kind.bit_width % 8 == 0


def _parts(array: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield an Arrow array's content in named parts. Rows are equal if all parts, joined over chunks, are equal."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    is_given = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else np.ones(len(array), dtype=bool)
    yield f"{name}.is_given", is_given
    if pa.types.is_struct(kind):
        for at in range(kind.num_fields):
            yield from _parts(array.field(at), f"{name}.{at}")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy()
        yield f"{name}.sizes", np.diff(offsets)
        yield from _parts(array.values.slice(offsets[0], offsets[-1] - offsets[0]), f"{name}.items")
    elif _is_text(kind):
        is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        offsets = _values(array, 1, len(array) + 1, np.dtype("<i8" if is_large else "<i4"))
        yield f"{name}.sizes", np.diff(offsets)
        if offsets[-1] > offsets[0]:
            yield f"{name}.text", memoryview(array.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
    elif pa.types.is_boolean(kind):
        yield f"{name}.values", array.fill_null(False).to_numpy(zero_copy_only=False)
    elif not pa.types.is_null(kind):
        yield f"{name}.values", _values(array, 1, len(array), np.dtype(f"V{kind.bit_width // 8}"))


def _values(array: Any, buffer: int, num_values: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return the values of a fixed-width array straight from its buffer, without a copy."""
    content = array.buffers()[buffer]
    # An array without values may have no buffer.
    if content is None or content.size == 0:
        return np.zeros(num_values, kind)
    return np.frombuffer(content, kind, num_values, array.offset * kind.itemsize)
