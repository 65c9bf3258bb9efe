"""`vlpack inspect --run`: the rows of an optimizer step of a trained run, from what the run itself wrote down.

The run log says which segment trained the step, every rank has recorded the packs of that segment
(`runlog/pack_log.py`), and ms-swift's log has the losses. So this needs neither the data, nor the model, nor ms-swift,
and answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.config import RECORD_PACKS
from swift_vlpack.errors import ConfigError
from swift_vlpack.pages.values import StepShown, TrainedPack
from swift_vlpack.rows.source import place
from swift_vlpack.runlog.losses import loss_at, losses_of
from swift_vlpack.runlog.pack_log import pack_file, read_packs
from swift_vlpack.runlog.segments import Segment, segments_of


def trained_step(folder: Path, step: int) -> StepShown:
    """Return a step of the run in a folder, with its loss. Raises `ConfigError` if it is not on record."""
    segments = segments_of(folder)
    # If several segments trained the step, the last one counts: what the others trained was lost.
    segment = next((one for one in reversed(segments) if one.start["step"] < step), None)
    if segment is None:
        first = segments[0].start
        raise ConfigError(
            f"step {step} is not on record: the log in {folder} begins after step {first['step']}, where the run was "
            f"resumed from {first['checkpoint']}; name the folder that trained the steps before"
        )
    lines = [(rank, line) for rank, line in _packs(folder, segment) if line["step"] == step]
    if not lines:
        raise ConfigError(f"step {step} is not on record{_what_is(folder, segments)}")
    loss = loss_at(losses_of(folder, segments), step)
    missing = sorted({*range(segment.start["num_ranks"])} - {rank for rank, _ in lines})
    notes = [f"rank {rank} has not recorded this step in {pack_file(folder, rank)}" for rank in missing]
    return StepShown(
        step=step,
        packs=[_pack(rank, line, segment.start["origins"]) for rank, line in lines],
        loss=None if loss is None else loss.value,
        loss_of=None if loss is None else (loss.first, loss.last),
        notes=notes if loss is not None else [*notes, "ms-swift has not logged a loss of this step"],
    )


def _packs(folder: Path, segment: Segment) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the packs that a segment trained, as (rank, line of its record)."""
    for rank in range(segment.start["num_ranks"]):
        for line in read_packs(pack_file(folder, rank), segment.start["when"]):
            yield rank, line


def _pack(rank: int, line: Mapping[str, Any], origins: Mapping[str, str]) -> TrainedPack:
    return TrainedPack(
        rank=rank,
        epoch=line["epoch"],
        number=line["pack"],
        ids=line["ids"],
        where=[place_of(name, origins) for name in line["ids"]],
        lengths=line["lengths"],
        shared=line.get("shared", ()),
    )


def _what_is(folder: Path, segments: Sequence[Segment]) -> str:
    """Say which steps are on record, or why none are."""
    steps = [line["step"] for one in segments for _, line in _packs(folder, one) if one.is_kept(line["step"])]
    if not steps:
        return f": {pack_file(folder, 0)} has no pack of this run, which was trained with {RECORD_PACKS}=false"
    return f", which has steps {min(steps)} to {max(steps)}; {RECORD_PACKS}=true keeps all steps of a long run"


def place_of(sample_id: str, origins: Mapping[str, str]) -> str:
    """Return file and line of a sample id, or, for a stream, which knows no files, the number of the row.

    >>> place_of("a:loaded-3/1", {"a": "/data/a.txt"}), place_of("stream:3/1", {})
    ('/data/a.txt loaded row 4', 'row 4 of the stream')
    """
    source, _, row = sample_id.rpartition(":")
    row, _, _ = row.partition("/")  # after the slash comes the number of a part, if the row was cut
    number = int(row.removeprefix("loaded-"))
    if source in origins:
        return place(origins[source], number, is_loaded=row.startswith("loaded-"))
    return f"row {number + 1} of the stream"
