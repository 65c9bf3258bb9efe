"""`vlpack plan --sweep`: plan the same rows under several values of options and numbers of ranks, as one table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from swift_vlpack.config import SAMPLES, PackingConfig, checked_num_ranks
from swift_vlpack.errors import ConfigError, PlanError, VLPackError
from swift_vlpack.lines import labelled, table
from swift_vlpack.plan.epoch import EpochPlan, PackedEpoch, Recipe, pack_epoch, plan_epoch
from swift_vlpack.plan.report import plan_report
from swift_vlpack.plan.same_steps import UnpackedStep, padding_saved
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.words import counted, did_you_mean

_AT_MEASURING = ("packing_share", "packing_share_max")
"""Options of packs that have to be known when rows are measured."""
_OF_PLANS = {spec.name for spec in fields(PackingConfig) if spec.metadata["decides"] in ("packs", "steps")}
SWEPT = sorted(_OF_PLANS.difference(_AT_MEASURING) | {"effective_batch_size"})
"""Options that can have several values: they decide packs and steps, and no length of a row."""
_COLUMNS = {
    "steps": "{}", "fill": "{:.2%}", "padding_saved": "{:.1%}", "work_over_bound": "{:.3f}",
    "sequences_per_step": "{:.1f}", "samples_per_step": "{:.1f}",
}  # fmt: skip
"""Numbers of a case, and how the table writes them."""


class Case(NamedTuple):
    """A row of the table: values of the swept options, all options, and ranks."""

    options: dict[str, Any]
    config: PackingConfig
    num_ranks: int


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ask for a table."""
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        metavar="OPTION=X,Y",
        help=f"print a table with a row for each value of these packing options ({', '.join(SWEPT)})",
    )
    parser.add_argument("--ranks", metavar="INT,INT", help="rows of that table for each of these numbers of ranks")


def cases_of(args: argparse.Namespace, config: PackingConfig, num_ranks: int) -> list[Case]:
    """Return the rows of the table; none without `--sweep` and `--ranks`. Raises `ConfigError`."""
    if args.sweep is None and args.ranks is None:
        return []
    if args.ranks is not None and args.num_ranks is not None:
        raise ConfigError("both --ranks and --num_ranks say for how many ranks to plan; give one of them")
    ranks = (args.ranks or str(num_ranks)).split(",")
    if not all(map(str.isdecimal, ranks)):
        raise ConfigError(f"--ranks takes whole numbers, such as 8,64, got {args.ranks!r}")
    values: dict[str, list[str]] = {}
    for text in args.sweep or ():
        name, _, given = text.partition("=")
        if name not in SWEPT:
            raise ConfigError(f"--sweep takes {', '.join(SWEPT)}; got {name!r}{did_you_mean(name, SWEPT)}")
        if not given or name in values:
            raise ConfigError(f"--sweep {text}: give the values of {name} once, such as {name}=X,Y")
        values[name] = given.split(",")
    if "packing_length" in values and (config.cuts_rows or config.shares_media):
        what = f"packing_overflow={config.packing_overflow}" if config.cuts_rows else "packing_share=media"
        raise ConfigError(f"--sweep packing_length under {what} would measure the rows anew; plan each by itself")
    base = {"packing_length": config.packing_length, **config.changed()}
    cases = []
    for chosen in product(*values.values()):
        made = PackingConfig.from_mapping({**base, **dict(zip(values, chosen, strict=True))})
        options = {name: getattr(made, name) for name in values}
        cases += [Case(options, made, checked_num_ranks(int(number))) for number in ranks]
    return cases


def planned_case(
    recipe: Recipe, num_ranks: int, batch_size: int, given: int | None, packed: PackedEpoch | None = None
) -> tuple[EpochPlan, int]:
    """Plan epoch 0 for these ranks. Returns it with the accumulation, which is `given` or follows from the options."""
    accumulation = recipe.config.accumulation(num_ranks, batch_size, given)
    step = None
    if recipe.config.packing_batch == SAMPLES:
        step = UnpackedStep(batch_size, accumulation, num_ranks)
    return plan_epoch(replace(recipe, num_ranks=num_ranks, step=step), 0, packed=packed), accumulation


def sweep_report(
    recipe_of: Callable[[PackingConfig], Recipe], cases: Sequence[Case], *, batch_size: int, accumulation: int | None
) -> dict[str, Any]:
    """Plan every case. Raises `PlanError` for one that cannot be planned."""
    start, rows, config, packed = time.perf_counter(), [], None, None
    for case in cases:
        named = {**case.options, "num_ranks": case.num_ranks}
        try:
            if case.config is not config:  # other ranks share the packs of the same options
                config, recipe = case.config, recipe_of(case.config)
                packed = None if config.packing_batch == SAMPLES else pack_epoch(recipe, 0)
            epoch, each = planned_case(recipe, case.num_ranks, batch_size, accumulation, packed)
        except VLPackError as error:
            said = ", ".join(f"{name}={value}" for name, value in named.items())
            raise PlanError(f"{said}: {error}") from error
        rows.append({**named, "gradient_accumulation_steps": each, **_numbers(epoch, batch_size * each, batch_size)})
    seconds = round(time.perf_counter() - start, 4)
    return {"per_device_train_batch_size": batch_size, "cases": rows, "seconds": seconds}


def _numbers(epoch: EpochPlan, per_rank: int, batch_size: int) -> dict[str, Any]:
    """Return the numbers of a planned case, of which each step of a rank takes `per_rank` packs."""
    packs, num_steps = epoch.packs, epoch.num_steps_left(per_rank)
    in_random_order = permutation(len(packs.lengths), packs.seed, "padded")
    saved = padding_saved(packs, in_random_order // batch_size if epoch.batch is None else epoch.batch)
    single = plan_report(epoch.unshared, packs, num_rows=epoch.num_rows, seconds=0.0)
    per_step = min(per_rank, packs.num_packs_per_rank) if packs.batches is None else float(packs.batches.mean())
    return {
        "steps": num_steps,
        "fill": single["mean_fill"],
        "padding_saved": saved,
        "work_over_bound": single["balance"],
        "sequences_per_step": round(per_step * packs.num_ranks, 4),
        "samples_per_step": round(len(packs.members) / num_steps, 4),
    }


def sweep_text(report: dict[str, Any]) -> str:
    """Write the table, and what its columns mean."""
    cases = report["cases"]
    names = [name for name in cases[0] if name not in ("gradient_accumulation_steps", *_COLUMNS)]
    rows = [
        [*(str(case[name]) for name in names), *(form.format(case[name]) for name, form in _COLUMNS.items())]
        for case in cases
    ]
    about = [
        ("steps", "of epoch 0"),
        ("padding", f"of un-packed batches, per_device_train_batch_size {report['per_device_train_batch_size']}"),
        ("work", "of the slowest rank in each step, over the mean of the ranks; the bound is 1"),
        ("time", f"{report['seconds']:.2f} s for {counted(len(cases), 'plan')}"),
    ]
    columns = [name.removeprefix("num_").replace("_per_", " a ").replace("_", " ") for name in (*names, *_COLUMNS)]
    return "\n".join([*table(columns, rows, num_texts=len(names) - 1), "", labelled(about)])
