r"""Make texts safe to show: rows of data are untrusted, and pages are passed on to other people.

Pass every text of a row, a file name or an error through `visible` before a terminal or a page shows it. Pass texts
that name files through `without_home` before they get into a page.

>>> visible("a\x1b[31mb"), without_home("row 3 of /home/jane/data/a.jsonl")
('a␛[31mb', 'row 3 of ~/data/a.jsonl')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Control characters, marks of writing direction, separators of lines and paragraphs, and code points without a
# character.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
_CONTROL_PICTURES = 0x2400
"""First of the 32 visible signs that Unicode has for the first 32 control characters, in the same order."""
_NUM_CONTROL_PICTURES = 0x20


def visible(text: str) -> str:
    r"""Replace invisible characters by signs, because they could move the cursor or reverse the writing.

    Tabs and newlines stay.

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
    """Write home folders as `~`, because pages are shared and should not show account names.

    >>> without_home("row 3 of /home/jane/data/a.jsonl, /Users/joe"), without_home("/data/home/x")
    ('row 3 of ~/data/a.jsonl, ~', '/data/home/x')
    """
    own = re.escape(str(Path.home()))
    return re.sub(rf"(?<![\w.~-])(?:{own}|/(?:home|Users)/[^/\s:,;)'\"]+)(?![\w.-])", "~", text)


def texts_changed(value: Any, change: Callable[[str], str], *, but: str = "") -> Any:
    """Change every text of a JSON value, but those under the key `but`.

    >>> texts_changed({"name": "a", "of": ["b", 1], "text": "c"}, str.upper, but="text")
    {'name': 'A', 'of': ['B', 1], 'text': 'c'}
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: one if name == but else texts_changed(one, change, but=but) for name, one in value.items()}
    return [texts_changed(one, change, but=but) for one in value] if isinstance(value, (list, tuple)) else value
