"""What is in a row, as bytes to tell it from another row by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_TAG = "dataset"


def row_bytes(row: Mapping[str, Any], *, as_encoded: bool = False) -> bytes:
    """The content of a row; bytes in it, images for the most part, by their digest.

    Without `as_encoded` two rows are equal that hold the same data, as a checkpoint asks: the order of keys is that of
    a loader, ms-swift's tag names the file as it was on the command line, and of an object only its class is content.

    With `as_encoded` two rows are equal that a template cannot tell apart, as the key of a length asks: a template
    writes a tool's schema in the order in which the row has it. It takes columns by their names, so that neither their
    order counts nor one without a value, which a loader adds for another row that has it. Of an object nothing can be
    said, so that it raises `TypeError`.

    >>> row_bytes({"b": 1, "a": b"", "dataset": "x.jsonl"})
    b'{"a": "e3b0c44298fc1c14", "b": 1}'
    >>> row_bytes({"b": {"z": 1, "y": None}, "a": 2, "c": None, "dataset": "x.jsonl"}, as_encoded=True)
    b'{"a": 2, "b": {"z": 1, "y": null}, "dataset": "x.jsonl"}'
    """
    if as_encoded:
        given = {name: row[name] for name in sorted(row) if row[name] is not None}
        return json.dumps(given, default=_digest_of_bytes).encode()
    content = {name: value for name, value in row.items() if name != _TAG}
    return json.dumps(content, sort_keys=True, default=_digest_or_class).encode()


def _digest_of_bytes(value: Any) -> str:
    """Faster than what checkpoints have: a pass digests every row, a checkpoint 10,000 at most."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    raise TypeError(f"{type(value).__name__} has no content")


def _digest_or_class(value: Any) -> str:
    is_content = isinstance(value, (bytes, bytearray, memoryview))
    return hashlib.sha256(value).hexdigest()[:16] if is_content else type(value).__name__
