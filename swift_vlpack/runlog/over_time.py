"""Make the timeline of a run (what happened when), and its series (its numbers by step, for charts)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swift_vlpack.runlog.counts import Counts, share
from swift_vlpack.runlog.events import CHECKPOINT, END, EPOCH, RESUME, STEPS, Event
from swift_vlpack.runlog.folder import Checkpoint
from swift_vlpack.runlog.losses import Loss
from swift_vlpack.runlog.segments import Segment
from swift_vlpack.words import counted

Entry = dict[str, Any]
Point = dict[str, Any]


# -- timeline ---------------------------------------------------------------------------------------------------------


def timeline_of(segments: Sequence[Segment], checkpoints: Sequence[Checkpoint]) -> list[Entry]:
    """List starts, resumes, epochs, checkpoints and the end. `is_kept` is false for entries that a resume undid."""
    on_disk = {str(one.path.resolve()): one for one in checkpoints}
    return [entry for segment in segments for entry in _entries(segment, on_disk)]


def _entries(segment: Segment, on_disk: dict[str, Checkpoint]) -> Iterator[Entry]:
    yield _entry(segment, segment.start, _beginning(segment.start))
    verb = "continues" if segment.start["event"] == RESUME else "begins"
    for event in segment.events:
        if event["event"] == EPOCH:
            yield _entry(segment, event, f"epoch {event['epoch']} {verb}")
            verb = "begins"
        elif event["event"] == CHECKPOINT:
            yield _entry(segment, event, _checkpoint(segment, event, on_disk))
        elif event["event"] == END:
            yield _entry(segment, event, "the run ends")
    if not segment.has_ended:
        what = "the last steps on record" if segment.last["event"] == STEPS else "the last sign"
        still = ", or still running" if segment.stops_at is None else ""
        yield {**_entry(segment, segment.last, f"{what}: stopped here{still}"), "event": "last sign"}


def _beginning(start: Event) -> str:
    packs = counted(start["gradient_accumulation_steps"], "pack")
    layout = f"{counted(start['num_ranks'], 'rank')} x {packs} a step"
    return f"resumes from {start['checkpoint']}, {layout}" if start["event"] == RESUME else f"starts, {layout}"


def _checkpoint(segment: Segment, event: Event, on_disk: dict[str, Checkpoint]) -> str:
    name = event["checkpoint"]
    found = on_disk.get(str((segment.folder / name).resolve()))
    if found is None:
        return f"{name}, deleted since"
    return name if found.state is not None else f"{name}, not complete"


def _entry(segment: Segment, event: Event, said: str) -> Entry:
    when = {name: event[name] for name in ("event", "when", "step")}
    return {**when, "said": said, "folder": str(segment.folder), "is_kept": segment.is_kept(event)}


# -- series -----------------------------------------------------------------------------------------------------------


def series_of(segments: Sequence[Segment], losses: Sequence[Loss]) -> list[Point]:
    """Return one point for each `steps` event, with the loss if ms-swift logged one at that step.

    Without segments (no run log), return a point for each logged loss; all other numbers are unknown.
    """
    if not segments:
        unknown = dict.fromkeys(("when", "tokens_per_second", "padding_saved", "vision_share"))
        return [{**unknown, "step": one.last, "leg": 0, "fill": one.fill, "loss": one.number} for one in losses]
    logged = {one.last: one.number for one in losses}
    return [
        _point(number, segment, event, logged.get(event["step"]))
        for number, segment in enumerate(segments)
        for event in segment.steps
    ]


def _point(number: int, segment: Segment, event: Event, loss: float | None) -> Point:
    counts = Counts.from_event(event, segment.start["packing_length"])
    return {
        "step": event["step"],
        "when": event["when"],
        "leg": number,  # the number of the segment, under the name that readers of `--json` know
        "fill": round(counts.fill_mean, 4) if counts.num_room else None,
        "tokens_per_second": round(share(counts.num_tokens, counts.seconds), 1),
        "padding_saved": round(share(counts.num_padding_saved, counts.num_tokens_unpacked), 4),
        "vision_share": round(share(counts.num_vision_tokens, counts.num_tokens), 4),
        "loss": loss,
    }
