"""What happened in a run, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swift_vlpack.runlog.files import Checkpoint
from swift_vlpack.runlog.legs import Event, Leg
from swift_vlpack.runlog.run_log import CHECKPOINT, END, EPOCH, STEPS
from swift_vlpack.words import counted


def timeline_of(legs: Sequence[Leg], checkpoints: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """Starts, resumes, epochs, checkpoints and the end; `is_kept` is whether it lies before where the run went on."""
    on_disk = {str(one.path.resolve()): one for one in checkpoints}
    return [entry for leg in legs for entry in _of_leg(leg, on_disk)]


def _of_leg(leg: Leg, on_disk: dict[str, Checkpoint]) -> Iterator[dict[str, Any]]:
    yield _entry(leg, leg.facts, _beginning(leg.facts))
    verb = "goes on" if "checkpoint" in leg.facts else "begins"
    for event in leg.events:
        if event["event"] == EPOCH:
            yield _entry(leg, event, f"epoch {event['epoch']} {verb}")
            verb = "begins"
        elif event["event"] == CHECKPOINT:
            yield _entry(leg, event, _checkpoint(leg, event, on_disk))
        elif event["event"] == END:
            yield _entry(leg, event, "the run ends")
    if not leg.has_ended:
        last = (leg.events or (leg.facts,))[-1]
        what = "the last steps on record" if last["event"] == STEPS else "the last sign"
        said = f"{what}: stopped here, or still running" if leg.last_step is None else f"{what}: stopped here"
        yield {**_entry(leg, last, said), "event": "last sign"}


def _beginning(facts: Event) -> str:
    ranks = f"{counted(facts['num_ranks'], 'rank')} x {counted(facts['gradient_accumulation_steps'], 'pack')} a step"
    if "checkpoint" in facts:
        return f"goes on from {facts['checkpoint']}, {ranks}"
    return f"starts, {ranks}"


def _checkpoint(leg: Leg, event: Event, on_disk: dict[str, Checkpoint]) -> str:
    found = on_disk.get(str((leg.folder / event["checkpoint"]).resolve()))
    if found is None:
        return f"{event['checkpoint']}, deleted since"
    return event["checkpoint"] if found.state is not None else f"{event['checkpoint']}, not complete"


def _entry(leg: Leg, event: Event, said: str) -> dict[str, Any]:
    is_kept = leg.last_step is None or event["step"] <= leg.last_step
    entry = {name: event[name] for name in ("event", "when", "step")}
    return {**entry, "said": said, "folder": str(leg.folder), "is_kept": is_kept}
