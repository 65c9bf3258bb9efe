"""Write the pack browser: one page with packs, their samples, masks and small images, and filters over them.

`browser.js` draws the packs from their JSON (`PackShown.as_json`), which is in the page without tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from swift_vlpack.pages.page import asset, data, page, subject
from swift_vlpack.pages.safe_text import texts_changed, without_home
from swift_vlpack.pages.terminal import overview_line
from swift_vlpack.pages.values import PackShown
from swift_vlpack.words import counted

MOST_BYTES = 20_000_000
"""Data of a page at most: it still opens on a phone."""


def browser(
    packs: Iterable[PackShown],
    overview: Mapping[str, Any] | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    num_packs: int | None = None,
    model: str | None = None,
) -> tuple[str, str]:
    """Make the page. Returns (page, a line that says how many packs it has).

    Packs are taken until their data reaches `most_bytes`, but at least one. The title names `model` and the sources.
    """
    taken: list[dict[str, Any]] = []
    num_bytes, is_full = 0, False
    for pack in packs:
        made = texts_changed({**pack.as_json(), "row": None}, without_home, but="pieces")
        size = len(json.dumps(made, ensure_ascii=False).encode(errors="replace"))
        is_full = bool(taken) and num_bytes + size > most_bytes
        if is_full:
            break
        num_bytes += size
        taken.append(made)
    said = _said(len(taken), num_packs, is_full=is_full)
    about = "" if overview is None else f"{overview_line(overview)}; "
    body = "\n".join(
        (
            f'<p id="said">{escape(about)}on this page: {escape(said)}</p>',
            "<noscript>This page needs JavaScript.</noscript>",
            asset("browser.html"),
            data("data", taken),
        )
    )
    title = "Packs" if overview is None else f"Packs of epoch {overview['epoch']}"
    if name := subject(model, sorted({member["source"] for pack in taken for member in pack["members"]})):
        title += f": {name}"
    return page(title, body, asset("browser.css"), asset("browser.js")), said


def _said(num_shown: int, num_packs: int | None, *, is_full: bool) -> str:
    of = "" if num_packs is None or num_packs == num_shown else f"{num_shown} of "
    why = f"; the page is limited to {MOST_BYTES / 1e6:g} MB: choose by --pack, --step, --sample" if is_full else ""
    return f"{of}{counted(num_packs or num_shown, 'pack')}{why}"
