"""The shell of every HTML page: one file that asks no network for anything, light and dark, quiet on paper.

>>> made = page("Packs", "<p>12 packs</p>")
>>> made.count("<html"), "12 packs" in made
(1, True)

`page.css` names the colours; styles and SVG of a page use them as `var(--name)` and so are right in both themes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Whatever gets into a page, it loads nothing and sends nothing."""
_MOST_NAMED = 3
"""Sources in a title."""


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """One whole page. `body`, `style` and `script` are trusted; texts from elsewhere go through `escape` or `data`."""
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
    """A value as JSON in the page: `JSON.parse(document.getElementById(name).textContent)` reads it.

    No text in it can end the element, whatever it says:

    >>> data("rows", ["</script>"])
    '<script type="application/json" id="rows">["\\\\u003c/script\\\\u003e"]</script>'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":  # inside strings only, where JSON allows them to be written so
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


@cache
def asset(name: str) -> str:
    """A file of this folder that goes into pages."""
    return (files("swift_vlpack.pages") / name).read_text(encoding="utf-8")


def without_home(text: str) -> str:
    """Write home folders as `~`, because pages are shared, and account names are no part of what they show.

    >>> without_home("row 3 of /home/jane/data/a.jsonl, /Users/joe"), without_home("/data/home/x")
    ('row 3 of ~/data/a.jsonl, ~', '/data/home/x')
    """
    own = re.escape(str(Path.home()))
    return re.sub(rf"(?<![\w.~-])(?:{own}|/(?:home|Users)/[^/\s:,;)'\"]+)(?![\w.-])", "~", text)


def subject(model: str | None, sources: Iterable[str]) -> str:
    """Name model and data of a page's title, both in short; empty where neither is known.

    >>> subject("/models/tiny/", ["captions", "scans"]), subject("Qwen/Qwen3-VL", "abcdef"), subject(None, [])
    ('tiny on captions, scans', 'Qwen/Qwen3-VL on a, b, c and 3 more', '')
    """
    names = list(sources)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    data = ", ".join(names[:_MOST_NAMED]) + more
    named = Path(model).name if model and Path(model).is_absolute() else model
    return " on ".join(filter(None, (named, data)))


def write_page(path: Path, text: str) -> None:
    """Put a page where `--html` says."""
    try:
        # A name of a file may have half a character, which UTF-8 has not.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error}; name a file that can be") from error
