"""The pages of the documentation, and the fenced blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "docs" / "_package" / "README.md",
    *sorted(path for folder in ("docs", "specs", "benchmarks") for path in (ROOT / folder).glob("*.md")),
)
_FENCE = re.compile(
    r"(?P<before>[^\n]*)\n+(?:<!-- (?P<mark>[\w ]+) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.S | re.M
)


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    """What a comment right before it says: `run` and `run in order` (a test does), `hub` or `gpu` (it needs one)."""
    name: str
    """Of the file that the sentence before it says it is: "Save this as `train.yaml`:"."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page, in these languages or in all."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text[: match.start("text")].count("\n") + 1
        name = re.search(r"as `([\w./-]+)`:$", match["before"].strip())
        block = Block(
            page, line, match["language"].strip(), match["text"], match["mark"] or "", name[1] if name else ""
        )
        if not languages or block.language in languages:
            found.append(block)
    return found


def all_blocks(*languages: str) -> list[Block]:
    """Those of all pages."""
    return [block for page in PAGES for block in blocks(page, *languages)]


def commands(block: Block) -> list[str]:
    """The commands of a shell block, each in one line, without comments."""
    joined = block.text.replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
