"""Pack documents for training without ms-swift, from a data set or a stream. Every token that is left out is counted.

Documents in a data set become blocks (`block_tokenize` in blocks.py), and blocks become batches (collator.py):

>>> blocks = block_tokenize({"text": ["abc", "defgh"]}, tokenizer="byte", max_length=6, add_bos=False)
>>> blocks["document_starts"]  # the second document goes on in the next block
[[0, 4], [0]]
>>> rows = [{"input_ids": ids, "document_starts": starts} for ids, starts in zip(*list(blocks.values())[:2])]
>>> PackedCollator("byte", return_tensors="np")(rows)["position_ids"].tolist()  # they restart with every document
[[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]]

Documents in a stream become windows of one length (stream.py), and windows become batches of one shape (batches.py).
The position in the stream is saved as JSON:

>>> stream = TextStream(["abc", "defgh"], tokenizer="byte", seq_len=5, add_bos=False)
>>> next(stream).segment_ids.tolist()
[1, 1, 1, 1, 2, 2]
>>> again = TextStream(["abc", "defgh"], tokenizer="byte", seq_len=5, add_bos=False)
>>> again.load_state_dict(stream.state_dict())
>>> next(again).tokens.tolist()
[102, 103, 104, 257, 258, 258]

`plan` decides where documents are cut and which of them share a block, as it does for the samples of a run.
`sources.py` and `local.py` read the documents.
"""

from swift_vlpack.text.batches import FixedBatches, model_inputs
from swift_vlpack.text.blocks import block_tokenize
from swift_vlpack.text.collator import PackedCollator
from swift_vlpack.text.documents import document_starts_of, positions_of
from swift_vlpack.text.local import local_text
from swift_vlpack.text.report import block_report
from swift_vlpack.text.stream import TextStream
from swift_vlpack.text.tokenizer import ByteTokenizer, model_token_ids, padded_vocab_size

__all__ = [
    "ByteTokenizer",
    "FixedBatches",
    "PackedCollator",
    "TextStream",
    "block_report",
    "block_tokenize",
    "document_starts_of",
    "local_text",
    "model_inputs",
    "model_token_ids",
    "padded_vocab_size",
    "positions_of",
]
