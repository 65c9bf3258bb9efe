r"""Make texts safe to show: rows of data are untrusted, and pages are passed on to other people.

Every text of a row, a file name or an error goes through `visible` before a terminal or a page shows it. Texts that
name files go through `without_home` before they get into a page.

>>> visible("a\x1b[31mb"), without_home("row 3 of /home/jane/data/a.jsonl")
('a␛[31mb', 'row 3 of ~/data/a.jsonl')
"""

from __future__ import annotations

import re
from pathlib import Path

# Control characters, marks of writing direction, separators of lines and paragraphs, and what is no character at all.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
_CONTROL_PICTURES = 0x2400
"""Where Unicode has a visible sign for each of the first 32 control characters, in their order."""
_NUM_CONTROL_PICTURES = 0x20


def visible(text: str) -> str:
    r"""Replace characters that would move the cursor or turn writing around by signs; tabs and newlines stay.

    >>> visible("a\x1b[31mb\x00\tc")
    'a␛[31mb␀\tc'
    >>> visible("\u202eabc")
    '<U+202E>abc'
    """
    return _UNSEEN.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found.group())
    return chr(_CONTROL_PICTURES + code) if code < _NUM_CONTROL_PICTURES else f"<U+{code:04X}>"


def without_home(text: str) -> str:
    """Write home folders as `~`, because pages are shared, and account names are no part of what they show.

    >>> without_home("row 3 of /home/jane/data/a.jsonl, /Users/joe"), without_home("/data/home/x")
    ('row 3 of ~/data/a.jsonl, ~', '/data/home/x')
    """
    own = re.escape(str(Path.home()))
    return re.sub(rf"(?<![\w.~-])(?:{own}|/(?:home|Users)/[^/\s:,;)'\"]+)(?![\w.-])", "~", text)
