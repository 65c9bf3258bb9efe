"""All that the pinned tests call of the package's inside. A rebuild edits this file and no other of the folder.

What is public (`swift_vlpack.__all__`, `swift_vlpack.text.__all__`, flags, variables, `vlpack/epoch_N.json`) is called
by the tests themselves.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from swift_vlpack import PackingConfig
from swift_vlpack.envelope import VERSION, signed
from swift_vlpack.feed.epochs import Epochs, Extent
from swift_vlpack.plan import buffer
from swift_vlpack.plan.cuts import with_consumed
from swift_vlpack.plan.epoch import EpochPlan, Recipe
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.plan.parts import CutRows, Cutting, Part, Run, parts_of

Row = Sequence[tuple[int, int, int]]
"""A row as runs of tokens: (tokens, images, patches) of each; a run with an image is never cut. Without a run, or with
no token in any, the row cannot be encoded."""

# -- plans ------------------------------------------------------------------------------------------------------------


def plan_of(  # noqa: PLR0913 - the facts of a run
    sources: Mapping[str, Sequence[Row]],
    options: Mapping[str, Any],
    *,
    ratios: Mapping[str, float] | None = None,
    by_tokens: bool = False,
    some: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    seeds: Mapping[str, int] | None = None,
    shuffle: bool = True,
    epoch: int = 0,
    num_epochs: int = 1,
    num_packs: int | None = None,
    num_ranks: int = 1,
    accumulation: int = 1,
    past: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Plan an epoch of a run: the packs of every rank in every step, and what is left out.

    `some` limits sources to these rows. `past` lists the runs that trained on the epoch before, each as (ranks, packs
    of each rank); the plan is what is left for `num_ranks`.

    Returns `steps`, as {rank: {step: [ids of each pack]}}, and `left_out`, as {reason: ids}.
    """
    options = dict(options)
    # What was the option `packing_max_carry` is a constant of the buffer; cases that were pinned with others set it.
    buffer.MAX_CARRY = options.pop("packing_max_carry", 4)
    config = PackingConfig.from_mapping({"packing_length": 512, **options})
    names, some = list(sources), some or {}
    takes_part = [None if name not in some else np.array(some[name], dtype=np.int64) for name in names]
    mix = Mix(
        sources=tuple(
            Source(name, len(some.get(name, sources[name])), (ratios or {}).get(name, 1.0)) for name in names
        ),
        rows=tuple(takes_part),
        seed=seed,
        seeds=seeds or {},
        shuffle=shuffle,
        ratio_by="tokens" if by_tokens else "rows",
    )
    facts = {
        "sizes": tuple(_sizes(rows) for rows in sources.values()),
        "cut": tuple(_cut(rows, config) for rows in sources.values()) if config.cuts_rows else (),
        "mix": mix,
        "config": config,
        "seed": seed,
    }
    cuts: Any = ()
    for ranks, packs_of_rank in (*past, (num_ranks, 0)):
        plan = Epochs(Recipe(**facts, num_ranks=ranks), Extent(num_epochs, num_packs)).plan(epoch, cuts)
        cuts = with_consumed(plan.cuts, ranks * packs_of_rank)
    return {"steps": _steps(plan, names, num_ranks, accumulation), "left_out": _left_out(plan, names)}


def _sizes(rows: Sequence[Row]) -> Any:
    """Length, images, patches and supervised tokens of each row; of the last, which decides nothing, the length."""
    sums = [[sum(run[field] for run in row) for field in range(3)] for row in rows]
    return np.array([[*of_row, of_row[0]] for of_row in sums], dtype=np.int32).reshape(-1, 4).T


def _cut(rows: Sequence[Row], config: PackingConfig) -> CutRows:
    """The parts of rows longer than a pack."""
    cut: dict[int, list[Part]] = {}
    for number, row in enumerate(rows):
        runs = [Run(tokens, images, patches, is_whole=bool(images)) for tokens, images, patches in row]
        cutting = Cutting.of(config)
        assert cutting is not None
        if parts := parts_of(runs, cutting):
            cut[number] = [part._replace(supervised=part.length) for part in parts]
    return CutRows.of(cut)


def _steps(plan: EpochPlan, names: list[str], num_ranks: int, accumulation: int) -> dict[str, Any]:
    steps = {}
    for rank in range(num_ranks):
        packs = [[_id(plan, names, position) for position in plan.packs[number]] for number in plan.numbers_left(rank)]
        steps[str(rank)] = {
            str(1 + first // accumulation): packs[first : first + accumulation]
            for first in range(0, len(packs), accumulation)
        }
    return steps


def _left_out(plan: EpochPlan, names: list[str]) -> dict[str, list[str]]:
    found = {"not packed": [_id(plan, names, position) for position in plan.unreadable.tolist()]}
    for reason, positions in plan.packs.dropped.items():
        found[reason] = [_id(plan, names, position) for position in positions.tolist()]
    return {reason: sorted(ids) for reason, ids in found.items() if ids}


def _id(plan: EpochPlan, names: list[str], position: int) -> str:
    """`source:row`, and of a part its first token, the one behind its last, and how many of its first are repeated."""
    source, row, *span = plan.sample(position)
    return f"{names[source]}:{row}" + "".join(f"[{part.start}:{part.stop}+{part.num_repeated}]" for part in span)


# -- commands ---------------------------------------------------------------------------------------------------------


def vlpack(*flags: Any) -> Any:
    """Return what a command that needs no ms-swift prints as JSON: `vlpack("report", folder, "--json")`."""
    from swift_vlpack.cli import main

    with redirect_stdout(io.StringIO()) as printed:
        main([str(flag) for flag in flags])
    return json.loads(printed.getvalue())


def of_a_run(name: str, flags: Sequence[str], folder: Path, *, num_ranks: int = 1, **own: Any) -> dict[str, Any]:
    """Return what `vlpack NAME --json` prints of a run with these flags; a plan lists rows in `folder/left_out.jsonl`.

    `own` are flags of the command itself.
    """
    from tests.cli.in_process import run_here

    path = folder / f"{name}.json"
    left_out = ["--failures", folder / "left_out.jsonl"] if name == "plan" else []
    ranks = [] if name == "verify" else ["--num_ranks", num_ranks]
    given = [part for flag, value in own.items() for part in ([f"--{flag}"] if value is True else [f"--{flag}", value])]
    stdout = os.dup(1)
    with path.open("w") as file:
        try:
            os.dup2(file.fileno(), 1)
            assert run_here([name, *flags, *ranks, *given, *left_out, "--json"]) == 0
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


# -- keys of lengths --------------------------------------------------------------------------------------------------


def keys_of(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return the key that the length of each row is remembered under in a run with these flags, by source."""
    from swift_vlpack.host import length_pass
    from swift_vlpack.lengths.cache import LengthCache

    caches: list[LengthCache] = []
    opened = patch.object(length_pass, "LengthCache", lambda *args: caches.append(LengthCache(*args)) or caches[-1])
    with opened, _measured(flags, "sft") as sources:
        return {
            source.name: [key.tobytes().hex() for key in cache.keys(source.rows)]
            for source, cache in zip(sources, caches, strict=True)
        }


def lengths_of(flags: Sequence[str], command: str = "sft") -> dict[str, list[list[int]]]:
    """Return tokens, images, patches and supervised tokens of each row in a run with these flags, by source."""
    with _measured(flags, command) as sources:
        return {source.name: source.sizes.columns.T.tolist() for source in sources}


@contextmanager
def _measured(flags: Sequence[str], command: str) -> Iterator[Any]:
    from swift_vlpack.host.args import packing_config
    from swift_vlpack.host.pipeline import measured_rows
    from swift_vlpack.host.run import run_of
    from swift_vlpack.host.sources import load_sources

    with run_of(flags, num_ranks=1, command=command) as run:
        config = packing_config(run.args)
        sources, _ = load_sources(run.args, config)
        yield measured_rows(sources, run.template, run.args, config).sources


# -- runs -------------------------------------------------------------------------------------------------------------


def packs_trained(output: Path, rank: int = 0) -> list[list[Any]]:
    """Return what `VLPACK_RECORD_PACKS=true` noted of a rank, as [step, epoch, ids] of each pack, in order."""
    path = output / "vlpack" / f"packs_rank{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [[line["step"], line["epoch"], line["ids"]] for line in lines]


# -- saved states -----------------------------------------------------------------------------------------------------


def states_in(checkpoint: Path) -> dict[str, Any]:
    """Return the JSON files that say how far the data of a checkpoint has come, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(checkpoint.glob("vlpack_state*.json"))}


def put_state(folder: Path, checkpoint: Path) -> None:
    """Put the pinned state of a folder in the place of that of a checkpoint.

    Where a rebuild changes the shape of states on purpose, this translates: the content of the files of `folder` stays.
    """
    for path in checkpoint.glob("vlpack_state*.json"):
        path.unlink()
    for path in folder.glob("*.json"):
        (checkpoint / path.name).write_text(json.dumps(_translated(json.loads(path.read_text()))))


def _translated(value: Any) -> Any:
    """Give a saved state today's version, without options that are not in it any more, and sign what was signed."""
    from swift_vlpack.host.together import DECIDING

    if isinstance(value, list):
        return [_translated(inside) for inside in value]
    if not isinstance(value, dict):
        return value
    if "fingerprint" in value:
        kept = {name: one for name, one in value["fingerprint"].items() if not name.startswith(DECIDING)}
        value = {**value, "version": VERSION, "fingerprint": kept}
    translated = {name: _translated(inside) for name, inside in value.items() if name != "packing_max_carry"}
    return signed(translated) if "digest" in value and "kind" in value else translated
