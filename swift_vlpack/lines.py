"""Lay out a report for a reader: lines of a label and a text, tables, and sizes in units.

>>> print(labelled([("packs", "12"), *listed("advice", ["first", "second"])], width=8))
packs    12
advice   first
         second
>>> print(*table(("source", "rows"), [("captions", "25"), ("chat", "1,000")]), sep="\\n")
source     rows
captions     25
chat      1,000
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

MB, GB = 2**20, 2**30


def labelled(lines: Iterable[tuple[str, str]], *, width: int = 12, columns: int | None = None) -> str:
    """Join labelled texts, a line each, with the texts aligned. Texts that do not fit into `columns` are wrapped."""
    shown = []
    for label, text in lines:
        parts = [text] if columns is None else wrap(text, max(20, columns - width - 1), break_long_words=False)
        shown += [f"{one:<{width}} {part}".rstrip() for one, part in listed(label, parts)]
    return "\n".join(shown)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_texts: int = 1) -> list[str]:
    """Return the lines of a table: the first `num_texts` columns are texts, the others numbers."""
    cells = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < num_texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


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
