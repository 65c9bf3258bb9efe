"""An epoch at a glance: how full its packs are, what is in them, and which are worth a look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swift_vlpack.pages.visible import visible

_WIDTH = 40
"""Cells of the longest bar."""


def overview_parts(overview: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The numbers of `overview_of` for a reader."""
    yield Text(
        f"epoch {overview['epoch']}: {overview['num_packs']} packs of {overview['packing_length']} tokens for "
        f"{overview['num_ranks']} rank{'s' * (overview['num_ranks'] > 1)}, {overview['num_samples']} samples, "
        f"fill {overview['mean_fill']:.1%} mean",
        "bold",
    )
    most = max(overview["fills"].values(), default=1)
    for label, count in overview["fills"].items():
        yield Text(f"{label:>10} full {count:>8}  ").append("#" * max(1, round(_WIDTH * count / most)), "cyan")
    for name, source in overview["sources"].items():
        yield Text(visible(f"{name}: {source['samples']} samples, {source['tokens']} tokens"), "dim")
    yield Text(
        f"longest pack {overview['longest']}, emptiest pack {overview['emptiest']}, rows in no pack "
        f"{overview['num_left_out']}\n",
        "dim",
    )
