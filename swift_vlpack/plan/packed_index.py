"""Write the packs of an epoch as row numbers, for trainers that are not ms-swift.

    rows.npy       int64, the numbers of the rows, pack after pack
    offsets.npy    int64, (num_packs + 1,): pack i has rows[offsets[i]:offsets[i + 1]]
    packs.jsonl    the same for people: step, rank, rows, lengths and tokens of each pack
    index.json     the number of packs, steps and ranks, the options, and the digest of the packs

Pack number `step * num_ranks + rank` belongs to this rank in this step. All ranks have equally many packs.

>>> from tempfile import TemporaryDirectory
>>> from swift_vlpack.plan.planner import plan
>>> config = PackingConfig(packing_length=10, packing_strategy="exact", packing_drop_last=False)
>>> with TemporaryDirectory() as folder:
...     index = write_index(Path(folder), plan([6, 5, 4, 5], config).align(2))
...     Path(folder, "packs.jsonl").read_text().splitlines()[0], index["num_steps"]
('{"step": 0, "rank": 0, "rows": [1, 3], "lengths": [5, 5], "num_tokens": 10}', 1)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.packs import Plan

VERSION = 1
_OPTIONS = ("packing_length", "packing_strategy")


def write_index(folder: Path, packs: Plan) -> dict[str, Any]:
    """Write the packs of an aligned plan (`Plan.align`). Returns the content of `index.json`."""
    config: PackingConfig = packs.config
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "rows.npy", packs.members.astype(np.int64))
    np.save(folder / "offsets.npy", packs.offsets.astype(np.int64))
    with (folder / "packs.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in _lines(packs))
    index = {
        "version": VERSION,
        "num_rows": len(packs.lengths),
        "num_packs": len(packs),
        "num_steps": packs.num_packs_per_rank,
        "num_ranks": packs.num_ranks,
        **{name: getattr(config, name) for name in _OPTIONS},
        "seed": packs.seed,
        "mean_fill": round(packs.mean_fill, 4),
        "num_left_out": packs.num_dropped,
        "digest": packs.digest(),
    }
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def _lines(packs: Plan) -> Iterator[dict[str, Any]]:
    for number, rows in enumerate(packs):
        step, rank = divmod(number, packs.num_ranks)
        lengths = packs.lengths[rows].tolist()
        yield {"step": step, "rank": rank, "rows": rows, "lengths": lengths, "num_tokens": sum(lengths)}
