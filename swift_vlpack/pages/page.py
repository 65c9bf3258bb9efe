"""Write HTML pages: each is one file that needs no network, has a light and a dark theme, and prints well.

>>> made = page("Packs", "<p>12 packs</p>")
>>> made.count("<html"), "12 packs" in made
(1, True)

`page.css` names the colours. Styles and drawings of a page use them as `var(--name)`, so that one drawing is right in
both themes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy: whatever text gets into a page, the page loads nothing and sends nothing."""
_MOST_NAMED = 3
"""Sources that a title names."""


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """Return the text of a page.

    `body`, `style` and `script` are trusted: pass texts from elsewhere through `escape` or `data` before.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{asset("page.css")}{style}</style>
</head>
<body>
<header class="top">
<h1>{escape(title)}</h1>
<button id="theme" type="button" aria-live="polite">Theme: system</button>
</header>
<main>
{body}
</main>
<script>
{asset("page.js")}{script}</script>
</body>
</html>
"""


def data(name: str, value: Any) -> str:
    """Return an element with a value as JSON. `JSON.parse(document.getElementById(name).textContent)` reads it.

    No text in the value can close the element:

    >>> data("rows", ["</script>"])
    '<script type="application/json" id="rows">["\\\\u003c/script\\\\u003e"]</script>'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":  # JSON has these characters in strings only, and allows this escape there
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


@cache
def asset(name: str) -> str:
    """Read a file of this folder that goes into pages."""
    return (files("swift_vlpack.pages") / name).read_text(encoding="utf-8")


def subject(model: str | None, sources: Iterable[str]) -> str:
    """Name model and sources for the title of a page, shortened; "" if neither is known.

    >>> subject("/models/tiny/", ["captions", "scans"]), subject("Qwen/Qwen3-VL", "abcdef"), subject(None, [])
    ('tiny on captions, scans', 'Qwen/Qwen3-VL on a, b, c and 3 more', '')
    """
    names = list(sources)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    data = ", ".join(names[:_MOST_NAMED]) + more
    named = Path(model).name if model and Path(model).is_absolute() else model
    return " on ".join(filter(None, (named, data)))


def write_page(path: Path, text: str) -> None:
    """Write a page to the file of `--html`. Raises `ConfigError` if it cannot be written."""
    try:
        # A file name may have half a character (a lone surrogate), which UTF-8 cannot encode.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error}; name a file that can be") from error
