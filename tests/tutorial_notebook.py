"""Write the tutorial as a notebook: the same text, and its files and commands as cells.

`make docs-tables` runs it. A file of the page becomes a cell that writes it, and a shell block a cell that runs it and
fails where a command fails, so nothing is typed twice. No outputs are stored: they would be those of one machine.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.doc_blocks import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
FIRST_SECTION_AFTER_INSTALL = "\n## 2. "
FOLDER = """\
# The empty folder; the commands of this environment come first there.
import os
import sys
import tempfile
from pathlib import Path

here = Path.cwd()
checkout = next(folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists())
os.environ["CHECKOUT"] = str(checkout)
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
os.chdir(tempfile.mkdtemp(prefix="tutorial_"))
print(os.getcwd())
"""
"""What `source .venv/bin/activate`, `export CHECKOUT=$PWD` and `cd` of the page are in a notebook."""
INTRODUCTION = """\
*This is [docs/tutorial.md](tutorial.md) as a notebook. Install as section 1 says, and choose the Python of that `.venv`
as the kernel: `[test]` brings what a notebook program needs of it. Outputs are not stored: run it, or read the page.*
"""
_FENCE = re.compile(r"^(?P<mark><!-- run in order -->\n)?```\w+\n(?P<text>.*?)^```\n", re.S | re.M)
_NAME = re.compile(r"as `([\w./-]+)`:\s*\Z")


def cells() -> list[tuple[str, str]]:
    """Return the cells of the notebook in order, each as its type and its text."""
    title, text = PAGE.read_text(encoding="utf-8").split("\n", 1)
    before, after = text.split(FIRST_SECTION_AFTER_INSTALL, 1)
    made = [("markdown", f"{title}\n\n{INTRODUCTION}{before}"), ("code", FOLDER)]
    made += _cells_of(FIRST_SECTION_AFTER_INSTALL.lstrip() + after)
    return [(kind, _from_examples(text) if kind == "markdown" else text) for kind, text in made]


def _cells_of(text: str) -> list[tuple[str, str]]:
    made, end = [], 0
    for fence in _FENCE.finditer(text):
        name = _NAME.search(text, 0, fence.start())
        magic = "%%bash -e" if fence["mark"] else f"%%writefile {name[1]}" if name else None
        if magic is None:
            continue  # it stays a part of the text: what a command prints, or what a reader may write elsewhere
        made += [("markdown", text[end : fence.start()]), ("code", f"{magic}\n{fence['text']}")]
        end = fence.end()
    return [(kind, text) for kind, text in [*made, ("markdown", text[end:])] if text.strip()]


def _from_examples(text: str) -> str:
    """Let the links of a page in docs/ lead to the same places from examples/."""
    return re.sub(r"\]\((?!https?:|#|\.\./)([^)]+)\)", r"](../docs/\1)", text)


def notebook() -> dict[str, Any]:
    """Return the notebook in version 4.5 of its format, without outputs."""
    made = []
    for number, (kind, text) in enumerate(cells()):
        cell = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.strip().splitlines(keepends=True),
        }
        made.append({**cell, "execution_count": None, "outputs": []} if kind == "code" else cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def as_text() -> str:
    """Return the content of the file."""
    return json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(as_text(), encoding="utf-8")
