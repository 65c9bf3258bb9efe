"""Train 50 steps that keep their samples beside plain `swift sft`, un-packed: `make same-steps`.

Every case is trained three times, each by the real command line: plain, plain with its batch size and its accumulation
exchanged, and packed with `packing_batch=samples`. The exchanged run has the same steps, so its weights say how far
rounding alone leads. The samples of every step, the number of steps, learning rates and `eval_loss` have to be equal;
the script ends with an error where something is not as the table promises.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.config import ENV_PREFIX
from swift_vlpack.host.launch import plugin_path
from tests.e2e.ranks import ROOT, free_port
from tests.host.runs import SMALL_VOCABULARY, argv, log_lines
from tests.host.same_steps import (
    OPTIONS,
    RECORDER,
    curve,
    eval_losses,
    held_out_rows,
    largest_differences,
    largest_gap,
    numbered_rows,
    packed_steps,
    unpacked_steps,
    weights,
)
from tests.tiny import save_model, save_text_model

NUM_STEPS, NUM_EPOCHS = 50, 2
NUM_VALIDATION_ROWS = 7
TEXT_MODEL = "qwen2"
TOO_LONG = (3, 40)
"""Rows of the text model that are longer than `max_length`, and deleted by plain before it draws."""
LARGEST_RELATIVE = 1e-5
"""Of loss and gradient norm, over all steps."""
TIMES_OF_ITSELF = 3
"""Largest gap of the weights at the end, as a multiple of the gap between the two plain runs."""
LEAST_GAP = 1e-6
"""Taken for the gap between the plain runs where they are nearer to each other, or cannot be compared."""
LORA = {"tuner_type": "lora", "lora_dropout": 0}
PLAIN, EXCHANGED, PACKED = KINDS = ("plain", "exchanged", "packed")


class Case(NamedTuple):
    """A recipe."""

    family: str
    num_ranks: int
    batch_size: int
    accumulation: int
    says: str
    flags: dict[str, Any]

    @property
    def num_samples(self) -> int:
        """Samples of a step, over all ranks."""
        return self.batch_size * self.accumulation * self.num_ranks

    @property
    def num_rows(self) -> int:
        """Rows of which the last step of an epoch has one too few; an odd number, which two ranks cannot share."""
        return NUM_STEPS // NUM_EPOCHS * self.num_samples - 1

    @property
    def can_be_exchanged(self) -> bool:
        """Whether plain training has the same steps with batch size and accumulation exchanged."""
        return "group_by_length" not in self.flags  # which sorts by the batch size


FULL, TOWER = {}, {"freeze_vit": "false", "freeze_aligner": "false"}
NOT_CHECKPOINTED = {"gradient_checkpointing": "false"}
CASES = (
    Case("qwen2_5_vl", 1, 1, 4, "full", FULL),
    Case("qwen2_5_vl", 1, 2, 4, "LoRA", LORA),
    Case("qwen2_5_vl", 1, 3, 4, "full, not checkpointed", NOT_CHECKPOINTED),
    Case("qwen2_5_vl", 2, 2, 1, "LoRA, not checkpointed", {**LORA, **NOT_CHECKPOINTED}),
    Case("qwen2_5_vl", 2, 1, 4, "full, with the tower", TOWER),
    Case("qwen2_5_vl", 2, 2, 3, "LoRA", LORA),
    Case("qwen3_vl", 1, 4, 1, "LoRA", LORA),
    Case("qwen3_vl", 1, 2, 4, "full, with the tower", TOWER),
    Case("qwen3_vl", 1, 4, 3, "LoRA, not checkpointed", {**LORA, **NOT_CHECKPOINTED}),
    Case("qwen3_vl", 2, 1, 2, "full", FULL),
    Case("qwen3_vl", 2, 4, 1, "LoRA", LORA),
    Case("qwen3_vl", 2, 3, 2, "full, not checkpointed", NOT_CHECKPOINTED),
    Case(TEXT_MODEL, 1, 2, 4, "rows that plain deletes", FULL),
    Case(TEXT_MODEL, 2, 1, 4, "rows that plain deletes", FULL),
    Case("qwen2_5_vl", 1, 4, 2, "`--group_by_length`", {"group_by_length": "true"}),
    Case("qwen2_5_vl", 2, 2, 2, "`--group_by_length`", {"group_by_length": "true"}),
)
HEADER = (
    "| model | ranks | b x A | | rows | steps | loss | gradient norm | learning rate | eval_loss | weights at the end |"
    " plain beside itself |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


class Material:
    """Models and rows, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, family: str) -> Path:
        """Return the folder of a tiny model with a small vocabulary."""
        folder = self.folder / family
        if folder.exists():
            return folder
        return save_text_model(folder) if family == TEXT_MODEL else save_model(folder, family, is_small=True)

    def rows(self, case: Case) -> tuple[str, str]:
        """Return the files of training and validation rows."""
        is_text = case.family == TEXT_MODEL
        kind = "texts" if is_text else "mixed"
        num_rows = case.num_rows + (len(TOO_LONG) if is_text else 0)
        folder = self.folder / f"{num_rows}_{kind}"
        if not folder.exists():
            numbered_rows(folder, num_rows, with_images=not is_text)
            if is_text:
                _lengthen_two(folder / "train.jsonl")
            held_out_rows(folder / "held_out", NUM_VALIDATION_ROWS, with_images=not is_text)
        return str(folder / "train.jsonl"), str(folder / "held_out" / "train.jsonl")


def _lengthen_two(path: Path) -> None:
    """Make two rows longer than `max_length`; they keep their numbers."""
    rows = path.read_text().splitlines()
    for number in TOO_LONG:
        rows[number] = rows[number].replace(f"row {number} ", f"row {number} " + "a house " * 900)
    path.write_text("".join(f"{row}\n" for row in rows))


def flags_of(case: Case, kind: str, output: Path, material: Material) -> list[str]:
    """Return the flags of a run."""
    dataset, held_out = material.rows(case)
    sizes = case.batch_size, case.accumulation
    batch_size, accumulation = sizes[::-1] if kind == EXCHANGED else sizes
    plugins = [SMALL_VOCABULARY, *([plugin_path()] if kind == PACKED else [RECORDER])]
    options = {
        "dataset": dataset, "val_dataset": held_out, "num_train_epochs": NUM_EPOCHS,
        "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-4, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
        "weight_decay": 0.1, "per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": NUM_STEPS // 2,
        "save_strategy": "steps", "save_steps": 10 * NUM_STEPS, "external_plugins": plugins, **case.flags,
        **({"packing": "true"} if kind == PACKED else {}),
        **({"template": "qwen2_5"} if case.family == TEXT_MODEL else {}),
    }  # fmt: skip
    given = argv(material.model(case.family), case.family, output, **options)
    return [*given, *(["--ddp_backend", "gloo", "--use_cpu", "true"] if case.num_ranks > 1 else [])]


def train(case: Case, kind: str, output: Path, material: Material) -> None:
    """Train one run."""
    output.mkdir(parents=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MODELSCOPE_CACHE": str(material.folder / "cache")}
    if kind == PACKED:
        environ |= {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in OPTIONS.items()}
    else:
        environ["RECORD_FOLDER"] = str(output)
    if case.num_ranks > 1:
        environ |= {"NPROC_PER_NODE": str(case.num_ranks), "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "swift.cli.main", "sft", *flags_of(case, kind, output, material)]
    with open(output / "printed.txt", "w") as printed:
        done = subprocess.run(command, env=environ, stdout=printed, stderr=printed, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: {kind} ended with {done.returncode}\n{(output / 'printed.txt').read_text()[-3000:]}")


def last_weights(output: Path) -> dict[str, Any]:
    """Return the weights at the end."""
    (last,) = output.glob("checkpoint-*")
    return weights(last)


def compared(case: Case, folder: Path, material: Material) -> tuple[str, list[str]]:
    """Train a case. Returns its row of the table, and what is not as it should be."""
    outputs = {kind: folder / kind for kind in KINDS if kind != EXCHANGED or case.can_be_exchanged}
    for kind, output in outputs.items():
        train(case, kind, output, material)
    plain, packed = outputs[PLAIN], outputs[PACKED]
    steps = packed_steps(packed)
    expected = unpacked_steps(plain, accumulation=case.accumulation, num_epochs=NUM_EPOCHS)
    loss, norm, rate = largest_differences(curve(log_lines(plain)), curve(log_lines(packed)))
    of_runs = (eval_losses(log_lines(run)) for run in (plain, packed))
    evaluated = [abs(one - other) / one for one, other in zip(*of_runs, strict=True)]
    gap, own = largest_gap(last_weights(plain), last_weights(packed)), None
    if EXCHANGED in outputs:
        own = largest_gap(last_weights(plain), last_weights(outputs[EXCHANGED]))
    is_right = {
        f"{NUM_STEPS} steps": len(steps) == NUM_STEPS,
        "the last step of an epoch has too few samples": len(expected[-1]) < len(expected[0]) == case.num_samples,
        "the samples of every step": steps == expected,
        "loss": loss <= LARGEST_RELATIVE,
        "gradient norm": norm <= LARGEST_RELATIVE,
        "learning rates": rate == 0,
        "eval_loss": len(evaluated) == 2 and max(evaluated) <= LARGEST_RELATIVE,
        "weights": gap <= TIMES_OF_ITSELF * max(own or 0.0, LEAST_GAP),
    }
    cells = [
        case.family, case.num_ranks, f"{case.batch_size} x {case.accumulation}", case.says, case.num_rows, len(steps),
        f"{loss:.1e}", f"{norm:.1e}", f"{rate:g}", f"{max(evaluated):.1e}", f"{gap:.1e}",
        "-" if own is None else f"{own:.1e}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |", [what for what, holds in is_right.items() if not holds]


def wrong_cases(cases: Iterable[Case], root: Path) -> Iterator[str]:
    """Print the row of every case. Yields what is wrong."""
    material = Material(root)
    print(HEADER, flush=True)
    for number, case in enumerate(cases):
        folder = root / str(number)
        row, wrong = compared(case, folder, material)
        print(row, flush=True)
        yield from (f"{row}: {what}" for what in wrong)
        if not wrong:
            shutil.rmtree(folder)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), help="numbers of cases, from 0")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="vlpack-same-"))
    wrong = list(wrong_cases([CASES[number] for number in options.cases], root))
    if wrong:
        raise SystemExit("\n".join(["not as it should be:", *wrong, f"the runs are in {root}"]))
    shutil.rmtree(root)
    print(f"\nThe samples of all steps were equal in all {len(options.cases)} cases.")


if __name__ == "__main__":
    main()
