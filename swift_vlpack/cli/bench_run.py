"""Measure one phase of `vlpack bench`, in a process that measures nothing else.

`packed`: the length pass on some rows of every source, the loader with several numbers of workers, and training of
packs. `unshared`: training of packs of the same rows, none of which share a prefix. `padded`: the same rows as ms-swift
trains them un-packed. `padding_free`: the same batches without padding, by ms-swift's own collator and the attention of
the packed run. Every part ends after a given time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from swift_vlpack.cli.bench_clock import MOST_PADDED, NUM_WARM, Enough, Laps, StepTimer, loader_speed, memory, say
from swift_vlpack.cli.bench_report import num_cores
from swift_vlpack.config import SAMPLES, PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.feed.choose_attention import choose_attention
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.launch import RunLaunch
from swift_vlpack.host.pipeline import measured_rows, planned_feed
from swift_vlpack.host.proof import prove_isolation
from swift_vlpack.host.run import TrainableRun, instead_of_proof, need_packing, run_of
from swift_vlpack.host.sources import load_sources
from swift_vlpack.host.use_attention import choose_for, use_attention
from swift_vlpack.plan.report import sharing_report, suggested_length
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.rows.samples import Address, SampleError
from swift_vlpack.rows.source import RowSource

PACKED, UNSHARED, PADDING_FREE = "packed", "unshared", "padding_free"
ROWS_TOGETHER = 50
"""Neighbours that are taken together if rows share images, because rows of one image often follow one another."""
NOTHING_BETWEEN = (
    *("--save_strategy", "no", "--eval_strategy", "no"),
    *("--logging_steps", "1000000", "--logging_first_step", "false", "--disable_tqdm", "true"),
    *("--dataloader_persistent_workers", "false"),
)
"""Flags that switch off evaluation, checkpoints and logs, which would fall between the measured steps."""


def measured(args: argparse.Namespace, launch: RunLaunch) -> dict[str, Any]:
    """Measure the phase of these flags of `vlpack bench`."""
    laps = Laps(args.began or time.time())
    laps("imports")
    is_packed = args.phase in (PACKED, UNSHARED)
    most = NUM_WARM + args.steps * (1 if is_packed else MOST_PADDED)
    flags = [
        *launch.flags,
        *NOTHING_BETWEEN,
        "--max_steps",
        str(most),
        *([] if is_packed else _unpacked(launch.config)),
    ]
    if not is_packed or launch.config.packing_batch != SAMPLES:
        flags += ["--gradient_accumulation_steps", "1"]  # a step of one batch; steps that keep their samples need all
    with run_of(flags, num_ranks=1, command=launch.command, kind=TrainableRun) as run:
        found: dict[str, Any] = {"model": run.args.model}
        if is_packed:
            run.make_data = partial(_packed_data, run, args, found, laps)
            run.at_training = partial(_measure_packed, args, found, laps)
        else:
            run.make_data = partial(_unpacked_data, run, args, launch.config)
            run.at_training = partial(_measure_unpacked, args, found, launch.config)
        run.run()
        return {**found, "memory": memory()}


def _unpacked(config: PackingConfig) -> list[str]:
    """Return the flags of the same run by ms-swift alone, which knows no `fusion_config`."""
    sources = read_fusion_config(config.fusion_config).sources if config.fusion_config else ()
    return ["--packing", "false", *(["--dataset", *(spec.dataset for spec in sources)] if sources else [])]


def _packed_data(run: TrainableRun, args: argparse.Namespace, found: dict[str, Any], laps: Laps) -> list[Any]:
    """Measure the length pass and plan, as training would, on some rows of every source."""
    laps("model")
    need_packing(run.args)
    if run.args.streaming:
        raise ConfigError("--streaming true has nothing to plan and no loader that ends; bench the files without it")
    # An empty folder: the length pass is measured as at a first start, when no lengths are remembered.
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder:
        given = packing_config(run.args)
        config = replace(given.without_sharing() if args.phase == UNSHARED else given, packing_cache_dir=folder)
        use_attention(run.model, run.args.attn_impl)
        all_sources, _ = load_sources(run.args, config)
        sources = [some_of(source, args.rows, together=_together(given)) for source in all_sources]
        laps("data")
        say("length pass")
        start = time.perf_counter()
        rows = measured_rows(sources, run.template, run.args, config)
        seconds = time.perf_counter() - start
        laps("lengths")
    feed = planned_feed(rows, run.template, run.args, config)
    laps("plan")
    found["rows_of_run"] = sum(len(source.rows) for source in all_sources)
    found["length_pass"] = _length_pass(rows, seconds, run.args.dataset_num_proc or 1)
    found["plan"] = _about_plan(feed)
    return [feed, None]


def _unpacked_data(run: TrainableRun, args: argparse.Namespace, config: PackingConfig) -> list[Any]:
    """Take the rows of the packed phase for ms-swift's own trainer, which pads them."""
    if args.phase == PADDING_FREE:
        # Not by the flag, for which ms-swift asks for flash-attn: our attention reads the boundaries as well.
        use_attention(run.model, run.args.attn_impl)
        run.template.padding_free = True
    sources, _ = load_sources(run.args, config)
    some = [some_of(source, args.rows, together=_together(config)) for source in sources]
    return [UnpackedRows(FusionCaptionDataset(some, run.template, shuffle=False)), None]


def _measure_packed(args: argparse.Namespace, found: dict[str, Any], laps: Laps, trainer: Any) -> None:
    """Measure the loader alone, then the rest of a start, then training. For `unshared`, measure only training."""
    laps("trainer")
    is_whole = args.phase == PACKED
    if is_whole:
        of_run = found["workers_of_run"] = trainer.args.dataloader_num_workers
        tried = sorted({*workers_to_try(num_cores()), of_run})
        found["loader"] = [loader_speed(trainer, workers) for workers in tried]
        trainer.args.dataloader_num_workers = of_run
        laps.skip()

    def before_step_1(*of: Any, **more: Any) -> None:
        laps("trainer")
        found["attention"] = choose_for(trainer)
        laps("attention")
        if is_whole and trainer.feed.config.packing_verify:
            say("proof")
            prove_isolation(trainer)
            laps("proof")

    instead_of_proof(trainer, before_step_1)
    _measure(args, found, trainer)
    found["start"] = laps.seconds


def _measure_unpacked(args: argparse.Namespace, found: dict[str, Any], config: PackingConfig, trainer: Any) -> None:
    """Measure training of ms-swift's own batches."""
    if args.phase == PADDING_FREE:
        packs: Any = SimpleNamespace(config=config, epoch_plan=None)
        choose_attention(trainer.model, trainer.template, packs)
    _measure(args, found, trainer)


def _measure(args: argparse.Namespace, found: dict[str, Any], trainer: Any) -> None:
    """Train until `StepTimer` has its measurements."""
    timer = StepTimer(trainer, args)
    trainer.training_step = timer
    start = time.perf_counter()
    with suppress(Enough):
        trainer.train()
    found |= {"device": str(trainer.args.device), "measurements": timer.measured()}
    found["seconds"] = round(time.perf_counter() - start, 2)


class UnpackedRows(Dataset[Any]):
    """Encode rows when they are read, and replace a row that cannot be encoded by the next one."""

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
    """Return the numbers of loader workers to measure: none, the powers of two up to the cores, and all cores.

    >>> workers_to_try(1), workers_to_try(6), workers_to_try(8)
    ([0, 1], [0, 1, 2, 4, 6], [0, 1, 2, 4, 8])
    """
    powers = [1 << at for at in range(cores.bit_length()) if 1 << at <= cores]
    return sorted({0, *powers, cores})


def _together(config: PackingConfig) -> int:
    return ROWS_TOGETHER if config.shares_media else 1


def some_of(source: RowSource, num_rows: int, *, together: int = 1) -> RowSource:
    """Take rows from all over a source, because files are often sorted, in groups of `together` neighbours."""
    if len(source.rows) <= num_rows:
        return source
    firsts = np.linspace(0, max(0, len(source.rows) - together), -(-num_rows // together)).astype(np.int64)
    indices = np.unique(firsts[:, None] + np.arange(together))[:num_rows].tolist()
    rows: Any = source.rows
    chosen = rows.select(indices) if hasattr(rows, "select") else [rows[at] for at in indices]
    numbers = [source.row_number(at) for at in indices]
    # Without places: an un-packed run draws from all rows, so steps that keep their samples take the next ones here.
    return replace(source, rows=chosen, row_numbers=numbers, sample_limit=None, places=None)


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
    patches = [int(part.sum()) for part in np.split(plan.patches_of_members, plan.offsets[1:-1])]
    return {
        "packing_length": feed.config.packing_length,
        "packing_batch": feed.config.packing_batch,
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
        **({"share": sharing_report(plan)} if feed.config.shares_media else {}),
    }
