"""Texts of rows are untrusted: what would move a terminal's cursor or turn its writing around is made visible."""

from __future__ import annotations

import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
_PICTURES = 0x2400  # of control characters, in Unicode
_NUM_PICTURES = 0x20


def visible(text: str) -> str:
    r"""The text with control characters as signs; tabs and ends of lines stay.

    >>> visible("a\x1b[31mb\x00\tc")
    'a␛[31mb␀\tc'
    >>> visible("\u202eabc")
    '<U+202E>abc'
    """
    return _UNSEEN.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found.group())
    return chr(_PICTURES + code) if code < _NUM_PICTURES else f"<U+{code:04X}>"
