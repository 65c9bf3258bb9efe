"""Pages in headless Chromium, without a network, in a profile of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_SECONDS = 180
# In a frame: a window of Chromium itself cannot be as narrow as a phone.
_FRAME = """<!doctype html><body style="margin:0"><pre id="out" hidden></pre><script>
const frame = document.createElement("iframe");
Object.assign(frame, {width: WIDTH, height: HEIGHT, srcdoc: PAGE});
frame.style = "border:0; display:block";
frame.addEventListener("load", () => {
  const view = frame.contentWindow, root = view.document.documentElement;
  root.dataset.theme = "THEME";
  document.getElementById("out").textContent = JSON.stringify(EXPRESSION);
});
document.body.append(frame);
</script>
"""


def measured(page: str, expression: str, *, width: int = 1280, theme: str = "light") -> Any:
    """What an expression is in a page that is so wide, as JSON; `root` is its `<html>`, `view` its window."""
    dom = _run(_framed(page, expression, width, 900, theme), "--virtual-time-budget=5000", "--dump-dom")
    found = re.search(r'<pre id="out"[^>]*>(.+?)</pre>', dom, flags=re.DOTALL)
    assert found, dom[:2000]
    return json.loads(unescape(found[1]))


def _framed(page: str, expression: str, width: int, height: int, theme: str) -> str:
    text = json.dumps(page).replace("</", "<\\/")
    filled = _FRAME.replace("WIDTH", f'"{width}"').replace("HEIGHT", f'"{height}"').replace("THEME", theme)
    return filled.replace("EXPRESSION", expression).replace("PAGE", text)


def _run(html: str, *flags: str) -> str:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(html, encoding="utf-8")
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}/profile", *flags, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    return done.stdout
