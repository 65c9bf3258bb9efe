"""Tokenize texts with any tokenizer of transformers, or with one of bytes that needs no files.

>>> tokenizer = ByteTokenizer()
>>> tokenizer(["hé"])["input_ids"], len(tokenizer)
([[104, 195, 169]], 259)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.errors import ConfigError
from swift_vlpack.text.checks import check_whole

logger = logging.getLogger(__name__)

BYTE = "byte"
Tokens = NDArray[np.signedinteger[Any]]
"""The tokens of a text, as int16 or int32."""

_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Warnings already given about each tokenizer: `map` calls once for every thousand documents."""
_warned_of_types: dict[type, set[str]] = {}
"""Warnings already given about each type of tokenizer, for tokenizers that cannot be a weak key."""


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes, 0 to 255, with BOS, EOS and PAD after them.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer(["hé"])["input_ids"], len(tokenizer)
    ([[104, 195, 169]], 259)
    >>> tokenizer.decode([104, 105, tokenizer.eos_token_id])
    'hi'
    """

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 258

    def __call__(self, texts: Iterable[str], *, add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        """Return the bytes of every text, in the form that tokenizers of transformers return."""
        before, after = ([self.bos_token_id], [self.eos_token_id]) if add_special_tokens else ([], [])
        # A lone surrogate, which broken JSON can contain, has no UTF-8 bytes, so it becomes "?".
        return {"input_ids": [[*before, *text.encode("utf-8", errors="replace"), *after] for text in texts]}

    def array(self, text: str) -> NDArray[np.int16]:
        """Return the bytes of one text as an array: it takes two bytes for a token, a list takes eight."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int16)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens. Special tokens are left out."""
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def __len__(self) -> int:
        return 259


def tokenizer_of(given: Any) -> Any:
    """Return the given tokenizer, or a `ByteTokenizer` for `byte`. Raises `ConfigError` for any other name."""
    if given is None:
        raise ConfigError(f"there is no tokenizer; give one of transformers, or {BYTE!r}")
    if not isinstance(given, str):
        return given
    if given != BYTE:
        raise ConfigError(f"tokenizer must be a tokenizer object or {BYTE!r}, got {given!r}; load it first")
    return ByteTokenizer()


def tokenizer_named(name: str) -> Any:
    """Load a tokenizer of transformers by its name or folder; `byte` gives a `ByteTokenizer`."""
    if name == BYTE:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"tokenizer {name!r} cannot be loaded ({said})") from error


def padded_vocab_size(tokenizer: Any, multiple: int) -> int:
    """Return the size of a vocabulary, rounded up to a multiple, because kernels are faster on round sizes.

    >>> padded_vocab_size("byte", 64)
    320
    """
    check_whole(1, "multiple", multiple=multiple)
    return -(-len(tokenizer_of(tokenizer)) // multiple) * multiple


def edge_tokens(tokenizer: Any, *, add_bos: bool, add_eos: bool) -> tuple[list[int], list[int]]:
    """Return (tokens before, tokens after) every document: BOS and EOS. Warns once if the tokenizer lacks one."""
    return _edge(tokenizer, "bos", add_bos), _edge(tokenizer, "eos", add_eos)


def edged(ids: Tokens, edges: tuple[list[int], list[int]]) -> Tokens:
    """Put BOS and EOS around a document. An empty document stays empty: BOS and EOS alone are not worth training.

    >>> edged(np.array([5, 6]), ([0], [1])).tolist(), edged(np.array([]), ([0], [1])).tolist()
    ([0, 5, 6, 1], [])
    """
    before, after = (np.array(edge, dtype=ids.dtype) for edge in edges)
    return np.concatenate([before, ids, after]) if len(ids) else ids


def token_id(tokenizer: Any, name: str) -> int | None:
    """Return the id of the `bos`, `eos` or `pad` token; None if there is none."""
    found = getattr(tokenizer, f"{name}_token_id", None)
    return None if found is None else int(found)


def _edge(tokenizer: Any, name: str, is_wanted: bool) -> list[int]:
    if not is_wanted:
        return []
    found = token_id(tokenizer, name)
    if found is not None:
        return [found]
    try:
        warned = _warned.setdefault(tokenizer, set())
    except TypeError:  # a user's own tokenizer that cannot be hashed, or not be referenced weakly
        warned = _warned_of_types.setdefault(type(tokenizer), set())
    if name not in warned:
        warned.add(name)
        logger.warning("the tokenizer has no %s token, so add_%s has no effect", name.upper(), name)
    return []


def token_ids(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Return the token ids of each text, without special tokens and without truncation.

    Arrays take two or four bytes for a token. Lists would take eight or more, and a text may have a hundred megabytes.
    """
    if not texts:
        return []
    if isinstance(tokenizer, ByteTokenizer):
        return [tokenizer.array(text) for text in texts]
    is_of_transformers = hasattr(tokenizer, "model_max_length")
    # Silence the warning that a text is longer than the model's maximum: blocks are cut later.
    options = {"return_attention_mask": False, "verbose": False} if is_of_transformers else {}
    made = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in made]


def model_token_ids(tokenizer: Any, *, multiple: int = 1) -> dict[str, int]:
    """Return what a model's config has to know of a tokenizer: `bos/eos/pad_token_id`, and `vocab_size`.

    A token that the tokenizer does not have is left out. A missing PAD becomes EOS, with which collators and streams
    pad then. The size of the vocabulary is rounded up to `multiple`.

    >>> model_token_ids("byte", multiple=64)
    {'bos_token_id': 256, 'eos_token_id': 257, 'pad_token_id': 258, 'vocab_size': 320}
    """
    tokenizer = tokenizer_of(tokenizer)
    found = {name: token_id(tokenizer, name) for name in ("bos", "eos", "pad")}
    if found["pad"] is None:
        found["pad"] = found["eos"]
    special = {f"{name}_token_id": number for name, number in found.items() if number is not None}
    return {**special, "vocab_size": padded_vocab_size(tokenizer, multiple)}
