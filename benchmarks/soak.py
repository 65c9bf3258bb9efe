"""Kill one of two ranks at a random step, resume, and count: every sample must have been trained exactly once.

`make soak` prints the table of benchmarks/RESULTS.md. Each round is a real run on two ranks, over gloo on the CPU, of
which one is killed with `kill -9`, and which is resumed from its last complete checkpoint on one, two or three ranks,
with another number of workers and another accumulation. In every other round that run is killed too, and a third one
ends it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.ranks import Run, ids, last_complete, step_of, trained
from tests.host.runs import argv
from tests.tiny import save_model

FAMILY = "qwen2_5_vl"
NUM_ROWS = 120
NUM_EPOCHS = 2
OPTIONS = {"packing_strategy": "exact", "packing_drop_last": "false", "packing_verify": "false", "record_packs": "true"}
MAX_SECONDS_TO_END = 60


class Shape(NamedTuple):
    """How a run is shared out; the next one has another shape."""

    num_ranks: int
    num_workers: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.num_ranks}x{self.num_workers}w, ga {self.accumulation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="vlpack-soak-"))
    model = save_model(root / "model", FAMILY)
    dataset = write_jsonl(root / "train.jsonl", mixed_rows(root / "images", NUM_ROWS, largest=120))
    print("| round | runs (ranks x workers, accumulation) | killed after step | seconds to end | missing | twice |")
    print("|---|---|---|---|---|---|")
    num_wrong = 0
    for number in range(args.rounds):
        rng = random.Random(f"{args.seed}/{number}")
        line, is_right = one_round(root / str(number), model, dataset, rng, num_kills=1 + number % 2)
        print(f"| {number} | {line} |", flush=True)
        num_wrong += not is_right
    print(
        f"\n{args.rounds - num_wrong} of {args.rounds} rounds trained all {NUM_ROWS} rows of both epochs exactly once."
    )
    if num_wrong:
        raise SystemExit(f"{num_wrong} rounds were wrong; the runs are in {root}")


def one_round(folder: Path, model: Path, dataset: str, rng: random.Random, *, num_kills: int) -> tuple[str, bool]:
    """Kill so many runs, each one going on from the one before, and let another end."""
    shapes, steps, seconds = [], [], []
    packs: list[dict[str, Any]] = []
    checkpoint: Path | None = None
    for number in range(num_kills + 1):
        is_killed = number < num_kills
        num_ranks = 2 if number == 0 else rng.choice((2, 3) if is_killed else (1, 2, 3))
        shape = Shape(num_ranks, rng.choice((0, 1, 2)), rng.choice((1, 2, 3)))
        output = folder / str(number)
        output.mkdir(parents=True)
        run = Run(
            flags(model, output, dataset, shape, checkpoint), output / "log.txt", num_ranks=shape.num_ranks, **OPTIONS
        )
        if is_killed:
            before = step_of(checkpoint) if checkpoint else 0
            step = before + rng.randint(1, 2 if before else 4)  # the shortest run has eight
            seconds.append(f"{kill(run, output, step, rng.randrange(shape.num_ranks)):.1f}")
            steps.append(step)
            checkpoint = last_complete(output) if list(output.glob("checkpoint-*/vlpack_state.json")) else checkpoint
            packs += trained(output, up_to_step=step_of(checkpoint)) if checkpoint else []
        elif run.wait(900) != 0:
            raise SystemExit(run.output[-5000:])
        else:
            packs += trained(output)
        shapes.append(shape)
    missing, twice = wrong(packs)
    line = [" > ".join(map(str, shapes)), ", ".join(map(str, steps)), ", ".join(seconds), str(missing), str(twice)]
    return " | ".join(line), missing == twice == 0


def kill(run: Run, output: Path, step: int, rank: int) -> float:
    """`kill -9` a rank after a step; how long the run takes to end."""
    run.until(lambda: bool(trained(output)) and trained(output)[-1]["step"] >= step)
    run.kill_rank(rank)
    start = time.monotonic()
    if run.wait(MAX_SECONDS_TO_END) == 0:
        raise SystemExit("a run of which a rank was killed ended without an error")
    return time.monotonic() - start


def wrong(packs: list[dict[str, Any]]) -> tuple[int, int]:
    """Samples that were trained never, and more than once, over all epochs."""
    counts = [Counter(ids(packs, epoch)) for epoch in range(NUM_EPOCHS)]
    missing = sum(NUM_ROWS - len(count) for count in counts)
    return missing, sum(number > 1 for count in counts for number in count.values())


def flags(model: Path, output: Path, dataset: str, shape: Shape, checkpoint: Path | None) -> list[str]:
    resumed = {} if checkpoint is None else {"resume_from_checkpoint": checkpoint}
    return argv(
        model, FAMILY, output, dataset=dataset, num_train_epochs=NUM_EPOCHS, split_dataset_ratio=0, max_length=400,
        tuner_type="lora", save_strategy="steps", save_steps=2, gradient_accumulation_steps=shape.accumulation,
        dataloader_num_workers=shape.num_workers,
        dataloader_persistent_workers="true" if shape.num_workers else "false", **resumed,
    )  # fmt: skip


if __name__ == "__main__":
    main()
