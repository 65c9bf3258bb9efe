"""Documents: text cut, packed into blocks and windows, collated and streamed; nothing of it lost without a count."""

from swift_vlpack.text.blocks import block_tokenize
from swift_vlpack.text.collator import PackedCollator
from swift_vlpack.text.report import block_report

__all__ = [
    "PackedCollator",
    "block_report",
    "block_tokenize",
]
