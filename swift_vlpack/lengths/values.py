"""Write values as text that is equal in every process, and digest that text."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def digest_of(value: Any, num_bytes: int) -> str:
    """Return a digest of the value as JSON: `num_bytes` bytes, written in hexadecimal."""
    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def plain(value: Any) -> Any:
    """Replace a value that JSON cannot hold: sets and arrays by lists, other objects by class and plain attributes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    own = {name: inner for name, inner in getattr(value, "__dict__", {}).items() if is_plain(inner)}
    return [f"{type(value).__module__}.{type(value).__qualname__}", getattr(value, "__qualname__", None), own]


def is_plain(value: Any) -> bool:
    """Tell whether JSON can hold the value as it is."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
