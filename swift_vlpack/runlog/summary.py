"""Write two summaries of a run for the log: before its first step, and after its last.

The first says what the run will train on, in the words of `vlpack plan`, and how. The second says what it trained, and
how fast.

>>> counts = Counts(packing_length=100, num_steps=2, milliseconds=3000)
>>> for samples in ([("a", 60), ("a", 40)], [("a", 90)]):
...     counts.packed(samples)
>>> print(end_text(counts, step=2, num_steps=2, num_ranks=1, output_dir="out"))
packing: ended at step 2 of 2, 1 rank
trained      2 steps here: 2 packs, 3 samples, 190 tokens, mean fill 95.0%
speed        63 tokens and 1.0 samples a second, in 3 s of training
             look: vlpack report out
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from swift_vlpack.lines import labelled
from swift_vlpack.runlog.account import shared_in_words
from swift_vlpack.runlog.counts import Counts
from swift_vlpack.runlog.plan_text import run_lines
from swift_vlpack.words import counted

COLUMNS = 100
"""Columns of a line in the log, if no word of it is longer."""


def start_text(facts: Mapping[str, Any]) -> str:
    """Write the facts of `host.callback.facts_at_start`."""
    begins = f"resumes after step {facts['step']}" if facts["checkpoint"] else "before step 1"
    title = f"packing: {begins} of {facts['num_steps']}, {counted(facts['num_ranks'], 'rank')}"  # ms-swift's prefix
    return "\n".join((title, labelled(_lines(facts), columns=COLUMNS)))


def end_text(trained: Counts, *, step: int, num_steps: int, num_ranks: int, output_dir: str) -> str:
    """Sum up what all ranks have trained since this process was started, or resumed the run."""
    seconds = max(trained.seconds, 1e-3)
    lines = [
        (
            "trained",
            f"{counted(trained.num_steps, 'step')} here: {counted(trained.num_packs, 'pack')}, "
            f"{counted(trained.num_packed, 'sample')}, {counted(trained.num_tokens, 'token')}, "
            f"mean fill {trained.fill_mean:.1%}",
        ),
        *([("", shared_in_words(trained))] if trained.tells_of_sharing else []),
        (
            "speed",
            f"{trained.num_tokens / seconds:.0f} tokens and {trained.num_packed / seconds:.1f} samples a second, in "
            f"{seconds:.0f} s of training",
        ),
        ("", f"look: vlpack report {output_dir}"),
    ]
    title = f"packing: ended at step {step} of {num_steps}, {counted(num_ranks, 'rank')}"
    return "\n".join((title, labelled(lines)))


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if facts["checkpoint"]:
        yield "checkpoint", facts["checkpoint"]
    left_out = f"{facts['output_dir']}/vlpack/left_out.jsonl"
    if facts["plan"] is None:
        yield "data", "a stream: rows are packed as they come, and counted when they are trained or left out"
        packs = counted(facts["gradient_accumulation_steps"], "pack")
        yield "steps", f"{facts['num_steps']}; {counted(facts['num_ranks'], 'rank')} x {packs} a step"
        num_packs = facts["num_ranks"] * facts["gradient_accumulation_steps"]
        yield "one step", f"{counted(num_packs, 'pack')}; un-packed it would be as many samples"
    else:
        of_run = {**facts, "num_epochs": math.ceil(facts["num_epochs"]), "failures_file": left_out}
        yield from run_lines({**of_run, **facts["plan"], **facts["data"]})
        known = facts["data"]["num_remembered"]
        yield "remembered", f"{known} lengths from earlier runs, {facts['data']['rows'] - known} measured now"
    yield "attention", facts["attention"].removeprefix("attention ").partition(" (")[0]
    proof = facts["proof"]
    yield "proof", "none, packing_verify is false" if proof is None else proof.partition(" (")[0]
    if facts["plan"] is None:
        yield "left out", f"listed in {left_out} as it happens"
    yield "", f"look: vlpack report {facts['output_dir']}"
