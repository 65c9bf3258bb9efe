"""Read the run log as segments. A segment is what one process group trained, from its start or resume until it stopped.

A run starts once and is resumed any number of times, on other ranks, and in the same output directory or another one.
`segments_of` follows it back to its start. Steps after the checkpoint that the next segment resumed from are lost: that
segment trained the same samples again.

>>> from tempfile import mkdtemp
>>> from swift_vlpack.runlog.events import EventLog
>>> folder = Path(mkdtemp())
>>> log = EventLog(folder)
>>> log.append(START, 0, num_ranks=2)
>>> for step in (5, 10, 15):
...     log.append(STEPS, step)
>>> log.append(CHECKPOINT, 10, checkpoint="checkpoint-10")
>>> log.append(RESUME, 10, num_ranks=4, checkpoint=str(folder / "checkpoint-10"))
>>> [(one.start["num_ranks"], [event["step"] for event in one.steps], one.stops_at) for one in segments_of(folder)]
[(2, [5, 10], 10), (4, [], None)]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from swift_vlpack.runlog.events import (
    CHECKPOINT,
    END,
    EPOCH,
    FILE,
    FOLDER,
    RESUME,
    START,
    STEPS,
    Event,
    read_events,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """The events of one process group, from its start or resume until it stopped."""

    folder: Path
    number: int
    """Number among the segments of its folder, from 0."""
    start: Event
    """The `start` or `resume` event, which has everything known before the first step."""
    events: tuple[Event, ...]
    """All events after `start`."""
    log_end: int | None = None
    """Byte of ms-swift's log at which the next segment in the folder begins to write; None for the last one."""
    stops_at: int | None = None
    """Step from which the next segment of the run went on; None for the last one."""

    @property
    def steps(self) -> Iterator[Event]:
        """Yield the `steps` events before the checkpoint that the next segment resumed from: the model has these."""
        return (event for event in self._of_kind(STEPS) if self.is_kept(event))

    @property
    def lost_steps(self) -> Iterator[Event]:
        """Yield the `steps` events whose samples the next segment trained again."""
        return (event for event in self._of_kind(STEPS) if not self.is_kept(event))

    @property
    def epochs(self) -> Iterator[Event]:
        """Yield the `epoch` events: an epoch began, or was resumed."""
        return self._of_kind(EPOCH)

    @property
    def last(self) -> Event:
        """Return the last event on record."""
        return (self.events or (self.start,))[-1]

    @property
    def last_step(self) -> int:
        """Return the highest step on record, also if it was lost."""
        return max(int(event["step"]) for event in (self.start, *self.events))

    @property
    def has_ended(self) -> bool:
        """Tell whether training ended by itself."""
        return any(self._of_kind(END))

    def is_kept(self, event: Event) -> bool:
        """Tell whether an event lies before the step from which the next segment went on; later ones are lost."""
        return self.stops_at is None or event["step"] <= self.stops_at

    def _of_kind(self, kind: str) -> Iterator[Event]:
        return (event for event in self.events if event["event"] == kind)


def segments_of(folder: Path) -> list[Segment]:
    """Return the segments that led to the present state of the run in a folder, in the order of training.

    The list is empty if the folder has no run log.
    """
    # Go back from the last segment, because the folder may also hold segments of other runs.
    found = _segments_in(folder)[-1:]
    seen = {(segment.folder.resolve(), segment.number) for segment in found}
    while found and found[0].start["event"] == RESUME and (before := _resumed_by(found[0])) is not None:
        key = before.folder.resolve(), before.number
        if key in seen:  # folders that were copied can refer to each other in a circle
            break
        seen.add(key)
        found.insert(0, replace(before, stops_at=found[0].start["step"]))
    return found


def resumed_folder(segment: Segment) -> Path | None:
    """Return the folder of the checkpoint that a segment resumed from, also if both folders were moved; or None."""
    checkpoint = Path(segment.start["checkpoint"])
    if checkpoint.parent.is_dir():
        return checkpoint.parent
    if (segment.folder / checkpoint.name).is_dir():  # the run was resumed in its own folder, which was renamed later
        return segment.folder
    moved = segment.folder.parent / checkpoint.parent.name
    return moved if moved.is_dir() else None


def _resumed_by(segment: Segment) -> Segment | None:
    """Return the segment that wrote the checkpoint from which the given segment resumed; None if unknown."""
    folder = resumed_folder(segment)
    if folder is None:
        return None
    is_same = folder.resolve() == segment.folder.resolve()
    earlier = _segments_in(segment.folder)[: segment.number] if is_same else _segments_in(folder)
    earlier = [one for one in earlier if one.start["when"] <= segment.start["when"]]
    # A run that was killed between a checkpoint and its event has no such event: then take the latest segment.
    wrote = [one for one in earlier if _wrote_checkpoint(one, segment.start["step"])]
    return next(reversed(wrote or earlier), None)


def _wrote_checkpoint(segment: Segment, step: int) -> bool:
    return any((event["event"], event["step"]) == (CHECKPOINT, step) for event in segment.events)


def _segments_in(folder: Path) -> list[Segment]:
    """Return all segments in the log of a folder, perhaps of several runs, in the order of the file."""
    groups: list[list[Event]] = []
    for event in read_events(folder / FOLDER / FILE):
        if event["event"] in (START, RESUME):
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    log_ends = [first.get("log_bytes", 0) for first, *_ in groups[1:]] + [None]
    return [
        Segment(folder, number, first, tuple(rest), log_ends[number]) for number, (first, *rest) in enumerate(groups)
    ]
