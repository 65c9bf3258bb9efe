"""Measure planning, and the all-reduce of buffer mode, for many ranks; prints the tables of docs/scale.md.

    python -m benchmarks.scale                                    # 1e6 lengths drawn from the example, 6 minutes
    python -m benchmarks.scale --lengths captions.json --strategies exact
    python -m benchmarks.scale --quick                            # 2e4 lengths, 2 processes: seconds

Every plan is made in a fresh process, as a rank makes it: from all lengths, alone. What is simulated is only how many
such ranks there are. The all-reduce is real, between processes of this machine; beyond them it is extrapolated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.strategies import EXAMPLE, SEED, lengths_in, memory_now, note, print_table, timed, unbalanced
from swift_vlpack.config import PackingConfig
from swift_vlpack.envelope import differing_fields
from swift_vlpack.plan.mix import schedule
from swift_vlpack.plan.planner import plan

CAPACITY = 8192
STAGES = ("schedule", "plan", "align", "digest", "balance")
STEP_SECONDS = (0.005, 0.05)
EXTRAPOLATED_RANKS = (64, 1024, 8192)

# -- the plan of one rank -----------------------------------------------------------------------------------------


class Stages:
    """Processor seconds of each stage, and the most memory that any of them held."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak = 0

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
        result, self.seconds[name] = timed(work)
        self.peak = max(self.peak, memory_now("VmHWM"))
        return result


def run_plan_child(file: str, strategy: str, num_ranks: int) -> None:
    """Do in this fresh process what a rank does at the start of an epoch, and print what it took."""
    config = PackingConfig(packing_length=CAPACITY, packing_strategy=strategy)
    plan(np.full(2000, 300), config).align(2)  # imports and caches
    before = memory_now("VmRSS")
    lengths = np.load(file)
    stages = Stages()
    order = stages.run("schedule", lambda: schedule([("data", len(lengths))], seed=0, epoch=0))
    made = stages.run("plan", lambda: plan(lengths[order.row], config, label=None))
    aligned = stages.run("align", lambda: made.align(num_ranks))
    stages.run("digest", aligned.digest)
    balance = stages.run("balance", lambda: aligned.balance)
    peak = stages.peak - before
    num_cut = int((aligned.num_samples_per_pack > 0).sum()) - len(made)
    arrays = (lengths, order.source, order.row, aligned.lengths, aligned.members, aligned.offsets)
    answer = {
        "seconds": stages.seconds,
        "peak": peak,
        "held": sum(array.nbytes for array in arrays),
        "num_packs": len(made),
        "num_steps": aligned.num_packs_per_rank,
        "num_cut": num_cut,
        "num_empty": aligned.num_empty,
        "balance": balance.slowest_to_mean,
        "floor": balance.floor,
        "unbalanced": unbalanced(made).align(num_ranks).balance.slowest_to_mean,
        "method": aligned.method,
    }
    print(json.dumps(answer))


def planned_in_child(lengths: NDArray[np.int32], strategy: str, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, lengths)
        command = [sys.executable, "-m", "benchmarks.scale", "--child", str(file), strategy, str(num_ranks)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def report_plans(files: Sequence[Path], strategies: Sequence[str], num_samples: int, ranks: Sequence[int]) -> None:
    costs, steps = [], []
    for name, known in map(lengths_in, files):
        lengths = np.random.default_rng(SEED).choice(known, num_samples).astype(np.int32)
        for strategy in strategies:
            for num_ranks in ranks:
                cell = planned_in_child(lengths, strategy, num_ranks)
                note(f"{name}, {strategy}, {num_ranks} ranks: {sum(cell['seconds'].values()):.1f} s")
                row = [name, f"`{strategy}`", f"{num_ranks:,}"]
                seconds = [f"{cell['seconds'][stage]:.2f}" for stage in STAGES]
                costs.append([*row, *seconds, f"{cell['peak'] / 2**20:,.0f}", f"{cell['held'] / 2**20:,.0f}"])
                lost = cell["num_packs"] % num_ranks
                steps.append(
                    [
                        *row,
                        *(f"{cell[key]:,}" for key in ("num_packs", "num_steps", "num_cut", "num_empty")),
                        f"{cell['unbalanced']:.3f} -> {cell['balance']:.3f} ({cell['floor']:.3f})",
                        f"{lost:,} ({100 * lost / cell['num_packs']:.2f} %)",
                    ]
                )
    what = f"{num_samples:,} lengths, capacity {CAPACITY}"
    columns = ["lengths", "strategy", "ranks"]
    print_table(
        f"{what}: processor seconds on one rank, MiB at the peak and kept",
        [*columns, *STAGES, "peak", "kept"],
        costs,
    )
    print_table(
        f"{what}: steps. Slowest rank by mean rank: random order -> `packing_balance` (floor)",
        [*columns, "packs", "steps a rank", "cut in two", "empty", "slowest/mean", "flooring would lose"],
        steps,
    )


# -- ranks agree --------------------------------------------------------------------------------------------------


def grid_of(num_ranks: int) -> tuple[int, int]:
    """The two factors that are closest to each other, the smaller first."""
    rows = next(rows for rows in range(int(num_ranks**0.5), 0, -1) if num_ranks % rows == 0)
    return rows, num_ranks // rows


def num_hops(*group_sizes: int) -> int:
    """Messages that follow one another: a ring passes one small number round twice."""
    return sum(2 * (size - 1) for size in group_sizes)


def run_rank(rank: int, num_ranks: int, folder: str, num_calls: int, num_steps: int) -> None:
    """One process of the group; rank 0 writes what was measured."""
    import torch
    import torch.distributed as dist

    from swift_vlpack.host.ranks import gathered

    torch.set_num_threads(1)
    start = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    found = {"init": time.perf_counter() - start, "num_files": len(os.listdir("/proc/self/fd"))}
    number = torch.ones(1, dtype=torch.int64)

    def seconds_of(call: Callable[[], Any], num: int) -> NDArray[np.float64]:
        """Of each call the slowest rank's seconds."""
        for _ in range(num // 10):
            call()
        seconds = torch.zeros(num, dtype=torch.float64)
        for i in range(num):
            start = time.perf_counter()
            exposed = call()
            seconds[i] = time.perf_counter() - start if exposed is None else exposed
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.numpy()

    def plainly() -> None:
        number.fill_(1)
        dist.all_reduce(number)
        if number.item() != num_ranks:
            raise AssertionError(f"{num_ranks} ranks counted {number.item()}")

    def behind_a_step(step: float) -> float:
        number.fill_(1)
        work = dist.all_reduce(number, async_op=True)
        time.sleep(step)  # the host waits for its device
        start = time.perf_counter()
        work.wait()
        return time.perf_counter() - start

    rows, columns = grid_of(num_ranks)
    groups = [dist.new_group([row * columns + column for column in range(columns)]) for row in range(rows)]
    my_row = groups[rank // columns]
    groups = [dist.new_group([row * columns + column for row in range(rows)]) for column in range(columns)]
    my_column = groups[rank % columns]

    def in_a_grid() -> None:
        number.fill_(1)
        dist.all_reduce(number, group=my_row)
        dist.all_reduce(number, group=my_column)
        if number.item() != num_ranks:
            raise AssertionError(f"{num_ranks} ranks in a grid counted {number.item()}")

    facts = dict.fromkeys(("plan", "config", "lengths"), f"{rank:016x}")
    measured = {
        "plain": seconds_of(plainly, num_calls),
        "grid": seconds_of(in_a_grid, num_calls),
        **{f"behind {step}": seconds_of(partial(behind_a_step, step), num_steps) for step in STEP_SECONDS},
        "gather": seconds_of(lambda: gathered(facts) and None, max(10, num_calls // 10)),
    }
    if rank == 0:
        found |= {
            name: [float(np.median(seconds)), float(np.percentile(seconds, 99))] for name, seconds in measured.items()
        }
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured_between(num_processes: int, num_calls: int, num_steps: int) -> dict[str, Any]:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        args = (num_processes, folder, num_calls, num_steps)
        mp.start_processes(run_rank, args, nprocs=num_processes, start_method="fork")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def seconds_to_compare(num_ranks: int) -> float:
    """What a rank does with the facts of all others once it has them."""
    facts = {"plan": "0" * 16, "config": "0" * 16, "lengths": "0" * 16}
    received = [pickle.dumps(facts)] * num_ranks
    start = time.perf_counter()
    if any(differing_fields(facts, pickle.loads(other)) for other in received):
        raise AssertionError("equal facts differ")
    return time.perf_counter() - start


def milliseconds(pair: Sequence[float]) -> str:
    return " / ".join(f"{1000 * seconds:.2f}" for seconds in pair)


def report_agreement(processes: Sequence[int], num_calls: int, num_steps: int) -> None:
    found = {}
    for num in processes:
        found[num] = measured_between(num, num_calls, num_steps)
        note(f"all-reduce between {num} processes: done")
    per_hop = {num: cell["plain"][0] / num_hops(num) for num, cell in found.items()}
    steps = [f"left after {1000 * step:.0f} ms" for step in STEP_SECONDS]
    print_table(
        f"Measured: one int64, gloo over loopback, milliseconds of the slowest rank, median / 99th percentile; "
        f"{num_calls:,} calls, {num_steps} steps",
        [
            "processes",
            "messages in a row",
            "all-reduce",
            "us a message",
            *steps,
            "in a grid",
            "gather",
            "start, s",
            "open files",
        ],
        [
            [
                str(num),
                str(num_hops(num)),
                milliseconds(cell["plain"]),
                f"{1e6 * per_hop[num]:.0f}",
                *(milliseconds(cell[f"behind {step}"]) for step in STEP_SECONDS),
                milliseconds(cell["grid"]),
                milliseconds(cell["gather"]),
                f"{cell['init']:.2f}",
                str(cell["num_files"]),
            ]
            for num, cell in found.items()
        ],
    )
    low, high = min(per_hop.values()), max(per_hop.values())
    print_table(
        f"Extrapolated from {1e6 * low:.0f} to {1e6 * high:.0f} us a message and one open file a rank",
        [
            "ranks",
            "messages in a row",
            "all-reduce, ms",
            "open files",
            "messages in a grid",
            "comparing the facts of all, ms (measured)",
        ],
        [
            [
                f"{num:,}",
                f"{num_hops(num):,}",
                f"{1000 * low * num_hops(num):,.0f} to {1000 * high * num_hops(num):,.0f}",
                f"{num + found[processes[-1]]['num_files'] - processes[-1]:,}",
                "{} ({} x {})".format(num_hops(*grid_of(num)), *grid_of(num)),
                f"{1000 * seconds_to_compare(num):.1f}",
            ]
            for num in EXTRAPOLATED_RANKS
            if num > max(processes)
        ],
    )


# -- main ---------------------------------------------------------------------------------------------------------


def print_machine() -> None:
    from importlib.metadata import version

    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch"))
    print(f"Python {platform.python_version()}, {packages}; {os.cpu_count()} cores, {platform.machine()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure planning and agreeing for many ranks.")
    parser.add_argument("--lengths", nargs="+", type=Path, default=[EXAMPLE], metavar="FILE", help="length files")
    parser.add_argument("--strategies", nargs="+", default=["exact", "binpack"])
    parser.add_argument("--num_samples", type=int, default=10**6, help="lengths drawn from each file")
    parser.add_argument("--ranks", nargs="*", type=int, default=[64, 1024])
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4, 8, 16, 32, 64], help="for the all-reduce")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("swift_vlpack").setLevel(logging.ERROR)
    if options.child:
        file, strategy, num_ranks = options.child
        run_plan_child(file, strategy, int(num_ranks))
        return
    print_machine()
    num_samples, processes = (20_000, [2]) if options.quick else (options.num_samples, options.processes)
    if options.ranks:
        report_plans(options.lengths, options.strategies, num_samples, options.ranks)
    if processes:
        report_agreement(processes, *((100, 20) if options.quick else (1000, 100)))


if __name__ == "__main__":
    main()
