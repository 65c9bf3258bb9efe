"""Look back at a run that was trained, from its output directory: its spans of steps, its losses, its rows as planned.

The run log says where epochs began and went on. Without it, as for a checkpoint that was copied alone, the checkpoints
tell the same, unless the run was resumed on other ranks in between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_vlpack.errors import StateMismatch
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.feed.saved_rows import RunRows, SavedSource
from swift_vlpack.feed.streamed_feed import StreamedFeed
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.pipeline import fused, measured_rows, planned_feed
from swift_vlpack.host.run import Run
from swift_vlpack.host.sources import load_sources
from swift_vlpack.host.state import load_rows, read_state, refused
from swift_vlpack.pages.values import Trained
from swift_vlpack.plan.cuts import cuts_from, num_consumed
from swift_vlpack.rows.source import place
from swift_vlpack.runlog.events import FILE, FOLDER
from swift_vlpack.runlog.folder import ARGS, checkpoints
from swift_vlpack.runlog.losses import Loss, losses_of
from swift_vlpack.runlog.pack_log import pack_file, packs_of_step, read_packs, recorded_ranks
from swift_vlpack.runlog.run_steps import EpochSpan, PlanOf, position_after
from swift_vlpack.runlog.segments import segments_of

WAY_OUT = "say with --config (or the flags of the run) what it was started with"


class TrainedRun:
    """The output directory of a run, or one checkpoint of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segments = segments_of(folder)
        self.checkpoints = [one for one in checkpoints(folder) if one.is_complete]

    @property
    def kind(self) -> str:
        """Return the kind of the run's feed. Without a run log, recorded packs mean that rows were streamed."""
        if self.segments:
            return str(self.segments[-1].start["mode"])
        return StreamedFeed.kind if recorded_ranks(self.folder) else PlannedFeed.kind

    @cached_property
    def losses(self) -> list[Loss]:
        """Return what ms-swift logged."""
        return losses_of(self.folder, self.segments)

    @property
    def num_shares(self) -> int | None:
        """Return in how many shares a stream was read, which is ranks times workers; None if that is not known."""
        if not self.segments:
            return None
        start = self.segments[-1].start
        return int(start["num_ranks"]) * max(1, int(start["num_workers"]))

    # -- planned ----------------------------------------------------------------------------------------------------

    def spans(self) -> list[EpochSpan]:
        """Return where epochs began and went on: from the run log, else from the checkpoints."""
        if self.segments:
            planned = (segment for segment in self.segments if segment.start["mode"] == PlannedFeed.kind)
            return [span for segment in planned for span in segment.spans()]
        return self._spans_of_checkpoints()

    def _spans_of_checkpoints(self) -> list[EpochSpan]:
        """Return spans as if the run had the layout of a checkpoint up to it, and that of the last one after it."""
        begins, layouts = [EpochSpan(0, 0, 1, 1)], []
        for checkpoint in self.checkpoints:
            _, state = read_state(checkpoint.path, PlannedFeed.kind)
            cuts = cuts_from(state["cuts"])
            begins.append(EpochSpan(checkpoint.step, state["epoch"], 1, 1, cuts))
            layouts.append({"num_ranks": cuts[-1].num_ranks, "accumulation": _accumulation(checkpoint.path)})
        if not layouts:
            return []
        return [one._replace(**layout) for one, layout in zip(begins, [*layouts, layouts[-1]], strict=True)]

    def check_spans(self, plan_of: PlanOf) -> None:
        """Check that what follows from each checkpoint is what the next one says, if there is nothing else to go by.

        Raises `StateMismatch` if not: the run was resumed in another layout between two checkpoints.
        """
        if self.segments:
            return
        for span, after in pairwise(self._spans_of_checkpoints()):
            epoch, num_packs = position_after(span, after.step, plan_of)
            if (epoch, num_packs) != (after.epoch, num_consumed(after.cuts)):
                raise StateMismatch(
                    f"{self.folder}: between steps {span.step} and {after.step} the run went on in another way than "
                    f"its checkpoints tell (epoch {after.epoch} and not {epoch}, or other packs): it was resumed on "
                    f"other ranks or with another accumulation, and {FOLDER}/{FILE}, which says so, is not there"
                )

    def feed(self, run: Run) -> PlannedFeed:
        """Build the feed of the run over its rows as they were planned; a checkpoint spares the length pass."""
        config = packing_config(run.args)
        sources, _ = load_sources(run.args, config)
        if not self.checkpoints:  # killed before the first one: sizes have to be measured again
            return planned_feed(measured_rows(sources, run.template, run.args, config), run.template, run.args, config)
        path = self.checkpoints[-1].path
        _, state = read_state(path, PlannedFeed.kind)
        rows = fused(sources, run.template, run.args, config)
        rows = rows.with_sources(_as_planned(RunRows(rows.sources), load_rows(path, state), path))
        return planned_feed(rows, run.template, run.args, config)

    # -- recorded ---------------------------------------------------------------------------------------------------

    def recorded_step(self, step: int) -> list[Trained]:
        """Return the packs of a step as every rank recorded them."""
        origins = self.segments[-1].start.get("origins", {}) if self.segments else {}
        # The last segment that began before the step, because it trained the step again if another one had.
        folder = next((one.folder for one in reversed(self.segments) if one.start["step"] < step), self.folder)
        return [
            Trained(
                rank=rank,
                epoch=line["epoch"],
                number=line["pack"],
                ids=line["ids"],
                where=[_place(name, origins) for name in line["ids"]],
            )
            for rank in recorded_ranks(folder)
            for line in packs_of_step(read_packs(pack_file(folder, rank)), step)
        ]

    def recorded_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step on record."""
        folders = {self.folder, *(segment.folder for segment in self.segments)}
        files = [pack_file(folder, rank) for folder in folders for rank in recorded_ranks(folder)]
        steps = [line["step"] for file in files for line in read_packs(file)]
        return (min(steps), max(steps)) if steps else None


def _place(name: str, origins: dict[str, str]) -> str:
    """Return file and line of a sample id, or the row of a stream that has no file."""
    source, _, row = name.rpartition(":")
    row, _, _ = row.partition("/")  # after the slash is the part, where a row was cut
    number = row.removeprefix("loaded-")
    if not number.isdecimal():
        return f"row {row} of the stream"
    if source not in origins:
        return f"row {int(number) + 1} of the stream"
    return place(origins[source], int(number), is_loaded=number != row)


def _accumulation(checkpoint: Path) -> int:
    """Return the accumulation of the run that wrote a checkpoint, from ms-swift's arguments there."""
    with refused(checkpoint / ARGS, WAY_OUT):
        args = json.loads((checkpoint / ARGS).read_text(encoding="utf-8"))
    return max(1, int(args.get("gradient_accumulation_steps") or 1))


def _as_planned(rows: RunRows, saved: list[SavedSource], path: Path) -> Sequence[Any]:
    changed = rows.compared(saved)
    if changed is None:
        names = ", ".join(source.name for source in saved)
        raise StateMismatch(f"{path} was written with other sources ({names}); {WAY_OUT}")
    if changed.texts:
        raise StateMismatch(f"{path}: the rows are not those of the saved run: {changed.texts}")
    rows.take_sizes(saved)
    return rows.sources
