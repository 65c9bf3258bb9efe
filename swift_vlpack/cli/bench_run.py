"""What `vlpack bench` measures of a run, in a process for each phase: its own memory, and nothing left of the other.

`packed`: the length pass on some rows, the loader by workers, and rows of packs. `padded`: the same rows as ms-swift
trains them un-packed. Every part ends by itself after so many seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from swift_vlpack.cli.bench_clock import MOST_PADDED, NUM_WARM, Enough, RowTimer, loader_speed, memory, say
from swift_vlpack.cli.environment import num_cores
from swift_vlpack.config import PackingConfig, checked, chosen_options
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.args import is_ours, packing_config
from swift_vlpack.host.launch import RunLaunch
from swift_vlpack.host.pipeline import measured_rows, planned_feed
from swift_vlpack.host.run import NO_TRACE, NOT_PACKED, TrainableRun, instead_of_proof, run_of
from swift_vlpack.host.sources import load_sources
from swift_vlpack.host.use_attention import choose_for, use_attention
from swift_vlpack.plan.advice import suggested_length
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.rows.samples import Address, SampleError
from swift_vlpack.rows.source import RowSource

ALONE = (
    *("--gradient_accumulation_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"),
    *("--logging_steps", "1000000", "--logging_first_step", "false", "--disable_tqdm", "true"),
)
"""Every row is a step, and nothing comes between them."""


def measured(args: argparse.Namespace, launch: RunLaunch) -> dict[str, Any]:
    """Measure a phase of `vlpack bench` with these flags."""
    is_packed = args.phase == "packed"
    kind: type[BenchRun] = PackedRun if is_packed else PaddedRun
    most = NUM_WARM + args.steps * (1 if is_packed else MOST_PADDED)
    flags = [*launch.flags, *ALONE, "--max_steps", str(most), *([] if is_packed else _unpacked())]
    with run_of(flags, num_ranks=1, command=launch.command, kind=kind) as run:
        run.bench = args
        run.found = {"model": run.args.model}
        run.at_training = run.measure
        run.run()
        return {**run.found, "memory": memory()}


def _unpacked() -> list[str]:
    """What makes it a run of ms-swift alone, which knows no `fusion_config`."""
    path = chosen_options(os.environ).get("fusion_config")
    sources = read_fusion_config(path).sources if path else ()
    return ["--packing", "false", *(["--dataset", *(spec.dataset for spec in sources)] if sources else [])]


class BenchRun(TrainableRun):
    """A run that stops when enough is measured."""

    overridden = (*NO_TRACE, "--dataloader_persistent_workers", "false")
    bench: argparse.Namespace
    """The flags of the command."""
    found: dict[str, Any]

    def measure(self, trainer: Any) -> None:
        """Measure rows."""
        timer = RowTimer(trainer, self.bench)
        trainer.training_step = timer
        start = time.perf_counter()
        with suppress(Enough):
            trainer.train()
        self.found |= {"device": str(trainer.args.device), "rows": timer.measured()}
        self.found["seconds"] = round(time.perf_counter() - start, 2)

    def _some_sources(self, config: PackingConfig) -> list[RowSource]:
        sources, _ = load_sources(self.args, config)
        return [some_of(source, self.bench.rows) for source in sources]


class PackedRun(BenchRun):
    """The run as it is, on some of its rows."""

    def _prepare_dataset(self) -> list[Any]:
        if not is_ours(self.args):
            raise ConfigError(NOT_PACKED)
        if self.args.streaming:
            raise ConfigError(
                "--streaming true has nothing to plan and no loader that ends; bench the files without it"
            )
        with tempfile.TemporaryDirectory(prefix="vlpack-") as folder:  # nothing is remembered: a first start
            config = replace(packing_config(self.args), packing_cache_dir=folder)
            use_attention(self.model, self.args.attn_impl)
            sources = self._some_sources(config)
            say("length pass")
            start = time.perf_counter()
            rows = measured_rows(sources, self.template, self.args, config)
            seconds = time.perf_counter() - start
        feed = planned_feed(rows, self.template, self.args, config)
        self.found |= {
            "length_pass": _length_pass(rows, seconds, self.args.dataset_num_proc or 1),
            "plan": _about_plan(feed),
            "accumulation": self.args.gradient_accumulation_steps,
        }
        return [feed, None]

    def measure(self, trainer: Any) -> None:
        """Measure the loader first, while nothing else runs; then rows, by the attention that would be chosen."""
        self.found["workers_of_run"] = trainer.args.dataloader_num_workers
        self.found["loader"] = [loader_speed(trainer, workers) for workers in workers_to_try(num_cores())]
        trainer.args.dataloader_num_workers = self.found["workers_of_run"]
        # The proof is not what is measured.
        instead_of_proof(trainer, lambda *args, **kwargs: self.found.update(attention=choose_for(trainer)))
        super().measure(trainer)


class PaddedRun(BenchRun):
    """ms-swift's own batches of the same rows, by its own trainer."""

    def _prepare_dataset(self) -> list[Any]:
        sources = self._some_sources(checked(chosen_options(os.environ)))
        return [UnpackedRows(FusionCaptionDataset(sources, self.template, shuffle=False)), None]


class UnpackedRows(Dataset[Any]):
    """Rows, each encoded when it is asked for; in place of one that cannot be, the next."""

    def __init__(self, rows: FusionCaptionDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Any:
        for further in range(len(self)):
            sample = self.rows.sample_or_error(Address(*self.rows.schedule[(position + further) % len(self)]))
            if not isinstance(sample, SampleError):
                return sample
        raise DataError("not one row could be encoded")


def workers_to_try(cores: int) -> list[int]:
    """None, and powers of two up to the cores.

    >>> workers_to_try(1), workers_to_try(6), workers_to_try(8)
    ([0, 1], [0, 1, 2, 4, 6], [0, 1, 2, 4, 8])
    """
    powers = [1 << at for at in range(cores.bit_length()) if 1 << at <= cores]
    return sorted({0, *powers, cores})


def some_of(source: RowSource, num_rows: int) -> RowSource:
    """Rows from all over a source."""
    if len(source.rows) <= num_rows:
        return source
    indices = np.unique(np.linspace(0, len(source.rows) - 1, num_rows).astype(np.int64)).tolist()
    rows: Any = source.rows
    chosen = rows.select(indices) if hasattr(rows, "select") else [rows[at] for at in indices]
    return replace(source, rows=chosen, row_numbers=[source.row_number(at) for at in indices], sample_limit=None)


def _length_pass(rows: FusionCaptionDataset, seconds: float, processes: int) -> dict[str, Any]:
    num_rows = sum(len(source.rows) for source in rows.sources)
    return {
        "rows": num_rows,
        "seconds": round(seconds, 3),
        "rows_per_second": round(num_rows / seconds, 1),
        "processes": processes,
    }


def _about_plan(feed: Any) -> dict[str, Any]:
    plan, lengths = feed.epoch_plan.packs, feed.epoch_plan.lengths
    lengths = lengths[lengths > 0]
    patches = [int(feed.epoch_plan.patches[plan[number]].sum()) for number in range(len(plan))]
    return {
        "packing_length": feed.config.packing_length,
        "packs": len(plan),
        "mean_fill": round(float(plan.mean_fill), 4),
        "mean_length": round(float(lengths.mean()), 1),
        "longest": int(lengths.max()),
        "suggested_length": suggested_length(lengths),
        "patches_per_pack": {
            "median": int(np.median(patches)),
            "p95": int(np.percentile(patches, 95)),
            "max": max(patches),
        },
        "has_caps": feed.config.has_caps,
    }
