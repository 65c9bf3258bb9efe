"""Runs with and without packing, side by side: which samples each optimizer step trained, and what came out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.images import photo

RECORDER = Path(__file__).parent.parent / "plugins" / "record_samples.py"
OPTIONS = {"packing_batch": "samples", "packing_strategy": "exact", "record_packs": "true", "packing_length": 512}


def numbered_rows(folder: Path, num_rows: int, *, with_images: bool = True) -> str:
    """Rows that say their number, every third without an image."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(num_rows)
    rows = []
    for number in range(num_rows):
        question, answer = f"row {number} {sentence(rng, 1, 20)}", sentence(rng, 2, 60)
        image = photo(folder, str(number), rng.randint(60, 200), rng.randint(60, 200), seed=number)
        rows.append(image_row([image], question, answer) if with_images and number % 3 else text_row(question, answer))
    return write_jsonl(folder / "train.jsonl", rows)


def held_out_rows(folder: Path, num_rows: int, *, with_images: bool = True) -> str:
    """Rows to evaluate, which the recorder does not take for rows that are trained."""
    path = Path(numbered_rows(folder, num_rows, with_images=with_images))
    path.write_text(path.read_text().replace("row ", "held "))
    return str(path)


def recipe(batch_size: int, accumulation: int, **options: Any) -> dict[str, Any]:
    """As a user trains: warmup, cosine, clipping, weight decay; every step logged."""
    return {
        "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "num_train_epochs": 2,
        "learning_rate": 1e-4, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
        "weight_decay": 0.1, "split_dataset_ratio": 0, "save_strategy": "steps", "save_steps": 1000, **options,
    }  # fmt: skip


def eval_losses(lines: list[dict[str, Any]]) -> list[float]:
    """The loss of every evaluation."""
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def unpacked_steps(folder: Path, *, accumulation: int, num_epochs: int) -> list[list[int]]:
    """The rows of every step, as the recorder saw them in the collator of plain ms-swift."""
    of_ranks = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank_*.jsonl"))
    ]
    (num_batches,) = {len(batches) for batches in of_ranks}
    per_epoch = num_batches // num_epochs
    assert per_epoch * num_epochs == num_batches, "every epoch has as many batches"
    ends = range(per_epoch, num_batches + 1, per_epoch)
    steps = [(at, min(at + accumulation, end)) for end in ends for at in range(end - per_epoch, end, accumulation)]
    return [sorted(row for batches in of_ranks for batch in batches[at:end] for row in batch) for at, end in steps]


def number_in_file(sample_id: str) -> int:
    """The number of a row in its file."""
    return int(sample_id.rpartition(":")[2])


def packed_steps(*outputs: Path, number_of: Callable[[str], int] = number_in_file) -> list[list[int]]:
    """The rows of every step, from the records of packs; a later run trains on from where an earlier one ended."""
    steps: dict[int, list[int]] = {}
    for output in outputs:
        lines = [
            json.loads(line)
            for path in sorted((output / "vlpack").glob("packs_rank*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        here: dict[int, list[int]] = {}
        for line in lines:
            here.setdefault(line["step"], []).extend(map(number_of, line["ids"]))
        steps |= {step: sorted(rows) for step, rows in here.items()}
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [steps[step] for step in sorted(steps)]


def curve(lines: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of every step."""
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines if "loss" in line]


def largest_differences(one: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> list[float]:
    """The largest relative difference of each column."""
    assert len(one) == len(other)
    assert one
    columns = zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
    return [max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(*both, strict=True)) for both in columns]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, or of its adapter."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of tensors."""
    assert set(one) == set(other)
    assert one
    return max(float((one[name] - other[name]).abs().max()) for name in one)
