"""Read a trained run from its output directory: its spans of steps, its losses, its rows with the planned sizes.

The run log records where epochs began and were resumed. Without the log, as for a checkpoint that was copied alone, the
checkpoints tell the same, unless the run was resumed on other ranks in between.
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
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.pipeline import fused, measured_rows, planned_feed
from swift_vlpack.host.run import Run
from swift_vlpack.host.sources import load_sources
from swift_vlpack.host.state import load_rows, read_state, refused
from swift_vlpack.pages.values import TrainedPack
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
        self.folder = folder.absolute()  # as the run log names folders of segments
        self.segments = segments_of(self.folder)
        self.checkpoints = [one for one in checkpoints(self.folder) if one.is_complete]

    @property
    def was_planned(self) -> bool:
        """Tell whether packs were planned. Without a run log, recorded packs mean that the run was a stream."""
        if self.segments:
            return bool(self.segments[-1].start["mode"] == PlannedFeed.kind)
        return not recorded_ranks(self.folder)

    @cached_property
    def losses(self) -> list[Loss]:
        """Return the losses that ms-swift logged."""
        return losses_of(self.folder, self.segments)

    @property
    def num_shares(self) -> int | None:
        """Return the number of readers (ranks times workers) that shared a stream; None without a run log."""
        if not self.segments:
            return None
        start = self.segments[-1].start
        return int(start["num_ranks"]) * max(1, int(start["num_workers"]))

    # -- planned packs ----------------------------------------------------------------------------------------------

    def spans(self) -> list[EpochSpan]:
        """Return the spans of steps of all epochs, from the run log or, without one, from the checkpoints."""
        if self.segments:
            planned = (segment for segment in self.segments if segment.start["mode"] == PlannedFeed.kind)
            return [span for segment in planned for span in segment.spans()]
        return self._spans_of_checkpoints()

    def _spans_of_checkpoints(self) -> list[EpochSpan]:
        """Return spans, assuming that the run had the ranks and the accumulation of each checkpoint up to it.

        After the last checkpoint, the ranks and the accumulation of that checkpoint are assumed.
        """
        spans = [EpochSpan(0, 0, 1, 1)]  # the checkpoint at the end of the span says its ranks and accumulation
        for checkpoint in self.checkpoints:
            _, state = read_state(checkpoint.path, PlannedFeed.kind)
            cuts = cuts_from(state["cuts"])
            num_ranks, accumulation = cuts[-1].num_ranks, _accumulation(checkpoint.path)
            spans[-1] = spans[-1]._replace(num_ranks=num_ranks, accumulation=accumulation)
            spans.append(EpochSpan(checkpoint.step, state["epoch"], num_ranks, accumulation, cuts))
        return spans if self.checkpoints else []

    def check_spans(self, plan_of: PlanOf) -> None:
        """Check the spans that were guessed from checkpoints: each span has to end where the next one begins.

        Raises `StateMismatch` if the run was resumed on other ranks or with another accumulation between two of them.
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
        """Build the feed of the run, over rows with the sizes that it planned with, as its last checkpoint has them."""
        config = packing_config(run.args)
        sources, _ = load_sources(run.args, config)
        if not self.checkpoints:  # killed before its first checkpoint: measure the rows again
            return planned_feed(measured_rows(sources, run.template, run.args, config), run.template, run.args, config)
        path = self.checkpoints[-1].path
        _, state = read_state(path, PlannedFeed.kind)
        rows = fused(sources, run.template, run.args, config)
        rows = rows.with_sources(_as_planned(RunRows(rows.sources), load_rows(path, state), path))
        feed = planned_feed(rows, run.template, run.args, config)
        if feed.kept_step is not None:
            feed.keep_step_of(state)
        return feed

    # -- recorded packs ---------------------------------------------------------------------------------------------

    def recorded_step(self, step: int) -> list[TrainedPack]:
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
                where=[_place(name, origins) for name in line["ids"]],
                shared=line.get("shared", ()),
            )
            for rank in recorded_ranks(folder)
            for line in packs_of_step(read_packs(pack_file(folder, rank)), step)
        ]

    def recorded_steps(self) -> tuple[int, int] | None:
        """Return the first and the last recorded step; None without a record."""
        folders = {self.folder, *(segment.folder for segment in self.segments)}
        files = [pack_file(folder, rank) for folder in folders for rank in recorded_ranks(folder)]
        steps = [line["step"] for file in files for line in read_packs(file)]
        return (min(steps), max(steps)) if steps else None


def _place(name: str, origins: dict[str, str]) -> str:
    """Return file and line of a sample id, or, for a stream, which knows no files, the number of the row."""
    source, _, row = name.rpartition(":")
    row, _, _ = row.partition("/")  # after the slash comes the number of a part, if the row was cut
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
    """Give rows the saved sizes. Raises `StateMismatch` if sources or rows are not those of the saved run."""
    changed = rows.compared(saved)
    if changed is None:
        names = ", ".join(source.name for source in saved)
        raise StateMismatch(f"{path} was written with other sources ({names}); {WAY_OUT}")
    if changed.texts:
        raise StateMismatch(f"{path}: the rows are not those of the saved run: {changed.texts}")
    rows.take_sizes(saved)
    return rows.sources
