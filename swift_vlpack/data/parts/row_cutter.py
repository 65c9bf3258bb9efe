"""What becomes of an encoded row under `packing_overflow`: its parts, and each of them as a sample."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.packing.parts import Cutting, Part, Span, parts_of
from swift_vlpack.data.parts.cut import cut_sample
from swift_vlpack.data.parts.layout import MediaWords, media_of, runs_of
from swift_vlpack.data.rows.samples import Encoded

ATTRIBUTE = "vlpack_row_cutter"
"""Of a template whose rows may be cut. It changes no length of a row, so it is no part of their key."""


@dataclass(frozen=True)
class RowCutter:
    """Cuts the rows of one template."""

    cutting: Cutting
    words: MediaWords

    def parts(self, sample: Encoded) -> list[Part]:
        """The parts of a row; none where it stays whole."""
        num_tokens = len(sample["input_ids"])
        if num_tokens <= self.cutting.capacity:
            return []
        return parts_of(runs_of(num_tokens, media_of(sample, self.words)), self.cutting, num_tokens)

    def cut(self, sample: Encoded, span: Span) -> Encoded:
        """Some tokens of a row as a sample."""
        media = media_of(sample, self.words)
        assert media is not None, "a row whose media are not known has no part that is trained"
        return cut_sample(sample, span, media)

    def digest(self) -> str:
        """Of all that decides where a row is cut, beside the row."""
        return hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()


def cutter_of(template: Any) -> RowCutter | None:
    """How the rows of a template are cut; None where they are not."""
    cutter: RowCutter | None = getattr(template, ATTRIBUTE, None)
    return cutter


def for_training(template: Any, config: PackingConfig) -> Any:
    """The template that encodes rows to train on; the same one where they are not cut.

    Of a row that is to be cut all tokens are wanted, so the copy has no `max_length`, by which ms-swift would raise or
    truncate. Evaluation goes on with the original.
    """
    cutting = Cutting.of(config)
    if cutting is None:
        return template
    own = copy.copy(template)
    if cutting.how != "drop":
        own.max_length = None
    setattr(own, ATTRIBUTE, RowCutter(cutting, MediaWords.of(template)))
    return own
