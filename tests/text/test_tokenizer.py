"""The tokenizer that needs no files, and sizes of vocabularies."""

import doctest
import subprocess
import sys

import pytest

from swift_vlpack.errors import ConfigError
from swift_vlpack.rows import cutting
from swift_vlpack.text import ByteTokenizer, PackedCollator, TextStream, block_tokenize, padded_vocab_size, tokenizer
from tests.text.vocabularies import qwen, words


@pytest.mark.parametrize("module", [cutting, tokenizer])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0


def test_bytes_there_and_back():
    """TEXT-28"""
    tokenizer = ByteTokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (
        256,
        257,
        258,
        259,
    )
    for text in ("", "abc", "é € 😀", "\x00\n"):
        (ids,) = tokenizer([text])["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode([256, *ids, 257, 258]) == text
    assert tokenizer(["a"], add_special_tokens=True)["input_ids"] == [[256, 97, 257]]
    assert tokenizer(["\ud800"])["input_ids"] == [[63]], "half a character has no bytes"


def test_padded_vocab_size():
    """TEXT-28"""
    assert [padded_vocab_size("byte", multiple) for multiple in (1, 64, 259, 260)] == [259, 320, 259, 260]
    assert padded_vocab_size(words(num_words=60), 64) == 64
    assert padded_vocab_size(qwen(), 128) % 128 == 0
    assert 0 <= padded_vocab_size(qwen(), 128) - len(qwen()) < 128
    with pytest.raises(ConfigError, match="multiple must be at least 1"):
        padded_vocab_size("byte", 0)


def test_any_tokenizer_makes_a_stream():
    """TEXT-28: Qwen's has no BOS."""
    tokenizer = qwen()
    (window,) = TextStream(["a small house"], tokenizer=tokenizer, seq_len=9)
    tokens = [*tokenizer("a small house")["input_ids"], tokenizer.eos_token_id]
    assert window.tokens[: len(tokens)].tolist() == tokens
    assert window.segment_ids.tolist() == [1] * len(tokens) + [0] * (10 - len(tokens))


def test_byte_is_a_tokenizer_everywhere():
    """TEXT-28"""
    made = block_tokenize({"text": ["ab", "c"]}, tokenizer="byte", max_length=9)
    assert made["input_ids"] == [[256, 97, 98, 257, 256, 99, 257]]
    row = {name: column[0] for name, column in made.items()}
    batch = PackedCollator("byte", padding=8, return_tensors="np")([row])
    assert batch["input_ids"].tolist() == [[256, 97, 98, 257, 256, 99, 257, 258]]


def test_blocks_numpy_batches_and_streams_need_numpy_alone():
    """TEXT-10"""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'swift', 'datasets'): sys.modules[name] = None\n"
        "from swift_vlpack.text import FixedBatches, PackedCollator, TextStream, block_report, block_tokenize\n"
        "class Bytes:\n"
        "    bos_token_id, eos_token_id, pad_token_id = None, 256, 256\n"
        "    def __call__(self, texts, add_special_tokens): return {'input_ids': [list(t.encode()) for t in texts]}\n"
        "for name in ('greedy', 'binpack', 'exact', 'window'):\n"
        "    made = block_tokenize({'text': ['abc', 'de']}, tokenizer=Bytes(), max_length=9, packing_strategy=name)\n"
        "    assert block_report(made)['tokens'] == 7\n"
        "    assert made['input_ids'] == [[97, 98, 99, 256, 100, 101, 256]]\n"
        "rows = [{'input_ids': [5, 6, 7], 'document_starts': [0, 1]}]\n"
        "made = PackedCollator(Bytes(), return_tensors='np')(rows)\n"
        "assert made['position_ids'].tolist() == [[0, 0, 1]]\n"
        "for mode in ('sequential', 'bin'):\n"
        "    stream = TextStream(['ab', 'c'], tokenizer='byte', seq_len=7, packing_mode=mode)\n"
        "    made = next(FixedBatches(stream, batch_size=1, prefetch=1))\n"
        "    assert made['input_ids'].tolist() == [[[256, 97, 98, 257, 256, 99, 257]]]\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=600)
