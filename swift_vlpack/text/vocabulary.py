"""A tokenizer that needs no files, and how large a vocabulary has to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import ConfigError
from swift_vlpack.text.checks import check_whole

BYTE = "byte"


class ByteTokenizer:
    """Text as its UTF-8 bytes, 0 to 255, and BOS, EOS and PAD behind them.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer(["hé"])["input_ids"], len(tokenizer)
    ([[104, 195, 169]], 259)
    >>> tokenizer.decode([104, 105, tokenizer.eos_token_id])
    'hi'
    """

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 258

    def __call__(self, texts: Iterable[str], *, add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        """The bytes of every text, as tokenizers of transformers return them."""
        before, behind = ([self.bos_token_id], [self.eos_token_id]) if add_special_tokens else ([], [])
        # A lone surrogate, as broken JSON leaves it, has no bytes of its own.
        return {"input_ids": [[*before, *text.encode("utf-8", errors="replace"), *behind] for text in texts]}

    def array(self, text: str) -> NDArray[np.int16]:
        """Return the bytes of one text as an array, which takes two bytes a token and a list takes eight."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int16)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text again; what is no byte is left out."""
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def __len__(self) -> int:
        return 259


def tokenizer_of(given: Any) -> Any:
    """The tokenizer itself, or for `byte` the one of bytes."""
    if given is None:
        raise ConfigError(f"there is no tokenizer; give one of transformers, or {BYTE!r}")
    if not isinstance(given, str):
        return given
    if given != BYTE:
        raise ConfigError(f"tokenizer must be a tokenizer object or {BYTE!r}, got {given!r}; load it first")
    return ByteTokenizer()


def tokenizer_named(name: str) -> Any:
    """Load a tokenizer of transformers by its name or folder; `byte` is the one of bytes."""
    if name == BYTE:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"tokenizer {name!r} cannot be loaded ({said})") from error


def padded_vocab_size(tokenizer: Any, multiple: int) -> int:
    """All tokens of the tokenizer, rounded up to a multiple, which kernels prefer.

    >>> padded_vocab_size("byte", 64)
    320
    """
    check_whole(1, "multiple", multiple=multiple)
    return -(-len(tokenizer_of(tokenizer)) // multiple) * multiple
