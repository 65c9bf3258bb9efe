"""Hold a row that is read but not encoded: the reader of packs decides whether its pixels are needed."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from swift_vlpack.rows.encoder import RowEncoder, sample_or_error
from swift_vlpack.rows.prefixes import without_pixels
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Encoded, SampleError, SampleId
from swift_vlpack.rows.source import Row


class RowToEncode(NamedTuple):
    """A row with its name and its encoders."""

    row: Row
    sample_id: SampleId
    encoder: RowEncoder
    pixel_free: RowEncoder | None
    """The encoder that decodes no media; None if there is none for the template."""
    draws: tuple[object, ...]
    """The name of the random numbers that belong to the row."""
    strict: bool = False
    """True if a row that cannot be encoded ends the run."""

    def sample(self) -> Encoded | SampleError:
        """Encode the row, or return why it cannot be encoded."""
        with RandomStream(*self.draws):
            return sample_or_error(partial(self.encoder.sample, strict=self.strict), self.row, self.sample_id)

    def branch(self) -> Encoded | None:
        """Encode the row without its pixels, which another row brings. None: encode the whole `sample` instead."""
        if self.pixel_free is None:
            return None
        with RandomStream(*self.draws) as stream:
            sample = sample_or_error(self.pixel_free.sample, self.row, self.sample_id)
        if isinstance(sample, SampleError) or stream.has_drawn:  # the full encoding works, or names the error
            return None
        return without_pixels(sample)
