"""The legs of a run: it starts once, and goes on after every resume, in the same folder or in another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_vlpack.runlog.run_log import CHECKPOINT, END, FILE, FOLDER, RESUME, START, STEPS, events

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leg:
    """What one process group trained."""

    folder: Path
    number: int
    """In its folder."""
    facts: Event
    """Its `start` or `resume`."""
    events: tuple[Event, ...]
    """What came behind."""
    last_step: int | None = None
    """Where the next leg goes on; None for the last one."""

    @property
    def steps(self) -> Iterator[Event]:
        """Notes of steps that became a part of the model."""
        return (event for event in self._noted() if self._is_kept(event))

    @property
    def lost_steps(self) -> Iterator[Event]:
        """Notes of steps behind the checkpoint that was resumed from: another leg trained these samples again."""
        return (event for event in self._noted() if not self._is_kept(event))

    @property
    def step(self) -> int:
        """How far it went."""
        return max(int(event["step"]) for event in (self.facts, *self.events))

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself."""
        return any(event["event"] == END for event in self.events)

    def num_tokens_unpacked(self, event: Mapping[str, Any]) -> int:
        """Count the tokens of a note's samples in padded batches of the size that was asked for.

        Earlier versions noted no size where it was 1, and counted the samples of each pack as a batch; batches of one
        have no padding.
        """
        as_asked = self.facts["unpacked_batch_size"] is not None
        return int(event["num_tokens_unpacked" if as_asked else "num_tokens"])

    def until(self, step: int) -> Leg:
        """The leg as far as the next one goes on from it."""
        return replace(self, last_step=step)

    def _noted(self) -> Iterator[Event]:
        return (event for event in self.events if event["event"] == STEPS)

    def _is_kept(self, event: Event) -> bool:
        return self.last_step is None or event["step"] <= self.last_step


def legs_of(folder: Path) -> list[Leg]:
    """The legs that led to where the run in a folder is, the first one first; none where it kept no notes."""
    found = _legs_in(folder)[-1:]
    seen = {(leg.folder.resolve(), leg.number) for leg in found}
    while found and found[0].facts["event"] == RESUME and (before := _before(found[0])) is not None:
        at = before.folder.resolve(), before.number
        if at in seen:  # folders that were copied can send a reader in a circle
            break
        seen.add(at)
        found.insert(0, before.until(found[0].facts["step"]))
    return found


def _before(leg: Leg) -> Leg | None:
    """The leg that wrote the checkpoint which another one goes on from."""
    step = leg.facts["step"]
    folder = resumed_folder(leg)
    if folder is None:
        return None
    is_same = folder.resolve() == leg.folder.resolve()
    earlier = _legs_in(leg.folder)[: leg.number] if is_same else _legs_in(folder)
    earlier = [one for one in earlier if one.facts["when"] <= leg.facts["when"]]
    wrote = [one for one in earlier if any(_is_checkpoint(event, step) for event in one.events)]
    return next(reversed(wrote or earlier), None)


def resumed_folder(leg: Leg) -> Path | None:
    """The folder with the checkpoint that was resumed; it may have been moved since, with its neighbours."""
    there = Path(leg.facts["checkpoint"]).parent
    moved = leg.folder.parent / there.name
    if there.is_dir():
        return there
    if (leg.folder / Path(leg.facts["checkpoint"]).name).is_dir():
        return leg.folder
    return moved if moved.is_dir() else None


def _is_checkpoint(event: Event, step: int) -> bool:
    return (event["event"], event["step"]) == (CHECKPOINT, step)


def _legs_in(folder: Path) -> list[Leg]:
    groups: list[list[Event]] = []
    for event in events(folder / FOLDER / FILE):
        if event["event"] in (START, RESUME):
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    return [Leg(folder, number, first, tuple(rest)) for number, (first, *rest) in enumerate(groups)]
