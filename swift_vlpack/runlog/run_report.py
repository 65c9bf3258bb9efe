"""The report of a run: plain numbers and texts, out of the files of its folders.

What was trained comes from the notes of the run (`run.jsonl`): steps that a later leg trained again count once. A run
that kept none, of an earlier version, is reported from its log lines, epoch reports and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.runlog import files
from swift_vlpack.runlog.epochs import epochs_of
from swift_vlpack.runlog.left_out import left_out_report
from swift_vlpack.runlog.legs import Leg, legs_of, resumed_folder
from swift_vlpack.runlog.run_folder import RunFolder
from swift_vlpack.runlog.run_log import EPOCH, FILE, FOLDER
from swift_vlpack.runlog.series import losses_of, series_of, series_of_lines, without_number
from swift_vlpack.runlog.step_counts import share
from swift_vlpack.runlog.timeline import timeline_of
from swift_vlpack.runlog.totals import Totals, of_epochs, of_legs
from swift_vlpack.words import counted

_WITHOUT_NOTES = "Totals are those of its epoch reports and checkpoints, without time and padding"
NO_NOTES = (
    "this run kept no notes (vlpack/run.jsonl): it was trained by an earlier version, or they could not be written. "
    f"{_WITHOUT_NOTES}"
)


_MOST_STEPS = 5
"""That a note names."""


def run_report(run: RunFolder) -> dict[str, Any]:
    """All that is known of a run."""
    legs = legs_of(run.path)
    folders = list(dict.fromkeys([*(leg.folder for leg in legs), run.path]))
    losses = losses_of(folders, legs)
    last_step = legs[-1].step if legs else max(losses, default=0)
    checkpoints = [one for folder in folders for one in files.checkpoints(folder) if one.step <= last_step]
    epochs = files.epoch_reports(folders, last_step)
    totals = of_legs(legs) if legs else of_epochs(epochs, checkpoints)
    args = files.read_json(run.path / "args.json")
    return {
        "folder": str(run.path),
        "run": _about(args, legs, last_step),
        "trained": totals.as_json(),
        "unpacked": None if totals.num_tokens_unpacked is None else _unpacked(totals, legs),
        "balance": _balance(legs, totals),
        "ratio_by": legs[-1].facts.get("ratio_by") if legs else None,
        "sources": _sources(legs, totals),
        "left_out": left_out_report(run.path, folders, epochs),
        "epochs": epochs_of(epochs, checkpoints, legs),
        "timeline": timeline_of(legs, checkpoints),
        "checkpoints": [_about_checkpoint(one) for one in checkpoints],
        "series": series_of(legs, losses) if legs else series_of_lines(losses),
        "steps_without_loss": without_number(losses),
        "notes": [*_notes(run, legs), *_note_of_losses(without_number(losses))],
    }


def _about(args: dict[str, Any], legs: Sequence[Leg], last_step: int) -> dict[str, Any]:
    facts = legs[-1].facts if legs else {}
    return {
        "model": args.get("model"),
        "has_ended": legs[-1].has_ended if legs else None,
        "last_sign": _last_sign(legs),
        "step": last_step,
        "num_steps": facts.get("num_steps"),
        "num_ranks": [leg.facts["num_ranks"] for leg in legs],
        "mode": facts.get("mode"),
        "packing_length": facts.get("packing_length", args.get("packing_length")),
        "packing_strategy": facts.get("packing_strategy"),
        "attention": facts.get("attention"),
        "proof": facts.get("proof"),
    }


def _why_no_notes(path: Path) -> str:
    """Say why nothing is known from the notes of a run."""
    try:
        num_lines = len(path.read_bytes().splitlines())
    except FileNotFoundError:
        return NO_NOTES
    except OSError as error:
        return f"the notes of this run ({path}) cannot be read: {error.strerror}. {_WITHOUT_NOTES}"
    lines = counted(num_lines, "line")
    return f"the notes of this run ({path}, {lines}) are damaged: no start of a run is in them. {_WITHOUT_NOTES}"


def _last_sign(legs: Sequence[Leg]) -> str | None:
    return (legs[-1].events or (legs[-1].facts,))[-1]["when"] if legs else None


def _unpacked(totals: Totals, legs: Sequence[Leg]) -> dict[str, Any]:
    """The same samples as padded batches, at the tokens a second of the packed run."""
    assert totals.num_tokens_unpacked is not None
    size = legs[-1].facts["unpacked_batch_size"] or 1
    num_packed = totals.num_tokens + totals.num_padding
    saved = totals.num_tokens_unpacked - num_packed
    seconds = totals.seconds * (totals.num_tokens_unpacked / num_packed if num_packed else 1.0)
    return {
        "batch_size": size,
        "reference": reference(size),
        "num_tokens": totals.num_tokens_unpacked,
        "num_padding_saved": saved,
        "padding_saved": round(share(saved, totals.num_tokens_unpacked), 4),
        "seconds_estimated": round(seconds, 1),
        "seconds_saved_estimated": round(seconds - totals.seconds, 1),
    }


def reference(batch_size: int) -> str:
    """Say what packing is compared with."""
    if batch_size == 1:
        return "the same samples one by one (per_device_train_batch_size 1, as it was asked for): these have no padding"
    return (
        f"the same samples in padded batches of {batch_size} (per_device_train_batch_size as it was asked for), in the "
        "order in which they were trained"
    )


def _balance(legs: Sequence[Leg], totals: Totals) -> dict[str, Any]:
    planned = [
        event["balance"] for leg in legs for event in leg.events if event["event"] == EPOCH and "balance" in event
    ]
    slowest = sum(leg.facts["num_ranks"] * event["num_tokens_slowest"] for leg in legs for event in leg.steps)
    return {
        "planned": round(sum(planned) / len(planned), 4) if planned else None,
        "trained": round(slowest / totals.num_tokens, 4) if legs and totals.num_tokens else None,
    }


def _sources(legs: Sequence[Leg], totals: Totals) -> dict[str, dict[str, Any]]:
    known = legs[-1].facts.get("sources", {}) if legs else {}
    return {
        name: {
            "rows": known.get(name, {}).get("rows"),
            "ratio": known.get(name, {}).get("ratio"),
            "asked_share": known.get(name, {}).get("asked_share"),
            "num_samples": num_samples,
            "share_of_samples": round(share(num_samples, totals.num_samples), 4),
            "num_tokens": num_tokens,
            "share_of_tokens": round(share(num_tokens, totals.num_tokens), 4),
        }
        for name in sorted({*known, *totals.sources})
        for num_samples, num_tokens in [totals.sources.get(name, (0, 0))]
    }


def _about_checkpoint(one: files.Checkpoint) -> dict[str, Any]:
    return {"step": one.step, "path": str(one.path), "is_complete": one.state is not None}


def _note_of_losses(steps: Sequence[int]) -> list[str]:
    if not steps:
        return []
    others = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    shown = ", ".join(map(str, steps[:_MOST_STEPS]))
    return [
        f"the logged loss is infinite or no number at {counted(len(steps), 'step')}: {shown}{others} "
        f"(`vlpack inspect --run ... --step {steps[0]}` shows its rows)"
    ]


def _notes(run: RunFolder, legs: Sequence[Leg]) -> list[str]:
    """What a reader has to know of the numbers."""
    notes = []
    if run.others:
        notes.append(f"the newest of {len(run.others) + 1} runs here is shown; the others are {', '.join(run.others)}")
    if not legs:
        notes.append(_why_no_notes(run.path / FOLDER / FILE))
        return notes
    for leg in legs:
        lost = list(leg.lost_steps)
        if lost:
            num_tokens = sum(event["num_tokens"] for event in lost)
            notes.append(
                f"steps up to {lost[-1]['step']} of {leg.folder.name} lie behind step {leg.last_step}, which was "
                f"resumed from: {num_tokens} tokens were trained again, and count once"
            )
    first = legs[0]
    if "checkpoint" in first.facts:
        there = resumed_folder(first)
        why = "is not there any more" if there is None else f"kept no notes in {there / FOLDER}"
        notes.append(
            f"the run goes on from {first.facts['checkpoint']}, whose run {why}: the numbers begin behind step "
            f"{first.facts['step']}"
        )
    return notes
