"""Tokenizers of every kind: words that a reader counts, with and without BOS, and Qwen's own vocabulary."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

BOS, EOS, PAD, UNKNOWN = 0, 1, 2, 3
FIRST_WORD = 4


def words(*, bos: bool = True, pad_is_eos: bool = False, num_words: int = 500) -> Any:
    """A fresh tokenizer of whole words: `w0` is 4, `w1` is 5, and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": BOS, "</s>": EOS, "<pad>": PAD, "<unk>": UNKNOWN}
    vocab |= {f"w{number}": FIRST_WORD + number for number in range(num_words)}
    model = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>"} if bos else {}
    pad = "</s>" if pad_is_eos else "<pad>"
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", pad_token=pad, **special)


@cache
def qwen() -> Any:
    """Qwen's own, from the real ranks, of 4,000 tokens: no BOS, EOS is `<|im_end|>`."""
    from tests.tiny import build_tokenizer

    return build_tokenizer(is_small=True)


def text(*numbers: int) -> str:
    """Words by number: `text(0, 1)` becomes the tokens 4 and 5."""
    return " ".join(f"w{number}" for number in numbers)


def corpus(seed: int, num_documents: int, *, longest: int = 60, first: int = 0) -> list[str]:
    """Documents of 0 to `longest` words, most of them short."""
    rng = random.Random(seed)
    sizes = [min(longest, int(rng.paretovariate(0.8) * 3) - 3) for _ in range(num_documents)]
    return [text(*(rng.randrange(first, 500) for _ in range(size))) for size in sizes]
