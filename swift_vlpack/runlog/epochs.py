"""The epochs of a run: their accounts, and of one that is not finished what is on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift_vlpack.runlog.files import Checkpoint
from swift_vlpack.runlog.legs import Leg
from swift_vlpack.runlog.totals import as_counted, of_legs

Epoch = dict[str, Any]


def epochs_of(
    reports: Mapping[int, Mapping[str, Any]], checkpoints: Sequence[Checkpoint], legs: Sequence[Leg]
) -> list[Epoch]:
    """In their order; `as_of` says how far an unfinished one is known."""
    found = [{**report, "is_finished": True, "as_of": None} for report in reports.values()]
    unfinished = _noted(reports, legs) if legs else _saved(reports, checkpoints)
    return sorted([*found, *unfinished], key=lambda epoch: int(epoch["epoch"]))


def _noted(reports: Mapping[int, Any], legs: Sequence[Leg]) -> list[Epoch]:
    """From the notes of steps, none of which is of two epochs."""
    last_steps = {event["epoch"]: event["step"] for leg in legs for event in leg.steps}
    return [
        {"epoch": epoch, **of_legs(legs, epoch).as_json(), "is_finished": False, "as_of": f"step {step}"}
        for epoch, step in last_steps.items()
        if epoch not in reports
    ]


def _saved(reports: Mapping[int, Any], checkpoints: Sequence[Checkpoint]) -> list[Epoch]:
    """From the newest checkpoint, of a run without notes."""
    newest = [one for one in checkpoints if one.state is not None and one.state["epoch"] not in reports][-1:]
    return [{**as_counted(one.state), "is_finished": False, "as_of": one.path.name} for one in newest]
