"""Write two summaries of a run for the log: before its first step, short enough for a screen, and after its last.

The first says what the run will train on, and how. The second says what it trained, and how fast.

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

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from swift_vlpack.plan.report import about_step, nothing_packed, share_lines, without_target
from swift_vlpack.reasons import kept_by
from swift_vlpack.runlog.account import shared_in_words
from swift_vlpack.runlog.counts import Counts
from swift_vlpack.words import by_reason, counted

WIDTH = 100
"""Columns of a line."""
MAX_LINES = 24
_LABEL = 13
_MAX_SOURCES = 4
_WHOLE = 0

Entry = tuple[str, str, int]
"""(label, text, most lines). `_WHOLE` in place of a number writes one line, however long: a command to copy."""


def start_text(facts: Mapping[str, Any]) -> str:
    """Sum up the facts of `host.callback.facts_at_start` in at most 24 lines of 100 columns; commands may be longer."""
    lines = [_title(facts)]
    for label, text, most in _entries(facts):
        lines += _wrapped(label, text, most)
    return "\n".join(lines[:MAX_LINES])


def end_text(trained: Counts, *, step: int, num_steps: int, num_ranks: int, output_dir: str) -> str:
    """Sum up what all ranks have trained since this process was started, or resumed the run."""
    seconds = max(trained.seconds, 1e-3)
    entries = (
        (
            "trained",
            f"{counted(trained.num_steps, 'step')} here: {counted(trained.num_packs, 'pack')}, "
            f"{counted(trained.num_packed, 'sample')}, {counted(trained.num_tokens, 'token')}, "
            f"mean fill {trained.fill_mean:.1%}",
            2,
        ),
        *([("", shared_in_words(trained), 2)] if trained.tells_of_sharing else []),
        (
            "speed",
            f"{trained.num_tokens / seconds:.0f} tokens and {trained.num_packed / seconds:.1f} samples a second, in "
            f"{seconds:.0f} s of training",
            2,
        ),
        ("", f"look: vlpack report {output_dir}", _WHOLE),
    )
    lines = [f"packing: ended at step {step} of {num_steps}, {counted(num_ranks, 'rank')}"]
    for entry in entries:
        lines += _wrapped(*entry)
    return "\n".join(lines)


def _title(facts: Mapping[str, Any]) -> str:
    begins = f"resumes after step {facts['step']}" if facts["checkpoint"] else "before step 1"
    return f"packing: {begins} of {facts['num_steps']}, {counted(facts['num_ranks'], 'rank')}"  # ms-swift's prefix


def _entries(facts: Mapping[str, Any]) -> Iterator[Entry]:
    if facts["checkpoint"]:
        yield "checkpoint", facts["checkpoint"], 1
    if facts["plan"] is None:
        yield "data", "a stream: rows are packed as they come, and counted when they are trained or left out", 1
        if "packing_share" in facts:
            yield "shared", "rows that wait for a pack together and begin alike; counted when they are trained", 1
    else:
        yield from _about_data(facts["data"], facts["plan"])
        yield from _about_plan(facts["plan"], facts["epoch"], facts["data"].get("share"))
    yield from _about_steps(facts)
    yield "attention", facts["attention"].removeprefix("attention ").partition(" (")[0], 2
    yield "proof", _proof(facts["proof"]), 2
    yield "left out", f"listed in {facts['output_dir']}/vlpack/left_out.jsonl as it happens", 1
    yield "", f"look: vlpack report {facts['output_dir']}", _WHOLE


def _about_data(data: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[Entry]:
    sources = data["sources"]
    yield "data", f"{counted(data['rows'], 'row')} in {counted(len(sources), 'source')}, {_left_out(data, plan)}", 2
    for name, source in list(sources.items())[:_MAX_SOURCES]:
        yield (
            "",
            f"{name}: {counted(source['rows'], 'row')}, ratio {source['asked_ratio']:g} by {data['ratio_by']}, "
            f"{source['share_of_samples']:.1%} of samples, {source['share_of_tokens']:.1%} of tokens",
            1,
        )
    if len(sources) > _MAX_SOURCES:
        yield "", f"and {counted(len(sources) - _MAX_SOURCES, 'more source')}", 1
    numbers = ", ".join(f"{name} {number}" for name, number in data["lengths"].items())
    known = data["num_remembered"]
    yield "lengths", f"{numbers} tokens", 1
    yield "", f"{known} remembered from earlier runs, {data['rows'] - known} measured now", 1
    vision = data["share_of_vision_tokens"]
    of_tokens = "" if vision is None else f", {vision:.1%} of the tokens are vision"
    yield "images", f"{data['share_of_rows_with_image']:.1%} of the rows have one{of_tokens}", 1


def _left_out(data: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    said = [f"{counted(sum(data['unreadable'].values()), 'row')} unreadable ({by_reason(data['unreadable'])})"]
    if plan["num_dropped"]:
        said.append(f"{plan['num_dropped']} left out ({by_reason(plan['dropped'])}{kept_by(plan['dropped'])})")
    if num_rows := data["rows_without_target"]:
        said.append(without_target(num_rows))
    return ", ".join(said)


def _about_plan(plan: Mapping[str, Any], epoch: int, share: Mapping[str, Any] | None) -> Iterator[Entry]:
    if nothing := nothing_packed(plan):
        yield "plan", nothing, 2
    yield (
        "" if nothing else "plan",
        f"epoch {epoch}: {counted(plan['num_packs'], 'pack')} of {plan['packing_length']} tokens by {plan['method']} "
        f"(lower bound {plan['lower_bound']}), mean fill {plan['mean_fill']:.2%}, "
        f"{plan['num_samples'] / max(1, plan['num_packs']):.1f} samples a pack, {plan['single_long']} single-long",
        2,
    )
    if share:
        yield from ((label, text, 2) for label, text in share_lines(share))
    yield "balance", f"slowest rank {plan['balance']:.3f} x mean, in the steps of an epoch", 1


def _about_steps(facts: Mapping[str, Any]) -> Iterator[Entry]:
    packs = counted(facts["gradient_accumulation_steps"], "pack")
    a_step = f"{counted(facts['num_ranks'], 'rank')} x {packs} a step"
    plan = facts["plan"]
    if plan is None:
        num_packs = facts["num_ranks"] * facts["gradient_accumulation_steps"]
        yield "steps", f"{facts['num_steps']}; {a_step}", 1
        yield "one step", f"{counted(num_packs, 'pack')}; un-packed it would be as many samples", 1
        return
    as_many = ", as many as un-packed" if plan.get("kept_steps") else f"; {a_step}"
    yield "steps", f"{facts['num_steps']}, {plan['steps_per_epoch']} an epoch{as_many}", 1
    yield from ((*line, 3) for line in about_step(plan))


def _proof(line: str | None) -> str:
    return "none, packing_verify is false" if line is None else line.partition(" (")[0]


def _wrapped(label: str, text: str, most: int) -> list[str]:
    # `wrap` breaks a word that is longer than a line, such as a path.
    found = [text] if most == _WHOLE else wrap(text, WIDTH - _LABEL, max_lines=most, placeholder=" ...")
    return [f"{label if number == 0 else '':<{_LABEL}}{line}".rstrip() for number, line in enumerate(found)]
