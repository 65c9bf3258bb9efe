"""Lay out a report for a reader: lines of a label and a text, and sizes in units.

>>> print(labelled([("packs", "12"), *listed("advice", ["first", "second"])], width=8))
packs    12
advice   first
         second
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MB, GB = 2**20, 2**30


def labelled(lines: Iterable[tuple[str, str]], *, width: int = 12) -> str:
    """Join labelled texts, a line each, with the texts aligned."""
    return "\n".join(f"{label:<{width}} {text}".rstrip() for label, text in lines)


def listed(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return a labelled line for each text; only the first one shows the label."""
    return [(label if not at else "", text) for at, text in enumerate(texts)]


def size(num_bytes: float) -> str:
    """Write a number of bytes.

    >>> size(64 * MB), size(1536 * MB), size(12), size(0)
    ('64 MB', '1.5 GB', '12 bytes', '0 bytes')
    """
    for unit, name in ((GB * 1024, "TB"), (GB, "GB"), (MB, "MB"), (1024, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{num_bytes:g} bytes"
