"""The special tokens that a tokenizer has, by their numbers, and what to do without one."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.text.vocabulary import ByteTokenizer, padded_vocab_size, tokenizer_of

Tokens = NDArray[np.signedinteger[Any]]

logger = logging.getLogger(__name__)

_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""What was said of each tokenizer: `map` calls once for a thousand documents."""
_told_of_types: dict[type, set[str]] = {}
"""The same where a tokenizer cannot be a key."""


def edge_tokens(tokenizer: Any, *, add_bos: bool, add_eos: bool) -> tuple[list[int], list[int]]:
    """What goes before and behind every document, as far as the tokenizer has it; one warning where it has not."""
    return _edge(tokenizer, "bos", add_bos), _edge(tokenizer, "eos", add_eos)


def edged(ids: Tokens, edges: tuple[list[int], list[int]]) -> Tokens:
    """Put a document between its edges; one without a token has none, or BOS and EOS alone would be trained on.

    >>> edged(np.array([5, 6]), ([0], [1])).tolist(), edged(np.array([]), ([0], [1])).tolist()
    ([0, 5, 6, 1], [])
    """
    before, behind = (np.array(edge, dtype=ids.dtype) for edge in edges)
    return np.concatenate([before, ids, behind]) if len(ids) else ids


def token_id(tokenizer: Any, name: str) -> int | None:
    """The number of the `bos`, `eos` or `pad` token."""
    found = getattr(tokenizer, f"{name}_token_id", None)
    return None if found is None else int(found)


def _edge(tokenizer: Any, name: str, is_wanted: bool) -> list[int]:
    if not is_wanted:
        return []
    found = token_id(tokenizer, name)
    if found is not None:
        return [found]
    try:
        told = _told.setdefault(tokenizer, set())
    except TypeError:  # one of somebody's own that has no hash, or takes no weak reference
        told = _told_of_types.setdefault(type(tokenizer), set())
    if name not in told:
        told.add(name)
        logger.warning("the tokenizer has no %s token: add_%s is switched off", name.upper(), name)
    return []


def token_ids(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Return the token ids of each text, without special tokens and uncut.

    Arrays take two or four bytes a token; a list would take eight and more, and a text may have a hundred megabytes.
    """
    if not texts:
        return []
    if isinstance(tokenizer, ByteTokenizer):
        return [tokenizer.array(text) for text in texts]
    is_of_transformers = hasattr(tokenizer, "model_max_length")
    # The warning about the model's maximum is about uncut texts; blocks are cut.
    options = {"return_attention_mask": False, "verbose": False} if is_of_transformers else {}
    made = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in made]


def model_token_ids(tokenizer: Any, *, multiple: int = 1) -> dict[str, int]:
    """Return what a model's config has to know of a tokenizer: `bos/eos/pad_token_id`, and `vocab_size`.

    A token that the tokenizer has not is left out; PAD is EOS where there is none, as collators and streams pad. The
    size of the vocabulary is rounded up to `multiple`.

    >>> model_token_ids("byte", multiple=64)
    {'bos_token_id': 256, 'eos_token_id': 257, 'pad_token_id': 258, 'vocab_size': 320}
    """
    tokenizer = tokenizer_of(tokenizer)
    found = {name: token_id(tokenizer, name) for name in ("bos", "eos", "pad")}
    if found["pad"] is None:
        found["pad"] = found["eos"]
    special = {f"{name}_token_id": number for name, number in found.items() if number is not None}
    return {**special, "vocab_size": padded_vocab_size(tokenizer, multiple)}
