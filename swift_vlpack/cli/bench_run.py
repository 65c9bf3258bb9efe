"""Measure one run of `vlpack bench`, in a process that measures nothing else.

Packed ways train as `vlpack sft` does. `padded` trains the same rows as ms-swift does un-packed, and `padding_free` the
same batches without padding, by ms-swift's own collator and the attention of a packed run.
"""

from __future__ import annotations

import argparse
import logging
import platform
import resource
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from swift_vlpack.attention import attention
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.feed.choose_attention import choose_attention, compare_kernels
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.launch import RunLaunch
from swift_vlpack.host.pipeline import measured_rows, planned_feed
from swift_vlpack.host.proof import attention_of
from swift_vlpack.host.run import TrainableRun, need_packing, run_of
from swift_vlpack.host.run_flags import given_options
from swift_vlpack.host.same_on_ranks import versions
from swift_vlpack.host.sources import load_sources
from swift_vlpack.host.use_attention import use_attention
from swift_vlpack.plan.report import sharing_report
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.rows.samples import Address, SampleError
from swift_vlpack.rows.source import RowSource

UNPACKED = ("padded", "padding_free")
WARM = 2
"""Steps before the measured ones: they choose kernels and allocate memory, and waits are counted in the last."""
TOGETHER = 20
"""Neighbours that are taken together, because rows of one image often follow one another."""
NOTHING_BETWEEN = (
    *("--save_strategy", "no", "--eval_strategy", "no"),
    *("--logging_steps", "1000000", "--logging_first_step", "false", "--disable_tqdm", "true"),
    *("--dataloader_persistent_workers", "false"),
)
"""Flags that switch off evaluation, checkpoints and logs, which would fall between the measured steps."""
OF_TRAINING = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "tuner_type"),
    *("gradient_checkpointing", "dataloader_num_workers"),
)
"""Options of ms-swift that the report names."""
OF_THE_WAY = ("packing", "packing_batch", "packing_share")
"""Options of packing that each way sets."""


class NothingShared(Exception):
    """Ends the run that shares media before it trains, if none of its rows share."""


def measured(args: argparse.Namespace, launch: RunLaunch) -> dict[str, Any]:
    """Train in the way of these flags of `vlpack bench`, and return what was measured."""
    flags = [*launch.flags, *NOTHING_BETWEEN, "--max_steps", str(WARM + args.steps)]
    if args.phase in UNPACKED:
        flags += _unpacked(launch.config)
    with run_of(flags, num_ranks=1, command=launch.command, kind=TrainableRun) as run:
        found: dict[str, Any] = {}
        if args.phase in UNPACKED:
            run.make_data = partial(_unpacked_data, run, args, launch.config)
        else:
            run.make_data = partial(_packed_data, run, args, launch, found)
        run.at_training = partial(_train, args, launch.config, found)
        try:
            with ProofsSaid() as proofs:
                run.run()
        except NothingShared:
            return {"did_not_run": "no two rows share media"}
        if "about" in found:
            found["about"]["proofs"] = proofs.lines
        return found


def _unpacked(config: PackingConfig) -> list[str]:
    """Return the flags of the same run by ms-swift alone, which knows no `fusion_config`."""
    sources = read_fusion_config(config.fusion_config).sources if config.fusion_config else ()
    return ["--packing", "false", *(["--dataset", *(spec.dataset for spec in sources)] if sources else [])]


def _packed_data(run: TrainableRun, args: argparse.Namespace, launch: RunLaunch, found: dict[str, Any]) -> list[Any]:
    """Measure lengths and plan, as training would at a first start, on some rows of every source."""
    need_packing(run.args)
    if run.args.streaming:
        raise ConfigError("--streaming true has no rows to train in turns; bench the files without it")
    use_attention(run.model, run.args.attn_impl)
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder:
        config = replace(packing_config(run.args), packing_cache_dir=folder)
        sources, _ = load_sources(run.args, config)
        some = [some_of(source, args.rows) for source in sources]
        rows = measured_rows(some, run.template, run.args, config)
    feed = planned_feed(rows, run.template, run.args, config)
    if config.shares_media and not sharing_report(feed.epoch_plan.packs)["num_units"]:
        raise NothingShared
    found["about"] = _about(run.model, config, sum(len(source.rows) for source in some))
    given = given_options(launch.flags)
    found["about"]["options"] |= {name: given[name] for name in OF_TRAINING if name in given}
    return [feed, None]


def _unpacked_data(run: TrainableRun, args: argparse.Namespace, config: PackingConfig) -> list[Any]:
    """Take the rows of the packed runs for ms-swift's own trainer."""
    if args.phase == "padding_free":
        # Not by the flag, for which ms-swift asks for flash-attn: our attention reads the boundaries as well.
        use_attention(run.model, run.args.attn_impl)
        run.template.padding_free = True
    sources, _ = load_sources(run.args, config)
    some = [some_of(source, args.rows) for source in sources]
    return [UnpackedRows(FusionCaptionDataset(some, run.template, shuffle=False)), None]


def _train(args: argparse.Namespace, config: PackingConfig, found: dict[str, Any], trainer: Any) -> None:
    """Train until the last step, or until time is up."""
    if args.phase == "padding_free":
        packs: Any = SimpleNamespace(config=config, epoch_plan=None)
        choose_attention(trainer.model, trainer.template, packs)
    clock = Clock(trainer, until=args.until)
    say(f"training, {args.phase}")
    trainer.train()
    found |= {**clock.measured(args.began), "peak_bytes": peak_bytes()}
    if "about" not in found:
        return
    found["about"]["model"]["attention"] = name = attention_of(trainer)
    if name == attention.NAME:
        say("comparing kernels with the reference")
        context = trainer.compute_loss_context_manager
        found["about"]["kernels"] = compare_kernels(trainer.model, trainer.template, trainer.feed.packs, context)


class ProofsSaid(logging.Handler):
    """Keep the lines in which a packed run says which attention it trains with, and what its proofs have shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of a proof."""
        if (said := record.getMessage()).startswith(("attention ", "isolation ")):
            self.lines.append(said)

    def __enter__(self) -> ProofsSaid:
        self._logger = logging.getLogger("swift")
        self._level_before = self._logger.level
        self._logger.setLevel(logging.INFO)  # its other handler, of the terminal, keeps its own level
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)


class Clock(TrainerCallback):
    """Note when steps end, count what they train, and how long they wait: for data, and on a GPU for the device."""

    def __init__(self, trainer: Any, until: float) -> None:
        self._until = until
        self._trainer = trainer
        self._train_batch, self._take_batches = trainer.training_step, trainer.get_batch_samples
        self._ends: list[float] = []
        """Times at which steps ended; that of a step in the middle is not waited for on a GPU."""
        self._sizes: list[list[tuple[Any, Any]]] = [[]]
        """Tokens and samples of the batches of each step, and of the step that has begun."""
        self._loading: list[float] = [0.0]
        """Seconds in which each step, and the step that has begun, waited for its batches."""
        self._waits = ExitStack()
        self._of_device: list[warnings.WarningMessage] | None = None
        trainer.training_step, trainer.get_batch_samples = self._counted, self._loaded
        trainer.add_callback(self)

    def _loaded(self, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        try:
            return self._take_batches(*args, **kwargs)
        finally:
            self._loading[-1] += time.time() - began

    def _counted(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(inputs, tuple):  # all sequences of a step: the trainer calls this again for each of them
            self._sizes[-1].append(sizes_of(inputs))
        return self._train_batch(model, inputs, *args, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time. Ends training after the last step, or after the first measured one that ends too late."""
        num_steps = len(self._ends) + 1
        is_late = num_steps > WARM and time.time() > self._until
        if num_steps == WARM:
            self._waits.close()
        if args.device.type == "cuda" and (is_late or num_steps in (1, WARM, state.max_steps)):
            torch.cuda.synchronize()
        if num_steps == 1:
            self._trainer.first_batches = None  # the proof would look again, in a step that is measured
        if args.device.type == "cuda" and num_steps == 1:
            self._of_device = self._waits.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._waits.callback(torch.cuda.set_sync_debug_mode, "default")
        self._ends.append(time.time())
        self._sizes.append([])
        self._loading.append(0.0)
        control.should_training_stop = control.should_training_stop or is_late

    def measured(self, began: float) -> dict[str, Any]:
        """Sum up the steps after those that warm up."""
        sizes = [one for of_step in self._sizes[WARM:-1] for one in of_step]
        waits = self._of_device
        return {
            "seconds_to_step_1": self._ends[0] - began,
            "steps": len(self._ends) - WARM,
            "seconds": self._ends[-1] - self._ends[WARM - 1],
            "seconds_loading": sum(self._loading[WARM:-1]),
            "host_waits": None if waits is None else sum("synchronizing CUDA" in str(one.message) for one in waits),
            "tokens": sum(int(tokens) for tokens, _ in sizes),
            "samples": sum(int(samples) for _, samples in sizes),
        }


def sizes_of(inputs: Any) -> tuple[Any, Any]:
    """Count tokens without padding, and samples, of a batch. Tensors are returned unread: no step waits for them.

    If rows share a prefix, its tokens are counted for each row: all of them are trained on it.
    """
    if (record := getattr(inputs, "record", None)) is not None:
        return sum(record.lengths), len(record.lengths)
    tokens, mask = inputs["input_ids"], inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask.sum(), tokens.shape[0]
    positions = inputs.get("text_position_ids", inputs.get("position_ids"))
    return tokens.numel(), tokens.shape[0] if positions is None else (positions == 0).sum()  # a batch without padding


def peak_bytes() -> int:
    """Return the peak memory of the GPU; on the CPU, that of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _about(model: Any, config: PackingConfig, num_rows: int) -> dict[str, Any]:
    """Describe the run without paths, and without names of machines or data, so that it can be published."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    found: dict[str, Any] = {
        "versions": {**versions(), "torch": torch.__version__, "python": platform.python_version()},
        "device": {"name": model.device.type, "bytes": None}
        if gpu is None
        else {"name": gpu.name, "bytes": gpu.total_memory},
        "model": {
            "type": model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "rows": num_rows,
        "options": options_to_publish(config),
    }
    say(f"{', '.join(map(' '.join, found['versions'].items()))}, on {found['device']['name']}")
    return found


def options_to_publish(config: PackingConfig) -> dict[str, Any]:
    """Return the options that are not at their default, without texts of the user's own, which may be paths."""
    choices = {spec.name: spec.metadata["choices"] for spec in fields(config)}
    kept = {name: value for name, value in config.changed().items() if name not in OF_THE_WAY}
    return {name: value for name, value in kept.items() if not isinstance(value, str) or value in choices[name]}


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


def some_of(source: RowSource, num_rows: int) -> RowSource:
    """Take rows from all over a source, because files are often sorted, in groups of neighbours."""
    if len(source.rows) <= num_rows:
        return source
    together = min(TOGETHER, num_rows)
    firsts = np.linspace(0, len(source.rows) - together, -(-num_rows // together)).astype(np.int64)
    indices = np.unique(firsts[:, None] + np.arange(together))[:num_rows].tolist()
    rows: Any = source.rows
    chosen = rows.select(indices) if hasattr(rows, "select") else [rows[at] for at in indices]
    numbers = [source.row_number(at) for at in indices]
    # Without places: an un-packed run draws from all rows, so steps that keep their samples take the next ones here.
    return replace(source, rows=chosen, row_numbers=numbers, sample_limit=None, places=None)


def say(what: str) -> None:
    """Show progress on stderr, because stdout has the report alone."""
    print(f"vlpack bench: {what}", file=sys.stderr, flush=True)
