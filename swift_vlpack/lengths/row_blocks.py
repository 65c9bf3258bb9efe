"""Digest the rows of a loaded data set in blocks, straight from its Arrow data: 300,000 texts in 0.2 s.

A key of a row (`cache.py`) is made of its content in Python, which takes 16 us a text. So keys are remembered by block
(`known_keys.py`): a block of neighbours whose content has the same digest has the same keys. What a file is called and
when it was written is not asked, because the content itself is compared.

Rows that are shuffled, drawn or split are still in the order of their file in the Arrow table, with an index to it.
Blocks are cut from that table, so their digests depend on neither. They are counted from the first row of the file,
so that rows that are appended change the last block only.
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
"""Rows of a block. A change of one row computes the keys of its block again, which takes 16 ms."""
_LEAST_SHARE_USED = 1 / 8
"""Least share of the rows of a block that the source has (`#500` draws some). Below it, digesting the block would cost
as much as the keys of these rows."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """The blocks of a source: which block each row is in, and at which place."""

    block: NDArray[np.int64]
    """The block of each row of the source; -1 for a row whose block is not worth a digest."""
    place: NDArray[np.int64]
    """The place of each row in its block."""
    starts: NDArray[np.int64]
    """Where each block starts in the table."""
    stops: NDArray[np.int64]
    table: Any
    settings: bytes
    """Everything that a row of the source and its key are made of beside the Arrow data."""

    @classmethod
    def of(cls, source: RowSource, context: str) -> RowBlocks | None:
        """Cut the rows of a source into blocks; None if they are not plain rows of a `datasets.Dataset`.

        `context` is what their keys depend on beside the rows (`context.py`).
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
        version = sys.modules["datasets"].__version__  # it makes Python values of Arrow's
        settings = repr((version, sorted(rows.features.items()), [(one.name, str(one.type)) for one in table.schema]))
        return cls(block, place, starts, stops, table, f"{context}\n{settings}\n{source.system!r}".encode())

    def __len__(self) -> int:
        return len(self.starts)

    def layout(self) -> bytes:
        """Return a digest of where the rows of the source are in its blocks."""
        arrays = (self.block, self.place, self.starts, self.stops)
        return hashlib.blake2b(b"".join(one.tobytes() for one in arrays), digest_size=_DIGEST_BYTES).digest()

    @property
    def num_bytes(self) -> int:
        """Bytes of the table that digesting reads, about."""
        num_rows = max(1, self.table.num_rows)
        return int(self.table.nbytes * int((self.stops - self.starts).sum()) / num_rows)

    def digests(self, blocks: Iterable[int]) -> list[bytes]:
        """Return the digests of blocks: equal if all rows in them are equal, in order."""
        return [self._digest(int(self.starts[block]), int(self.stops[block])) for block in blocks]

    def _digest(self, start: int, stop: int) -> bytes:
        total = hashlib.blake2b(self.settings, digest_size=_DIGEST_BYTES)
        for column in self.table.columns:
            # By part and not by chunk, because where an Arrow table is divided into chunks says nothing about its rows.
            parts: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
            for chunk in column.slice(start, stop - start).chunks:
                for name, content in _parts(chunk, ""):
                    parts[name].update(content)
            for name, part in sorted(parts.items()):
                total.update(name.encode() + part.digest())
        return total.digest()


def _is_plain(rows: Any) -> bool:
    """Tell whether rows are made of Arrow data by their features alone, without a transform or another format."""
    # By name: rows may be of anything, and `datasets` is not imported only to see that they are not its own.
    is_dataset = f"{type(rows).__module__}.{type(rows).__qualname__}" == "datasets.arrow_dataset.Dataset"
    return is_dataset and rows.format["type"] is None and set(rows.format["columns"]) == set(rows.column_names)


def _cut(
    at: NDArray[np.int64], row_numbers: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut rows, which stand `at` these places of a table, into blocks."""
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
    # The place counts from where the digested block starts: the same digest must mean the same row at a place.
    place = at - starts[block]
    number = np.where(is_worth, np.cumsum(is_worth) - 1, -1)
    return number[block], place, starts[is_worth], stops[is_worth]


def _is_supported(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):  # as the JSON in which ms-swift keeps messages
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
    """Yield the content of an Arrow array in named parts. Equal parts, joined over all chunks, mean equal rows."""
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
    """Return the values of an array of fixed width, as they are in its buffer."""
    content = array.buffers()[buffer]
    # An array without values may have no buffer.
    if content is None or content.size == 0:
        return np.zeros(num_values, kind)
    return np.frombuffer(content, kind, num_values, array.offset * kind.itemsize)
