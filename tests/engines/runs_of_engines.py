"""The runs that every engine trains, once a session: full and LoRA, tower frozen and not, saved and resumed.

Half of the rows have no image, and a pack has two rows at most, so in some steps one rank has a pack without an image
beside a rank whose pack has one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.engines.launcher import FLAGS, Outcome, Training, train_all
from tests.images import photo

FAMILY = "qwen2_5_vl"
NUM_ROWS = 52
NUM_STEPS = 10
AT_STEP = 5
"""Where runs are saved, evaluated and resumed."""
OPTIONS = {
    "packing_strategy": "exact",
    "packing_length": 200,
    "packing_max_samples": 2,
    "packing_drop_last": "false",
    "record_packs": "true",
}
SAME_STEPS = {
    "packing_strategy": "exact", "packing_length": 200, "packing_batch": "samples", "record_packs": "true",
}  # fmt: skip
"""Steps of eight samples, which take as many sequences as they need."""
FULL = {"tuner_type": "full", "freeze_vit": "false", "freeze_aligner": "false"}
LORA = {"tuner_type": "lora", "target_modules": "all-linear", "lora_rank": 4, "lora_dropout": 0}
TWICE = {"gradient_accumulation_steps": 2}
SEED_WITH_IMAGES = 6
"""By which no step is without any image; by the default, the fourth step is."""


def write_rows(folder: Path, num_rows: int, seed: int, *, have_images: bool = False) -> str:
    """Rows every other of which has an image, or all; their answers are of many lengths."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        words = sentence(rng, 3, 12), sentence(rng, 5, 40)
        image = photo(folder, f"{seed}_{number}", rng.randint(60, 120), rng.randint(60, 120), seed=number)
        rows.append(image_row([image], *words) if number % 2 or have_images else text_row(*words))
    return write_jsonl(folder / f"rows{seed}.jsonl", rows)


NOT_ENTERED = ["tower_forgotten", "engine_notes"]
"""Callbacks by which Qwen3-VL does not enter its tower without an image."""


@dataclass
class Runs:
    """All runs of an engine; each list of them is trained when it is asked for."""

    engine: str
    folder: Path
    model_of: Callable[[str], Path]

    @cached_property
    def data(self) -> dict[str, str]:
        """The rows to train and to evaluate, the same for all engines."""
        place = self.folder / "rows"
        place.mkdir(exist_ok=True)
        return {"dataset": write_rows(place, NUM_ROWS, 1), "val_dataset": write_rows(place, 6, 2)}

    def training(self, name: str, *parts: dict[str, Any], family: str = FAMILY, **flags: Any) -> Training:
        """A run of ten steps."""
        merged: dict[str, Any] = {"dataset": self.data["dataset"], "split_dataset_ratio": 0, "max_steps": NUM_STEPS}
        for part in (*parts, flags):
            merged |= part
        return Training(name, self.model_of(family), family, merged, OPTIONS)

    @cached_property
    def first(self) -> dict[str, Outcome]:
        """Runs from the beginning."""
        saved = {"save_strategy": "steps", "save_steps": AT_STEP}
        evaluated = {"val_dataset": self.data["val_dataset"], "eval_strategy": "steps", "eval_steps": AT_STEP}
        runs = [
            self.training("full", FULL, saved, evaluated),
            self.training("frozen", {**FULL, "freeze_vit": "true", "freeze_aligner": "true"}, TWICE),
            self.training("lora", LORA, saved),
            self.training("lora_with_tower", LORA, TWICE, freeze_vit="false", freeze_aligner="false"),
            self.training("qwen3_vl", FULL, family="qwen3_vl", data_seed=SEED_WITH_IMAGES),
            self.training("qwen3_vl_with_texts", FULL, family="qwen3_vl", max_steps=6),
            replace(self.training("same_steps", FULL, TWICE, per_device_train_batch_size=2), options=SAME_STEPS),
        ]
        if self.engine == "ddp":  # whose plugin does not tell accelerate that it shards on CPUs
            runs.append(self.training("not_fsdp2", FULL, FLAGS["fsdp2"], max_steps=2))
        if self.engine == "fsdp2":
            runs.append(self.training("tower_forgotten", FULL, family="qwen3_vl", callbacks=NOT_ENTERED))
        return train_all(self.engine, runs, self.folder)

    @cached_property
    def evaluated_forgotten(self) -> dict[str, Outcome]:
        """Trained on images alone, and evaluated on rows with and without, by a family that skips its tower."""
        place = self.folder / "rows"
        data = {**self.data, "dataset": write_rows(place, 16, 3, have_images=True)}
        flags = {"eval_strategy": "steps", "eval_steps": 2, "callbacks": NOT_ENTERED, "per_device_eval_batch_size": 1}
        runs = []
        for packing in ("false", "true"):
            run = self.training(f"eval_packing_{packing}", FULL, data, flags, family="qwen3_vl")
            runs.append(replace(run, options={**OPTIONS, "packing_max_samples": 1, "eval_packing": packing}))
        return train_all(self.engine, runs, self.folder)

    @cached_property
    def with_a_step_of_texts(self) -> dict[str, Outcome]:
        """Trained by ms-swift alone, and packed in the same steps: two rows a step, the third without any image."""
        place = self.folder / "rows"
        place.mkdir(exist_ok=True)
        rows = [json.loads(line) for line in Path(write_rows(place, 16, 4, have_images=True)).read_text().splitlines()]
        rows[4:6] = [text_row("words", "and an answer"), text_row("other words", "and another answer")]
        in_turn = {"dataset_shuffle": "false", "train_dataloader_shuffle": "false", "max_steps": 8}
        in_turn["dataset"] = write_jsonl(place / "in_turn.jsonl", rows)
        plain = self.training("plain", FULL, in_turn, family="qwen3_vl", packing="false")
        packed = self.training("packed", FULL, in_turn, family="qwen3_vl", per_device_train_batch_size=1)
        return train_all(self.engine, [plain, replace(packed, options=SAME_STEPS)], self.folder)

    @cached_property
    def half_precision(self) -> dict[str, Outcome]:
        """Four steps in float32, and in bfloat16."""
        bfloat16 = {"torch_dtype": "bfloat16", "bf16": "true"}
        runs = [self.training("float32", FULL, max_steps=4), self.training("bfloat16", FULL, bfloat16, max_steps=4)]
        return train_all(self.engine, runs, self.folder)

    def checkpoint(self, name: str, step: int = AT_STEP) -> Path:
        """The checkpoint of a run at a step."""
        return self.first[name].output / f"checkpoint-{step}"

    @cached_property
    def resumed(self) -> dict[str, Outcome]:
        """Resumed on as many ranks."""
        runs = [
            self.training("full_resumed", FULL, resume_from_checkpoint=self.checkpoint("full")),
            self.training("lora_resumed", LORA, resume_from_checkpoint=self.checkpoint("lora")),
        ]
        return train_all(self.engine, runs, self.folder)

    def from_another(self, engine: str, checkpoint: Path) -> dict[str, Outcome]:
        """Resumed from the checkpoint of another engine: as it is, and only its model."""
        saved = {"resume_from_checkpoint": checkpoint}
        runs = [
            self.training(f"from_{engine}", FULL, saved),
            self.training(f"model_from_{engine}", FULL, saved, resume_only_model="true"),
        ]
        return train_all(self.engine, runs, self.folder)

    @cached_property
    def alone(self) -> dict[str, Outcome]:
        """Resumed on one rank, which trains the packs of two in a step."""
        saved = {"resume_from_checkpoint": self.checkpoint("full")}
        runs = [self.training("full_alone", FULL, TWICE, saved)]
        if self.engine in ("zero2", "zero3"):
            runs.append(self.training("only_model", FULL, TWICE, saved, resume_only_model="true"))
        return train_all(self.engine, runs, self.folder, num_ranks=1)
