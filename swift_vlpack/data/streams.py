"""Rows without a length: streams and other iterables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from swift_vlpack.data.fusion import Row, Template, encode_row, tried
from swift_vlpack.data.samples import Encoded, SampleError, SampleId


class StreamedRows:
    """Rows without a length, encoded in the order in which they come."""

    def __init__(self, rows: Iterable[Row], template: Template, *, name: str = "stream", strict: bool = False) -> None:
        self.rows = rows
        self.template = template
        self.name = name
        self.strict = strict

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, if it wants to know."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def encoded(self, number: int = 0, num_shares: int = 1) -> Iterator[Encoded | SampleError]:
        """One share of the stream in order, every n-th row: the sample, or why it cannot be encoded."""
        for row_number, row in islice(enumerate(self.rows), number, None, num_shares):
            yield tried(self._encode, row, SampleId(self.name, row_number))

    def _encode(self, row: Row, sample_id: SampleId) -> Encoded:
        return encode_row(self.template, row, sample_id, strict=self.strict)
