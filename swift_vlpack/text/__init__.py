"""Documents: text cut, packed into blocks and windows, collated and streamed; nothing of it lost without a count."""

from swift_vlpack.text.blocks import block_tokenize
from swift_vlpack.text.collator import PackedCollator
from swift_vlpack.text.report import block_report
from swift_vlpack.text.rows import document_starts_of, positions_of
from swift_vlpack.text.special import model_token_ids
from swift_vlpack.text.streams.fixed import FixedBatches, model_inputs
from swift_vlpack.text.streams.local import local_text
from swift_vlpack.text.streams.stream import TextStream
from swift_vlpack.text.streams.stream_file import load_stream
from swift_vlpack.text.vocabulary import ByteTokenizer, padded_vocab_size

__all__ = [
    "ByteTokenizer",
    "FixedBatches",
    "PackedCollator",
    "TextStream",
    "block_report",
    "block_tokenize",
    "document_starts_of",
    "load_stream",
    "local_text",
    "model_inputs",
    "model_token_ids",
    "padded_vocab_size",
    "positions_of",
]
