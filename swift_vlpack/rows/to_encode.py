"""Hold a row that is read but not encoded: the reader of packs decides whether its pixels are needed."""

from __future__ import annotations

import copy
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
    draws: RandomStream
    """The random numbers of the row, after it was read."""
    strict: bool = False
    """True if a row that cannot be encoded ends the run."""

    def sample(self) -> Encoded | SampleError:
        """Encode the row, or return why it cannot be encoded."""
        return self.whole()[0]

    def whole(self) -> tuple[Encoded | SampleError, bool]:
        """Do the same, and tell whether random numbers were drawn."""
        with copy.copy(self.draws) as stream:
            sample = sample_or_error(partial(self.encoder.sample, strict=self.strict), self.row, self.sample_id)
        return sample, stream.has_drawn

    def branch(self) -> Encoded | None:
        """Encode the row without its pixels, which another row brings. None: encode the whole `sample` instead."""
        if self.pixel_free is None:
            return None
        with copy.copy(self.draws) as stream:
            sample = sample_or_error(self.pixel_free.sample, self.row, self.sample_id)
        if isinstance(sample, SampleError) or stream.has_drawn:  # the full encoding works, or names the error
            return None
        return without_pixels(sample)
