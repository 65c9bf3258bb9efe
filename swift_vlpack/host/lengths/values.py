"""Values as text that is equal in every process, and digests of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def digest_of(value: Any, num_bytes: int) -> str:
    """Of the value's text."""
    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def plain(value: Any) -> Any:
    """Of an object without a text of its own: its class, and its plain attributes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    own = {name: inner for name, inner in getattr(value, "__dict__", {}).items() if is_plain(inner)}
    return [f"{type(value).__module__}.{type(value).__qualname__}", getattr(value, "__qualname__", None), own]


def is_plain(value: Any) -> bool:
    """Whether a value is what JSON can say."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
