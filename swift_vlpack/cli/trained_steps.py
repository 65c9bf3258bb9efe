"""`vlpack inspect --run`: the rows of the optimizer steps of a trained run, from what the run itself wrote down.

Every rank records the packs of each step (`runlog/pack_log.py`), the run log has segments and sources, and ms-swift's
log has the losses. So this needs neither the data, nor the model, nor ms-swift, and answers at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from swift_vlpack.config import RECORD_PACKS
from swift_vlpack.errors import ConfigError
from swift_vlpack.pages.values import StepShown, TrainedPack
from swift_vlpack.rows.source import place
from swift_vlpack.runlog.losses import Loss, loss_at, losses_of, spikes
from swift_vlpack.runlog.pack_log import pack_file, packs_of_step, read_packs, recorded_ranks
from swift_vlpack.runlog.segments import segments_of

RECORDED = "packs as recorded"


class TrainedSteps:
    """The steps of a run in an output directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # as the run log names folders of segments
        self.segments = segments_of(self.folder)

    def step(self, step: int) -> StepShown:
        """Return a step, with its loss. Raises `ConfigError` if it is not on record."""
        packs = self._packs(step)
        if not packs:
            raise ConfigError(f"step {step} is not on record{self._what_is()}")
        loss = loss_at(self.losses, step)
        return StepShown(
            step=step,
            packs=packs,
            known_from=RECORDED,
            loss=None if loss is None else loss.value,
            loss_of=None if loss is None else (loss.first, loss.last),
        )

    def spikes(self, most: int) -> list[StepShown]:
        """Return the steps of the largest jumps of the loss, each with the loss before it."""
        found = spikes(self.losses, most)
        if not found:
            raise ConfigError("--loss-spikes: the log has no loss that is higher than the one before it")
        return [
            replace(self.step(step), loss_before=spike.before.value)
            for spike in found
            for step in range(spike.loss.first, spike.loss.last + 1)
        ]

    @cached_property
    def losses(self) -> list[Loss]:
        """Return the losses that ms-swift logged."""
        return losses_of(self.folder, self.segments)

    def _packs(self, step: int) -> list[TrainedPack]:
        """Return the packs of a step as every rank recorded them."""
        origins = self.segments[-1].start.get("origins", {}) if self.segments else {}
        # Take the last segment that began before the step: if several trained it, the last one counts.
        folder = next((one.folder for one in reversed(self.segments) if one.start["step"] < step), self.folder)
        return [
            TrainedPack(
                rank=rank,
                epoch=line["epoch"],
                number=line["pack"],
                ids=line["ids"],
                where=[place_of(name, origins) for name in line["ids"]],
                shared=line.get("shared", ()),
            )
            for rank in recorded_ranks(folder)
            for line in packs_of_step(read_packs(pack_file(folder, rank)), step)
        ]

    def _what_is(self) -> str:
        folders = {self.folder, *(segment.folder for segment in self.segments)}
        files = [pack_file(folder, rank) for folder in folders for rank in recorded_ranks(folder)]
        steps = [line["step"] for file in files for line in read_packs(file)]
        if steps:
            return f", which has steps {min(steps)} to {max(steps)}"
        return f": {self.folder} has no record of its packs; it was started with {RECORD_PACKS}=false"


def place_of(sample_id: str, origins: dict[str, str]) -> str:
    """Return file and line of a sample id, or, for a stream, which knows no files, the number of the row.

    >>> place_of("a:loaded-3/1", {"a": "/data/a.txt"}), place_of("stream:3/1", {})
    ('/data/a.txt loaded row 4', 'row 4 of the stream')
    """
    source, _, row = sample_id.rpartition(":")
    row, _, _ = row.partition("/")  # after the slash comes the number of a part, if the row was cut
    number = row.removeprefix("loaded-")
    if source in origins and number.isdecimal():
        return place(origins[source], int(number), is_loaded=number != row)
    return f"row {int(number) + 1 if number.isdecimal() else row} of the stream"
