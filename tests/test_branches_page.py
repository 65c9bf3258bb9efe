"""The table of docs/branches.md: what is computed in it follows from what was published."""

import math
import re
from pathlib import Path

import pytest

from swift_vlpack.config import PackingConfig

PAGE = (Path(__file__).parents[1] / "docs" / "branches.md").read_text(encoding="utf-8")
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.search(r"\dx \| [^|]+ \|$", line)
]
PREFIX, BRANCH = (
    int(re.search(pattern, PAGE)[1]) for pattern in (r"a prefix of (\d+)\s+tokens", r"branches of (\d+)\.")
)
UNITS = {"million": 1e6, "thousand": 1e3}


def number(text):
    value, _, unit = text.partition(" ")
    return float(value.replace(",", "")) * UNITS.get(unit, 1)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_computed_columns_follow_from_published_counts(line):
    """SHARE-84"""
    _, rows, images, rows_per_image, fewer, _ = line
    mean = number(rows) / number(images)
    assert float(rows_per_image) == round(mean, 1)
    units = max(1, math.ceil(mean / PackingConfig(packing_length=8).packing_share_max))
    saved = mean * (PREFIX + BRANCH) / (units * PREFIX + mean * BRANCH)
    assert fewer == f"{saved:.1f}x"


def test_every_row_says_where_its_counts_were_published():
    """SHARE-84"""
    published = [line[5] for line in LINES]
    assert "https://" in published[0]
    assert all("](https://" in where or where == "the same" for where in published)
