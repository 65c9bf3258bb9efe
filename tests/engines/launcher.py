"""Train tiny models by the engines of ms-swift's users, each on ranks of this machine over gloo.

    outcomes = train_all("zero3", [Training("full", model, "qwen2_5_vl", {"max_steps": 10})], folder)
    outcomes["full"].steps       [(loss, grad_norm), ...]
    outcomes["full"].notes       what tests/plugins/engine_on_cpu.py noted on each rank

A run is of no worth if its engine is not in force: under `--use_cpu true` accelerate makes plain DDP of `--fsdp fsdp2`
without a word. So notes and steps are only had of a run in which each rank held its own part, and no more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swift_vlpack.host.launch import plugin_path
from tests.e2e.ranks import ROOT, Processes, free_port
from tests.host.runs import SMALL_VOCABULARY, argv, log_lines

ENGINES = ("zero2", "zero3", "fsdp2")
"""Each is compared with DDP."""
PLUGIN = ROOT / "tests" / "plugins" / "engine_on_cpu.py"
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    # ms-swift asks for this flag with FSDP2, whose JSON checkpoints activations in a way of its own.
    "fsdp2": {"fsdp": "fsdp2", "gradient_checkpointing": "false"},
}
"""What a user adds for an engine."""
Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Training:
    """A run to train: flags without those of the engine, and packing options."""

    name: str
    model: Path
    family: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    engine: str
    output: Path
    num_ranks: int

    @property
    def error(self) -> str | None:
        """The traceback of the first rank that raised."""
        paths = sorted(self.output.glob("error_rank*.txt"))
        return paths[0].read_text() if paths else None

    @property
    def notes(self) -> list[dict[str, Any]]:
        """What each rank noted. Fails unless the engine was in force."""
        assert self.error is None, self.error
        paths = [self.output / f"engine_rank{rank}.json" for rank in range(self.num_ranks)]
        notes = [json.loads(path.read_text()) for path in paths]
        for note in notes:
            assert_in_force(self.engine, note, self.num_ranks)
        return notes

    @property
    def log(self) -> list[dict[str, Any]]:
        """The log lines of its steps. Fails unless the engine was in force."""
        assert self.notes
        return [line for line in log_lines(self.output) if "grad_norm" in line]

    @property
    def steps(self) -> Steps:
        """Loss and gradient norm of each step; of DDP, the norm in float64. Fails unless the engine was in force."""
        norms = self.notes[0]["norms"] or [line["grad_norm"] for line in self.log]
        return [(line["loss"], norm) for line, norm in zip(self.log, norms, strict=True)]


def assert_in_force(engine: str, note: Mapping[str, Any], num_ranks: int) -> None:
    """Fail unless this rank held its part of the model, or of the optimizer, and no more."""
    assert note["engine"] == engine
    everything, held, trained = (note[name] for name in ("num_numbers", "num_numbers_held", "num_numbers_trained"))
    # Parts of equal size are padded, by a few numbers for each parameter.
    padding = num_ranks * note["num_parameters"]
    if engine == "fsdp2":
        assert note["num_dtensors"] == note["num_parameters"] > 0, "some parameters are no DTensors: this is not FSDP2"
    if engine == "zero3":
        assert note["num_with_ds_id"] == note["num_parameters"] > 0, "some parameters have no `ds_id`: not ZeRO-3"
        assert note["num_large_partitioned"] == note["num_large"] > 0, "parameters are whole: this is not ZeRO-3"
    if engine in ("fsdp2", "zero3"):
        assert held <= everything / num_ranks + padding, f"a rank holds {held:,} of {everything:,} numbers"
    else:
        assert (note["num_dtensors"], note["num_with_ds_id"], held) == (0, 0, everything)
    if engine == "ddp":
        assert (note["model"], note["num_states_held"]) == ("DistributedDataParallel", trained)
    else:
        assert 0 < note["num_states_held"] <= trained / num_ranks + padding, f"the optimizer is whole: not {engine}"


def assert_same_steps(found: Steps, expected: Steps) -> None:
    """Fail unless losses are within 1e-5, and gradient norms within 1e-5 of their size."""
    for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other_loss, abs=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-5)


def engine_flags(engine: str, model: Path, family: str, output: Path, **options: Any) -> list[str]:
    """Flags of a small run under an engine, on CPUs over gloo; `options` win."""
    plugins = [plugin_path(), SMALL_VOCABULARY, PLUGIN]
    ours = {"packing": "true", "external_plugins": plugins, "callbacks": "engine_notes"}
    ours |= {"ddp_backend": "gloo", "use_cpu": "true"}
    return argv(model, family, output, **{**ours, **FLAGS[engine], **options})


def engine_variables(engine: str) -> dict[str, str]:
    """Variables that a process under an engine needs on CPUs, beside the plugin."""
    return {"TEST_ENGINE": engine, "DS_ACCELERATOR": "cpu"}


def train_all(
    engine: str, trainings: Iterable[Training], folder: Path, *, num_ranks: int = 2, timeout_seconds: float = 600
) -> dict[str, Outcome]:
    """Train runs one after the other, in the same processes. Returns what became of each, by name."""
    runs = []
    for one in trainings:
        output = folder / engine / one.name
        output.mkdir(parents=True)
        flags = list(map(str, engine_flags(engine, one.model, one.family, output, **one.flags)))
        runs.append({"name": one.name, "output": str(output), "flags": flags, "options": dict(one.options)})
    listed = folder / engine / f"{runs[0]['name']}_and_more.json"
    listed.write_text(json.dumps(runs))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", num_ranks]
    launch += ["--master_port", free_port(), "-m", "tests.engines.worker", listed]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLPACK_")}
    processes = Processes(launch, {**clean, **engine_variables(engine)}, listed.with_suffix(".txt"))
    assert processes.wait(timeout_seconds) == 0, processes.output[-4000:]
    return {run["name"]: Outcome(engine, Path(run["output"]), num_ranks) for run in runs}
