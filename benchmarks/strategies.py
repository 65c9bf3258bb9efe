"""Measure the packing strategies side by side and print the tables of benchmarks/RESULTS.md.

    python benchmarks/strategies.py                            # example lengths and synthetic ones, 20 minutes
    python benchmarks/strategies.py --lengths captions.json    # your own length files in place of the example
    python benchmarks/strategies.py --quick                    # small sets, a minute or two, to see that it runs

Every result is checked before it is counted: each sample is in exactly one pack, and no pack is over the capacity.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan import strategies
from swift_vlpack.plan.exact import Shelf
from swift_vlpack.plan.length_files import read_lengths
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.steps import cost_of_samples
from swift_vlpack.plan.strategies import lower_bound

Lengths = NDArray[np.int64]
EXAMPLE = Path(__file__).parent.parent / "configs" / "example_lengths.json"
CAPACITIES = (4096, 8192, 12000, 32768)
TRL_WINDOW = 1000  # `datasets.map` hands its function so many rows at a time
SEED = 2024
MARKS = {"best_fit over the epoch": "*", "binpack over the epoch": "+"}


# -- what is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """What one method made of one set: the tokens of each pack, and how long it took."""

    tokens: Lengths
    seconds: float
    mark: str = ""  # `exact` took another packing of the whole epoch, which needs fewer packs


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the processor seconds; all methods run in one thread, and other work does not count."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def tokens_of_groups(groups: Sequence[Sequence[int]], lengths: Lengths) -> Lengths:
    members = np.fromiter((index for group in groups for index in group), dtype=np.int64)
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return tokens_of_members(members, owner, lengths)


def tokens_of_members(members: NDArray[Any], owner: NDArray[Any], lengths: Lengths) -> Lengths:
    """Tokens per pack, once it is certain that every sample is in exactly one."""
    if not np.array_equal(np.bincount(members, minlength=len(lengths)), np.ones(len(lengths))):
        raise AssertionError("a sample was lost, repeated or made up")
    return np.bincount(owner, weights=lengths[members]).astype(np.int64)


def run_next_fit(lengths: Lengths, capacity: int) -> Packed:
    sizes = lengths.tolist()
    groups, seconds = timed(lambda: strategies.greedy(sizes, capacity))
    return Packed(tokens_of_groups(groups, lengths), seconds)


class Collected(list[Any]):
    """Stands in for the queue through which ms-swift's packing worker returns its packs."""

    put = list.append


def run_ms_swift(lengths: Lengths, capacity: int) -> Packed:
    """ms-swift's own worker function: `calculate_matched_group` on 1000 samples plus the last group of those before."""
    from swift.dataset.packing import PackingDataset  # slow to import: it brings torch

    sizes, out = lengths.tolist(), Collected()
    work = partial(PackingDataset.create_packed_idx, 0, 0, sizes, out, capacity, "binpack")
    _, seconds = timed(work)
    groups = [[index for index, _ in pack] for _, packs, _ in out for pack in packs if pack]
    return Packed(tokens_of_groups(groups, lengths), seconds)


def run_trl(lengths: Lengths, capacity: int) -> Packed:
    """TRL's bfd function on Arrow tables of 1000 rows of one-byte tokens; building the tables is not timed."""
    from trl.data_utils import _pack_bfd

    seconds = 0.0
    packs: list[Lengths] = []
    for table in token_tables(lengths):
        packed, spent = timed(partial(_pack_bfd, table, capacity))
        seconds += spent
        packs.extend(packed["seq_lengths"].combine_chunks().to_numpy(zero_copy_only=False))
    samples = np.concatenate(packs)
    if not np.array_equal(np.sort(samples), np.sort(lengths)):
        raise AssertionError("TRL cut a sample")
    return Packed(np.array([pack.sum() for pack in packs]), seconds)


def token_tables(lengths: Lengths) -> Iterator[Any]:
    import pyarrow as pa

    for start in range(0, len(lengths), TRL_WINDOW):
        offsets = np.concatenate(([0], np.cumsum(lengths[start : start + TRL_WINDOW])))
        tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))
        yield pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)})


def run_best_fit_over_all(lengths: Lengths, capacity: int) -> Packed:
    (pack_of, _), seconds = timed(lambda: strategies.best_fit_assignment(lengths, capacity))
    return Packed(tokens_of_members(np.arange(len(lengths)), pack_of, lengths), seconds)


def run_plan(strategy: str, window: int, lengths: Lengths, capacity: int) -> Packed:
    made, seconds = timed(lambda: plan(lengths, config_of(strategy, window, capacity)))
    owner = np.repeat(np.arange(len(made)), made.num_samples_per_pack)
    return Packed(tokens_of_members(made.members, owner, lengths), seconds, MARKS.get(made.method, ""))


def config_of(strategy: str, window: int, capacity: int) -> PackingConfig:
    return PackingConfig(
        packing_length=capacity,
        packing_strategy=strategy,
        packing_buffer=window,
        packing_drop_last=False,
    )


def run_exact_alone(window: int, lengths: Lengths, capacity: int) -> Packed:
    sizes = lengths.tolist()
    groups, seconds = timed(lambda: exact_alone(sizes, capacity, window))
    return Packed(tokens_of_groups(groups, lengths), seconds)


def exact_alone(sizes: list[int], capacity: int, window: int) -> list[list[int]]:
    """`exact` over a stream and nothing else: no packer, no plan, no other packing of the epoch to compare with."""
    shelf, indices = Shelf(capacity, sizes[:window]), list(range(min(window, len(sizes))))
    groups = []
    num_read = len(indices)
    while indices:
        inside = shelf.fullest()
        groups.append([indices[i] for i in inside])
        shelf.take(inside, indices)
        more = sizes[num_read : num_read + len(inside)]
        shelf.add(more)
        indices += range(num_read, num_read + len(more))
        num_read += len(more)
    return groups


METHODS: dict[str, Callable[[Lengths, int], Packed]] = {
    "next-fit": run_next_fit,
    "ms-swift, windows of 1000": run_ms_swift,
    "TRL bfd, windows of 1000": run_trl,
    "`binpack`, window 512": partial(run_plan, "binpack", 512),
    "`first_fit`, window 512": partial(run_plan, "first_fit", 512),
    "`best_fit`, window 512": partial(run_plan, "best_fit", 512),
    "best fit over all": run_best_fit_over_all,
    "`exact`, window 256": partial(run_plan, "exact", 256),
    "`exact`, window 512": partial(run_plan, "exact", 512),
    "`exact` alone, window 256": partial(run_exact_alone, 256),
    "`exact` alone, window 512": partial(run_exact_alone, 512),
}
SPEED_ONLY = {name for name in METHODS if "alone" in name}


# -- on what ------------------------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int, int], Lengths]


def redrawn(draw: Callable[[int], NDArray[Any]], num: int, least: int, most: int) -> Lengths:
    """Round to integers and draw again what lies outside of `least` to `most`."""
    kept = np.empty(0, dtype=np.int64)
    while len(kept) < num:
        more = np.rint(draw(num)).astype(np.int64)
        kept = np.concatenate((kept, more[(more >= least) & (more <= most)]))
    return kept[:num]


def captions(rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    """A caption of nearly constant length under pictures of a few sizes; one in ten differs."""
    typical = rng.choice([205, 222, 250, 291, 331], p=[0.05, 0.07, 0.03, 0.5, 0.35], size=num)
    usual = np.rint(typical + rng.normal(0, 2, num)).astype(np.int64)
    return np.where(rng.random(num) < 0.1, rng.integers(60, 445, num), usual)


def detections(rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    """JSON with a box per object: few objects mostly, sometimes a crowd."""
    return redrawn(lambda n: 300 + rng.lognormal(6.2, 1.0, n), num, 300, min(4000, capacity))


def documents(rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    return redrawn(lambda n: rng.lognormal(7.6, 1.0, n), num, 1, capacity)


def instructions(rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    return redrawn(lambda n: rng.lognormal(5.3, 1.0, n), num, 20, min(2000, capacity))


def between(low: float, high: float, rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    return rng.integers(round(low * capacity), round(high * capacity) + 1, num)


SYNTHETIC: dict[str, Draw] = {
    "captions": captions,
    "detection JSON": detections,
    "documents": documents,
    "instruct mix": instructions,
    "35-65 % of C": partial(between, 0.35, 0.65),
    "20-50 % of C": partial(between, 0.2, 0.5),
}


def lengths_in(file: Path) -> tuple[str, Lengths]:
    return file.stem.partition("_")[0], np.asarray(read_lengths(file).tokens, dtype=np.int64)


# -- tables -------------------------------------------------------------------------------------------------------


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def brief(value: float) -> str:
    """Three digits at most: 0, 0.03, 1.3, 22, 1480."""
    if value == 0:
        return "0"
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"


# -- quality and speed --------------------------------------------------------------------------------------------


def best_of(method: Callable[[Lengths, int], Packed], lengths: Lengths, capacity: int) -> Packed:
    """The fastest of three runs, or fewer once they have taken two seconds."""
    runs: list[Packed] = []
    while len(runs) < 3 and sum(run.seconds for run in runs) < 2:
        runs.append(method(lengths, capacity))
    return min(runs, key=lambda run: run.seconds)


@dataclass(frozen=True)
class Cell:
    num_packs: int
    excess: float  # per cent over the lower bound
    thousand_per_second: float
    mark: str


def measure(name: str, lengths: Lengths, capacity: int) -> Cell:
    packed = best_of(METHODS[name], lengths, capacity)
    bound = lower_bound(lengths, capacity)
    if packed.tokens.max() > capacity or len(packed.tokens) < bound:
        raise AssertionError(f"{name}: a pack over the capacity, or fewer packs than anyone could need")
    return Cell(
        num_packs=len(packed.tokens),
        excess=100 * (len(packed.tokens) - bound) / bound,
        thousand_per_second=len(lengths) / packed.seconds / 1000,
        mark=packed.mark,
    )


Cells = dict[tuple[str, str, int], Cell]


def measure_sets(sets: dict[str, Callable[[int], Lengths]]) -> Cells:
    cells: Cells = {}
    for set_name, at_capacity in sets.items():
        for capacity in CAPACITIES:
            lengths = at_capacity(capacity)
            for method in METHODS:
                cells[method, set_name, capacity] = measure(method, lengths, capacity)
            note(f"{set_name}, capacity {capacity}: done")
    return cells


def print_cells(title: str, methods: Iterable[str], cells: Cells, show: Callable[[Cell], str]) -> None:
    set_names = list(dict.fromkeys(name for _, name, _ in cells))
    rows = [
        [method, *(" / ".join(show(cells[method, name, capacity]) for capacity in CAPACITIES) for name in set_names)]
        for method in methods
    ]
    print_table(title, ["", *set_names], rows)


def excess_of(cell: Cell) -> str:
    return brief(cell.excess) + cell.mark


def report_quality(what: str, sets: dict[str, Callable[[int], Lengths]]) -> None:
    cells = measure_sets(sets)
    at = " / ".join(map(str, CAPACITIES))
    packers = [method for method in METHODS if method not in SPEED_ONLY]
    print_cells(f"{what}: packs over the lower bound in per cent, at {at}", packers, cells, excess_of)
    print_cells(
        f"{what}: thousand samples a second, at {at}", METHODS, cells, lambda cell: brief(cell.thousand_per_second)
    )
    for window in (256, 512):
        worse = [
            f"{name} at {capacity}"
            for (method, name, capacity), cell in cells.items()
            if method == f"`exact`, window {window}"
            and cell.num_packs > cells["ms-swift, windows of 1000", name, capacity].num_packs
        ]
        print(f"\n`exact`, window {window}, needs more packs than ms-swift on: {', '.join(worse) or 'none of these'}.")


# -- never more packs than ms-swift -------------------------------------------------------------------------------

SMALL: dict[str, Draw] = {
    **SYNTHETIC,
    "1 to C": partial(between, 0.0001, 1),
    "1 to C/10": partial(between, 0.0001, 0.1),
    "just over C/2": partial(between, 0.5001, 0.55),
    "C/3 and its neighbours": partial(between, 0.3, 0.36),
    "three lengths": lambda rng, num, capacity: rng.choice(rng.integers(1, capacity + 1, 3), num),
    "some over C": lambda rng, num, capacity: np.maximum(1, rng.exponential(capacity / 3, num).astype(np.int64)),
}


def small_set(seed: int) -> tuple[str, Lengths, int]:
    rng = np.random.default_rng(seed)
    name = list(SMALL)[seed % len(SMALL)]
    capacity = int(rng.choice([512, 1000, 2048, *CAPACITIES]))
    num = round(5 * (3000 / 5) ** rng.random())
    return name, np.maximum(1, SMALL[name](rng, num, capacity)), capacity


def tiny_set(seed: int) -> tuple[str, Lengths, int]:
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([20, 50, 100, 200, 1000]))
    low, high = rng.choice([0, 0.1, 0.2, 0.25]), rng.choice([0.33, 0.5, 0.6, 1])
    return "", np.maximum(1, between(low, high, rng, rng.integers(6, 61), capacity)), capacity


def report_against_ms_swift(title: str, make: Callable[[int], tuple[str, Lengths, int]], num_sets: int) -> None:
    """Packs of `exact` and of ms-swift on seeded sets, and every set on which `exact` needs more."""
    windows = (256, 512)
    rows: list[list[str]] = []
    num_theirs = 0
    num_ours, num_fewer, num_taken = (dict.fromkeys(windows, 0) for _ in range(3))
    for seed in range(num_sets):
        name, lengths, capacity = make(seed)
        theirs = len(run_ms_swift(lengths, capacity).tokens)
        num_theirs += theirs
        for window in windows:
            packed = run_plan("exact", window, lengths, capacity)
            ours = len(packed.tokens)
            num_ours[window] += ours
            num_fewer[window] += ours < theirs
            num_taken[window] += packed.mark == MARKS["binpack over the epoch"]
            if ours > theirs:
                rows.append([f"{seed} {name}".strip(), *map(str, (len(lengths), capacity, window, theirs, ours))])
    print(f"\n{num_sets:,} {title}: ms-swift needs {num_theirs:,} packs in all\n")
    for window in windows:
        print(
            f"- `exact`, window {window}: {num_ours[window]:,} packs; "
            f"fewer than ms-swift on {num_fewer[window]:,} sets; "
            f"took ms-swift's packing on {num_taken[window]:,}"
        )
    print(f"- `exact` needs more packs than ms-swift in {len(rows)} of {2 * num_sets:,} comparisons")
    if rows:
        print_table("Where it needs more", ["seed", "samples", "capacity", "window", "ms-swift", "`exact`"], rows)


# -- the window ---------------------------------------------------------------------------------------------------


def excess_over_sets(strategy: str, window: int, sets: Sequence[Lengths], capacity: int) -> str:
    num_packs = sum(len(run_plan(strategy, window, lengths, capacity).tokens) for lengths in sets)
    bound = sum(lower_bound(lengths, capacity) for lengths in sets)
    return brief(100 * (num_packs - bound) / bound)


def report_large_windows(nums: Sequence[int]) -> None:
    """`exact` where nothing fits exactly: a window that is large for the epoch is worse."""
    windows, num_sets, capacity = (128, 256, 512, 1024), 5, 8192
    rows = []
    for num in nums:
        sets = [SYNTHETIC["20-50 % of C"](np.random.default_rng(seed), num, capacity) for seed in range(num_sets)]
        rows.append([f"{num:,}", *(excess_over_sets("exact", window, sets, capacity) for window in windows)])
    print_table(
        f"`exact` on {num_sets} sets of 20-50 % of C, capacity {capacity}: per cent over the bound, by window",
        ["samples", *map(str, windows)],
        rows,
    )


def report_small_windows(num: int) -> None:
    """The other strategies where a pack takes many samples: a small window holds too few packs."""
    windows, capacity = (512, 1024, 2048, 4096), 32768
    rows = []
    for set_name in ("captions", "instruct mix"):
        sets = [drawn(SYNTHETIC[set_name], num, capacity)]
        for strategy in ("binpack", "first_fit", "best_fit"):
            cells = (excess_over_sets(strategy, window, sets, capacity) for window in windows)
            rows.append([set_name, f"`{strategy}`", *cells])
    print_table(
        f"{num:,} short samples, capacity {capacity}: per cent over the bound, by window",
        ["", "", *map(str, windows)],
        rows,
    )


# -- growth -------------------------------------------------------------------------------------------------------

GROWTH: dict[str, Callable[[Lengths, int], Any]] = {
    "`exact`": lambda lengths, capacity: plan(lengths, config_of("exact", 512, capacity)),
    "`best_fit`": lambda lengths, capacity: plan(lengths, config_of("best_fit", 512, capacity)),
    "`greedy`": lambda lengths, capacity: plan(lengths, config_of("greedy", 512, capacity)),
    "best fit over all": strategies.best_fit_assignment,
    "ms-swift": run_ms_swift,
}


def memory_now(name: str) -> int:
    """`VmRSS` or `VmHWM` (the peak) of this process in bytes, from Linux."""
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


def run_child(method: str, file: str, capacity: int) -> None:
    """Time one method in this fresh process and say how far its memory rose above the lengths it was given."""
    lengths = np.load(file)
    GROWTH[method](lengths[:1000], capacity)  # imports and caches
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is held now
    before = memory_now("VmRSS")
    _, seconds = timed(lambda: GROWTH[method](lengths, capacity))
    print(json.dumps({"seconds": seconds, "bytes": memory_now("VmHWM") - before}))


def in_child(method: str, file: Path, capacity: int) -> tuple[float, int]:
    command = [sys.executable, __file__, "--child", method, str(file), str(capacity)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    answer = json.loads(run.stdout.splitlines()[-1])
    return answer["seconds"], answer["bytes"]


def growth_cell(method: str, draw: Draw, num: int, capacity: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, drawn(draw, num, capacity).astype(np.int32))
        seconds, num_bytes = in_child(method, file, capacity)
    note(f"{method}, {num} samples: {seconds:.2f} s")
    return f"{seconds:.3g} s, {num_bytes / num:.0f} B"


def report_growth(nums: Sequence[int], capacity: int) -> None:
    rows = []
    for set_name in ("captions", "detection JSON", "35-65 % of C"):
        for method in GROWTH:
            # ms-swift and the sets beside captions stop where a cell would take many minutes.
            most = 10**7 if set_name == "captions" and method != "ms-swift" else 10**6
            if set_name == "captions" or method in ("`exact`", "`best_fit`"):
                cells = [growth_cell(method, SYNTHETIC[set_name], n, capacity) if n <= most else "" for n in nums]
                rows.append([set_name, method, *cells])
    columns = ["", "", *(f"{num:,}" for num in nums)]
    print_table(
        f"Processor seconds, and bytes a sample at the peak above the lengths; capacity {capacity}", columns, rows
    )


# -- balance ------------------------------------------------------------------------------------------------------


def short_documents(rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    return documents(rng, num, capacity // 2)


def with_giants(rng: np.random.Generator, num: int, capacity: int) -> Lengths:
    """One sample in a thousand is one to three times the capacity and becomes a pack of its own."""
    giant = rng.integers(capacity, 3 * capacity, num)
    return np.where(rng.random(num) < 0.001, giant, instructions(rng, num, capacity))


BALANCE: dict[str, Draw] = {
    "captions": captions,
    "detection JSON": detections,
    "documents to C/2": short_documents,
    "instruct mix": instructions,
    "documents to C": documents,
    "instruct mix with giants": with_giants,
}


def planned_for_balance(draw: Draw, num_packs: int, capacity: int) -> Plan:
    mean = float(drawn(draw, 10_000, capacity).mean())
    return plan(drawn(draw, round(num_packs * capacity / mean), capacity), config_of("exact", 256, capacity))


def unbalanced(made: Plan) -> Plan:
    return replace(made, config=replace(made.config, packing_balance=False))


def slowest_to_mean(made: Plan) -> float:
    """Over all steps the slowest rank's cost by the mean rank's, from the packs themselves."""
    costs = cost_of_samples(made.lengths[made.members], 0)
    packs = np.bincount(np.repeat(np.arange(len(made)), made.num_samples_per_pack), costs, len(made))
    steps = packs.reshape(-1, made.num_ranks)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())


def report_balance(num_packs: int, ranks: Sequence[int], capacities: Sequence[int]) -> None:
    rows = []
    for capacity in capacities:
        for name, draw in BALANCE.items():
            made = planned_for_balance(draw, num_packs, capacity)
            cells = []
            for num_ranks in ranks:
                aligned = made.align(num_ranks)
                before, after = slowest_to_mean(unbalanced(made).align(num_ranks)), slowest_to_mean(aligned)
                cells.append(f"{before:.3f} -> {after:.3f} ({aligned.balance.floor:.3f})")
            rows.append([str(capacity), name, f"{len(made):,}", str(made.balance.num_giants), *cells])
            note(f"balance of {name}, capacity {capacity}: done")
    columns = ["capacity", "", "packs", "giants", *(f"{num} ranks" for num in ranks)]
    print_table("Slowest rank by mean rank: random order -> `packing_balance` (floor)", columns, rows)


# -- main ---------------------------------------------------------------------------------------------------------


def check_trl_alike(lengths: Lengths, capacity: int) -> None:
    """The tables call TRL's inner function; see that its public one makes the same packs."""
    import datasets
    from trl import pack_dataset

    datasets.disable_progress_bars()
    lengths = lengths[lengths <= capacity]
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
    packs = pack_dataset(rows, capacity, strategy="bfd")["seq_lengths"]
    if [sum(pack) for pack in packs] != run_trl(lengths, capacity).tokens.tolist():
        raise AssertionError("pack_dataset and _pack_bfd differ")
    print(
        f"\ntrl.pack_dataset makes the same {len(packs)} packs of the example lengths as its function called directly."
    )


def print_machine() -> None:
    from importlib.metadata import version

    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "ms-swift", "binpacking", "trl"))
    print(f"Python {platform.python_version()}, {packages}; {os.cpu_count()} cores, {platform.machine()}")


def fitting(lengths: Lengths, capacity: int) -> Lengths:
    return lengths[lengths <= capacity]


def synthetic_sets(num: int) -> dict[str, Callable[[int], Lengths]]:
    return {name: partial(drawn, draw, num) for name, draw in SYNTHETIC.items()}


def drawn(draw: Draw, num: int, capacity: int) -> Lengths:
    return draw(np.random.default_rng(SEED), num, capacity)


def report_all(files: Sequence[Path], *, quick: bool) -> None:
    print_machine()
    check_trl_alike(lengths_in(EXAMPLE)[1], 8192)
    real = {name: partial(fitting, lengths) for name, lengths in map(lengths_in, files)}
    num = 3_000 if quick else 100_000
    report_quality("Real lengths", real)
    report_quality(f"{num:,} synthetic samples", synthetic_sets(num))
    report_against_ms_swift(f"sets of 5 to 3000 samples, {len(SMALL)} kinds", small_set, 30 if quick else 300)
    report_against_ms_swift("sets of 6 to 60 samples", tiny_set, 1_000 if quick else 100_000)
    report_large_windows([1_000, 3_000] if quick else [1_000, 10_000, 100_000])
    report_small_windows(num)
    report_growth([10**3, 10**4] if quick else [10**4, 10**5, 10**6, 10**7], 8192)
    report_balance(*((2_000, [8], [8192]) if quick else (40_000, [8, 64, 1024], [8192, 32768])))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the packing strategies side by side.")
    parser.add_argument("--lengths", nargs="+", type=Path, default=[EXAMPLE], metavar="FILE", help="length files")
    parser.add_argument("--quick", action="store_true", help="small sets, to see that it runs")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("swift_vlpack").setLevel(logging.ERROR)  # the sets with over-long samples would fill the screen
    if options.child:
        method, file, capacity = options.child
        run_child(method, file, int(capacity))
    else:
        report_all(options.lengths, quick=options.quick)


if __name__ == "__main__":
    main()
