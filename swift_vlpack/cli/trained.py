"""A run that was trained, from what it left in its output directory: where its steps are, and its rows as planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.envelope import Whole, check_shape
from swift_vlpack.errors import StateMismatch
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.feed.run_rows import RunRows
from swift_vlpack.feed.saved_rows import SavedSource
from swift_vlpack.feed.streamed_feed import StreamedFeed
from swift_vlpack.host.args import packing_config
from swift_vlpack.host.pack_log import recorded
from swift_vlpack.host.pipeline import fused, measured_rows, planned_feed
from swift_vlpack.host.run import Run
from swift_vlpack.host.sources import load_sources
from swift_vlpack.host.state import load_rows, read_state, refused
from swift_vlpack.pages.values import Trained
from swift_vlpack.plan.cuts import cuts_from
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.run_steps import Stretch
from swift_vlpack.rows.source import place
from swift_vlpack.runlog.loss_log import Loss, losses_of
from swift_vlpack.runlog.run_files import ARGS, BEGUN, LOG, checkpoints
from swift_vlpack.runlog.run_log import FOLDER

_BEGUN = {"step": Whole(), "kind": str, "num_ranks": Whole(1), "accumulation": Whole(1), "state": {"epoch": Whole()}}
PlanOf = Callable[[Stretch], EpochPlan]
WAY_OUT = "say with --config (or the flags of the run) what it was started with"


class TrainedRun:
    """The output directory of a run, or one checkpoint of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = checkpoints(folder)
        lines = [line for line in json_lines.read(folder / FOLDER / BEGUN) if isinstance(line, dict)]
        for line in lines:
            check_shape(line, _BEGUN, BEGUN)
        starts = [at for at, line in enumerate(lines) if line["step"] == 0]
        # Read only the last run: a run that starts anew in the folder of an older one appends to the same files.
        self._begun: list[dict[str, Any]] = lines[starts[-1] :] if starts else lines

    @property
    def kind(self) -> str:
        """Return the kind of the run's feed. If no start was noted, recorded packs mean that rows were streamed."""
        if self._begun:
            return str(self._begun[-1]["kind"])
        return StreamedFeed.kind if self._recorded_ranks() else PlannedFeed.kind

    @property
    def losses(self) -> list[Loss]:
        """What ms-swift logged."""
        resumed = [stretch.step for stretch in self._noted() if stretch.cuts and any(cut[2] for cut in stretch.cuts)]
        start = self._begun[0].get("log_bytes", 0) if self._begun else 0
        lines = (line for line in json_lines.read(self.folder / LOG, start) if isinstance(line, dict))
        return losses_of(lines, resumed)

    @property
    def num_shares(self) -> int | None:
        """In how many shares a stream was read: by ranks times workers; None where that was not noted."""
        line = self._begun[-1] if self._begun else {}
        workers = line.get("num_workers")
        return int(line["num_ranks"]) * max(1, workers) if isinstance(workers, int) else None

    # -- planned ----------------------------------------------------------------------------------------------------

    def stretches(self) -> list[Stretch]:
        """From where the run went on and how: as it noted that itself, else as its checkpoints tell."""
        return self._noted() or self._of_checkpoints()

    def _noted(self) -> list[Stretch]:
        return [
            Stretch(
                line["step"],
                line["state"]["epoch"],
                line["num_ranks"],
                line["accumulation"],
                cuts_from(line["state"]["cuts"]),
                line["state"].get("plan"),
            )
            for line in self._begun
            if line["kind"] == PlannedFeed.kind
        ]

    def _of_checkpoints(self) -> list[Stretch]:
        """Between two checkpoints the run went on as the later one was written, after the last one as that was."""
        begins, layouts = [Stretch(0, 0, 1, 1)], []
        for step, path in self.checkpoints:
            _, state = read_state(path, PlannedFeed.kind)
            cuts = cuts_from(state["cuts"])
            begins.append(Stretch(step, state["epoch"], 1, 1, cuts))
            layouts.append({"num_ranks": cuts[-1].num_ranks, "accumulation": _accumulation(path)})
        if not layouts:
            return []
        return [one._replace(**layout) for one, layout in zip(begins, [*layouts, layouts[-1]], strict=True)]

    def check_stretches(self, plan_of: PlanOf) -> None:
        """Where checkpoints are all there is to go by: what follows from each has to be what the next one says."""
        if self._begun:
            return
        for one, other in pairwise(self._of_checkpoints()):
            if (found := _after(one, other.step, plan_of)) != (other.epoch, sum(cut[2] for cut in other.cuts)):
                raise StateMismatch(
                    f"{self.folder}: between steps {one.step} and {other.step} the run went on in another way than its "
                    f"checkpoints tell (epoch {other.epoch} and not {found[0]}, or other packs): it was resumed on "
                    f"other ranks or with another accumulation, and {FOLDER}/{BEGUN}, which says so, is not there"
                )

    def feed(self, run: Run) -> PlannedFeed:
        """The feed of the run over the rows as they were planned, without a length pass where a checkpoint has them."""
        config = packing_config(run.args)
        sources, _ = load_sources(run.args, config)
        if not self.checkpoints:
            return planned_feed(measured_rows(sources, run.template, run.args, config), run.template, run.args, config)
        path = self.checkpoints[-1][1]
        _, state = read_state(path, PlannedFeed.kind)
        rows = fused(sources, run.template, run.args, config)
        rows = rows.with_sources(_as_planned(RunRows(rows), load_rows(path, state), path))
        return planned_feed(rows, run.template, run.args, config)

    # -- recorded ---------------------------------------------------------------------------------------------------

    def recorded_step(self, step: int) -> list[Trained]:
        """The packs of a step by what every rank recorded; of a step that was trained twice the later ones."""
        origins: Mapping[str, str] = self._begun[-1].get("origins", {}) if self._begun else {}
        found: list[Trained] = []
        for rank in self._recorded_ranks():
            latest: list[dict[str, Any]] = []
            before = None
            for line in recorded(self._record(rank)):
                if line["step"] == step:
                    latest = [*latest, line] if before == step else [line]
                before = line["step"]
            found += [
                Trained(
                    rank=rank,
                    epoch=line["epoch"],
                    number=line["pack"],
                    ids=line["ids"],
                    where=[_place(name, origins) for name in line["ids"]],
                )
                for line in latest
            ]
        return found

    def recorded_steps(self) -> tuple[int, int] | None:
        """The first and the last step that is on record."""
        steps = [line["step"] for rank in self._recorded_ranks() for line in recorded(self._record(rank))]
        return (min(steps), max(steps)) if steps else None

    def _record(self, rank: int) -> Path:
        return self.folder / FOLDER / f"packs_rank{rank}.jsonl"

    def _recorded_ranks(self) -> list[int]:
        found = [path.stem.removeprefix("packs_rank") for path in (self.folder / FOLDER).glob("packs_rank*.jsonl")]
        return sorted(int(rank) for rank in found if rank.isdecimal())


def _place(name: str, origins: Mapping[str, str]) -> str:
    source, _, row = name.rpartition(":")
    row, _, _ = row.partition("/")  # behind which is the part, where a row was cut
    number = row.removeprefix("loaded-")
    if not number.isdecimal():
        return f"row {row} of the stream"
    if source not in origins:
        return f"row {int(number) + 1} of the stream"
    return place(origins[source], int(number), is_loaded=number != row)


def _accumulation(checkpoint: Path) -> int:
    """That of the run which wrote the checkpoint, as ms-swift notes it there."""
    with refused(checkpoint / ARGS, WAY_OUT):
        args = json.loads((checkpoint / ARGS).read_text(encoding="utf-8"))
    return max(1, int(args.get("gradient_accumulation_steps") or 1))


def _after(stretch: Stretch, step: int, plan_of: PlanOf) -> tuple[int, int]:
    """The epoch, and the packs of it, that are behind after a step, if the stretch simply goes on."""
    while True:
        plan: EpochPlan = plan_of(stretch)
        left = plan.num_left_per_rank
        num_here = -(-left // stretch.accumulation)
        if step <= stretch.step + num_here:
            taken = min(left, (step - stretch.step) * stretch.accumulation)
            return stretch.epoch, plan.num_consumed + taken * stretch.num_ranks
        stretch = stretch._replace(step=stretch.step + num_here, epoch=stretch.epoch + 1, cuts=())


def _as_planned(rows: RunRows, saved: list[SavedSource], path: Path) -> Sequence[Any]:
    changed = rows.compared(saved)
    if changed is None:
        names = ", ".join(source.name for source in saved)
        raise StateMismatch(f"{path} was written with other sources ({names}); {WAY_OUT}")
    if changed.texts:
        raise StateMismatch(f"{path}: the rows are other ones than then: {changed.texts}")
    rows.take_sizes(saved)
    return rows.sources
