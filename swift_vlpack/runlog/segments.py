"""Read the run log as segments. A segment is what one process group trained, from its start or resume until it stopped.

A run starts once and is resumed any number of times, on other ranks too. `segments_of` follows it back to its start, as
far as it was trained in this folder. Steps after the checkpoint that the next segment resumed from are lost: that
segment trained the same samples again.

>>> from tempfile import mkdtemp
>>> from swift_vlpack.runlog.events import EventLog
>>> folder = Path(mkdtemp())
>>> log = EventLog(folder)
>>> began = log.append(START, 0, num_ranks=2)
>>> trained = [log.append(STEPS, step) for step in (5, 10, 15)]
>>> saved = log.append(CHECKPOINT, 10, checkpoint="checkpoint-10")
>>> resumed = log.append(RESUME, 10, num_ranks=4, checkpoint=str(folder / "checkpoint-10"))
>>> [(one.start["num_ranks"], [event["step"] for event in one.steps], one.stops_at) for one in segments_of(folder)]
[(2, [5, 10], 10), (4, [], None)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.events import CHECKPOINT, END, EPOCH, FILE, FOLDER, RESUME, START, STEPS, Event, read_events
from swift_vlpack.words import counted


@dataclass(frozen=True, slots=True)
class Segment:
    """The events of one process group, from its start or resume until it stopped."""

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
        return (event for event in self._of_kind(STEPS) if self.is_kept(event["step"]))

    @property
    def lost_steps(self) -> Iterator[Event]:
        """Yield the `steps` events whose samples the next segment trained again."""
        return (event for event in self._of_kind(STEPS) if not self.is_kept(event["step"]))

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

    def is_kept(self, step: int) -> bool:
        """Tell whether a step lies before the one from which the next segment went on; later ones are lost."""
        return self.stops_at is None or step <= self.stops_at

    def wrote_checkpoint(self, step: int) -> bool:
        """Tell whether the segment completed a checkpoint at this step."""
        return any(event["step"] == step for event in self._of_kind(CHECKPOINT))

    def _of_kind(self, kind: str) -> Iterator[Event]:
        return (event for event in self.events if event["event"] == kind)


def segments_of(folder: Path) -> list[Segment]:
    """Return the segments that led to the present state of the run in a folder, in the order of training.

    Raises `ConfigError` if the folder has no run log, or one without a start of a run.
    """
    known = _segments_in(folder)
    if not known:
        raise ConfigError(_why_none(folder / FOLDER / FILE))
    # Go back from the last segment, because the folder may also hold segments of other runs.
    number: int | None = len(known) - 1
    found: list[Segment] = []
    while number is not None:
        found.insert(0, replace(known[number], stops_at=found[0].start["step"] if found else None))
        number = _resumed_by(known[number].start, known[:number], folder)
    return found


def _resumed_by(start: Event, earlier: Sequence[Segment], folder: Path) -> int | None:
    """Return the number of the segment that wrote the checkpoint of a resume; None if no segment here did."""
    if start["event"] != RESUME:
        return None
    parent = Path(start["checkpoint"]).parent
    if parent.is_dir() and parent.resolve() != folder.resolve():  # a run in another folder, which has a log of its own
        return None
    wrote = [number for number, one in enumerate(earlier) if one.wrote_checkpoint(start["step"])]
    if not wrote and parent.is_dir():
        # A run that was killed between a checkpoint and its event has no such event: then take the latest segment.
        wrote = list(range(len(earlier)))
    return wrote[-1] if wrote else None


def _why_none(path: Path) -> str:
    try:
        num_lines = len(path.read_bytes().splitlines())
    except FileNotFoundError:
        return f"the run log ({path}) is missing: it was not copied, or could not be written"
    except OSError as error:
        return f"the run log ({path}) cannot be read: {error.strerror}"
    return f"the run log ({path}, {counted(num_lines, 'line')}) is damaged: it has no start of a run"


def _segments_in(folder: Path) -> list[Segment]:
    """Return all segments in the log of a folder, perhaps of several runs, in the order of the file."""
    groups: list[list[Event]] = []
    for event in read_events(folder / FOLDER / FILE):
        if event["event"] in (START, RESUME):
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    log_ends = [*(first.get("log_bytes", 0) for first, *_ in groups[1:]), None]
    return [Segment(first, tuple(rest), end) for (first, *rest), end in zip(groups, log_ends, strict=False)]
