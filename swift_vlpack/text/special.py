"""The special tokens that a tokenizer has, by their numbers, and what to do without one."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""What was said of each tokenizer: `map` calls once for a thousand documents."""
_told_of_types: dict[type, set[str]] = {}
"""The same where a tokenizer cannot be a key."""


def edge_tokens(tokenizer: Any, *, add_bos: bool, add_eos: bool) -> tuple[list[int], list[int]]:
    """What goes before and behind every document, as far as the tokenizer has it; one warning where it has not."""
    return _edge(tokenizer, "bos", add_bos), _edge(tokenizer, "eos", add_eos)


def edged(ids: list[int], edges: tuple[list[int], list[int]]) -> list[int]:
    """A document between its edges; one without a token has none, or BOS and EOS alone would be trained on.

    >>> edged([5, 6], ([0], [1])), edged([], ([0], [1]))
    ([0, 5, 6, 1], [])
    """
    before, behind = edges
    return [*before, *ids, *behind] if ids else []


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


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The texts as numbers, without special tokens and uncut."""
    if not texts:
        return []
    is_of_transformers = hasattr(tokenizer, "model_max_length")
    # The warning about the model's maximum is about uncut texts; blocks are cut.
    options = {"return_attention_mask": False, "verbose": False} if is_of_transformers else {}
    made = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    return [list(ids) for ids in made]
