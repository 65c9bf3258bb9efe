"""Make the report of a run as a dictionary of numbers and texts, which `vlpack report --json` prints as it is.

Counts of trained samples come from the run log; steps that a resume trained again count once. ms-swift's log has the
losses, and the reports of finished epochs say how their counts add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_vlpack.plan.same_steps import steps_are_other
from swift_vlpack.runlog.account import shared_json
from swift_vlpack.runlog.counts import Counts, SourceCounts, share
from swift_vlpack.runlog.events import FOLDER, RESUME
from swift_vlpack.runlog.folder import ARGS, RunFolder, epoch_reports, read_json
from swift_vlpack.runlog.left_out import FILE as LEFT_OUT
from swift_vlpack.runlog.left_out import left_out_report
from swift_vlpack.runlog.losses import Loss, losses_of
from swift_vlpack.runlog.segments import Segment, segments_of
from swift_vlpack.words import counted

Report = dict[str, Any]
_MAX_STEPS_NAMED = 5


def run_report(run: RunFolder) -> Report:
    """Return the report of a run. Raises `ConfigError` if its log is missing or damaged."""
    segments = segments_of(run.path)
    start, last_step = segments[-1].start, segments[-1].last_step
    losses = losses_of(run.path, segments)
    reports = epoch_reports(run.path, last_step)
    steps = _steps_of(segments, losses)
    counts = steps.counts
    without_number = [loss.last for loss in losses if not math.isfinite(loss.value)]
    return {
        "folder": str(run.path),
        "run": {
            "model": read_json(run.path / ARGS).get("model"),
            "has_ended": segments[-1].has_ended,
            "last_sign": segments[-1].last["when"],
            "step": last_step,
            "num_ranks": [segment.start["num_ranks"] for segment in segments],
            **{name: start.get(name) for name in _ABOUT_RUN},
        },
        "trained": _trained(counts),
        "unpacked": _unpacked(counts, start["unpacked_batch_size"]),
        "balance": _balance(segments, steps),
        "ratio_by": start.get("ratio_by"),
        "sources": _sources(start.get("sources", {}), counts),
        "left_out": left_out_report(run.path / FOLDER / LEFT_OUT, list(reports.values())),
        "epochs": _epochs(reports, steps),
        "series": steps.series,
        "steps_without_loss": without_number,
        "notes": list(_notes(run, segments, without_number, counts.num_failed_late)),
    }


_ABOUT_RUN = ("num_steps", "mode", "packing_length", "packing_strategy", "attention", "proof")


@dataclass(slots=True)
class _Steps:
    """The steps that the model has, without those that were lost: added up, and one point for each `steps` event."""

    counts: Counts = field(default_factory=lambda: Counts(packing_length=1))
    by_epoch: dict[int, Counts] = field(default_factory=dict)
    last_of_epoch: dict[int, int] = field(default_factory=dict)
    num_tokens_slowest: int = 0
    """Tokens as if every rank of a step had those of the slowest one, because a step takes as long as it."""
    series: list[Report] = field(default_factory=list)


def _steps_of(segments: Iterable[Segment], losses: Sequence[Loss]) -> _Steps:
    logged = {one.last: one.value for one in losses if math.isfinite(one.value)}
    steps = _Steps()
    for segment in segments:
        for event in segment.steps:
            counts = Counts.from_event(event, segment.start["packing_length"])
            steps.counts.merge(counts)
            steps.by_epoch.setdefault(event["epoch"], Counts(packing_length=1)).merge(counts)
            steps.last_of_epoch[event["epoch"]] = event["step"]
            steps.num_tokens_slowest += segment.start["num_ranks"] * counts.num_tokens_slowest
            steps.series.append(
                {
                    "step": event["step"],
                    "fill": round(counts.fill_mean, 4) if counts.num_room else None,
                    "tokens_per_second": round(share(counts.num_tokens, counts.seconds), 1),
                    "loss": logged.get(event["step"]),
                }
            )
    return steps


# -- sections ---------------------------------------------------------------------------------------------------------


def _trained(counts: Counts) -> Report:
    vision, seconds = counts.num_vision_tokens, counts.seconds
    return {
        "num_steps": counts.num_steps,
        "num_packs": counts.num_packs,
        "num_samples": counts.num_packed,
        "num_tokens": counts.num_tokens,
        "num_images": counts.num_images,
        "num_padding": counts.num_padding,
        "num_vision_tokens": vision,
        "vision_share": round(share(vision, counts.num_tokens), 4),
        "fill_mean": round(counts.fill_mean, 4),
        "samples_per_pack": round(share(counts.num_packed, counts.num_packs), 2),
        "num_single_long": counts.num_single_long,
        "seconds": round(seconds, 1) or None,
        "tokens_per_second": round(counts.num_tokens / seconds, 1) if seconds else None,
        "samples_per_second": round(counts.num_packed / seconds, 3) if seconds else None,
        "shared": shared_json(counts) if counts.tells_of_sharing else None,
    }


def _unpacked(counts: Counts, batch_size: int) -> Report:
    """Compare with the same samples in padded batches, assuming the same tokens a second, padding included."""
    num_packed, num_unpacked = counts.num_tokens + counts.num_padding, counts.num_tokens_unpacked
    # Without the tokens that samples share: these are saved by sharing, not by packing.
    seconds = counts.seconds * (1 + share(counts.num_padding_saved, num_packed))
    return {
        "batch_size": batch_size,
        "reference": _reference(batch_size),
        "num_tokens": num_unpacked,
        "num_padding_saved": counts.num_padding_saved,
        "padding_saved": round(share(counts.num_padding_saved, num_unpacked), 4),
        "seconds_estimated": round(seconds, 1),
        "seconds_saved_estimated": round(seconds - counts.seconds, 1),
    }


def _reference(batch_size: int) -> str:
    if batch_size == 1:
        return "the same samples one by one (per_device_train_batch_size 1, as it was asked for): these have no padding"
    return (
        f"the same samples in padded batches of {batch_size} (per_device_train_batch_size as it was asked for), in the "
        "order in which they were trained"
    )


def _balance(segments: Sequence[Segment], steps: _Steps) -> Report:
    planned = [event["balance"] for segment in segments for event in segment.epochs if "balance" in event]
    num_tokens = steps.counts.num_tokens
    return {
        "planned": round(sum(planned) / len(planned), 4) if planned else None,
        "trained": round(steps.num_tokens_slowest / num_tokens, 4) if num_tokens else None,
    }


def _sources(known: Mapping[str, Report], counts: Counts) -> dict[str, Report]:
    return {
        name: {
            "rows": known.get(name, {}).get("rows"),
            "ratio": known.get(name, {}).get("ratio"),
            "asked_share": known.get(name, {}).get("asked_share"),
            "num_samples": trained.num_packed,
            "share_of_samples": round(share(trained.num_packed, counts.num_packed), 4),
            "num_tokens": trained.num_tokens,
            "share_of_tokens": round(share(trained.num_tokens, counts.num_tokens), 4),
        }
        for name in sorted({*known, *counts.sources})
        for trained in [counts.sources.get(name, SourceCounts())]
    }


def _epochs(reports: Mapping[int, Report], steps: _Steps) -> list[Report]:
    """Return the accounts of all epochs; `as_of` says how far an unfinished one is known."""
    epochs = [{**report, "is_finished": True, "as_of": None} for report in reports.values()]
    for epoch in steps.by_epoch.keys() - reports.keys():
        as_of = f"step {steps.last_of_epoch[epoch]}"
        epochs.append({"epoch": epoch, **_trained(steps.by_epoch[epoch]), "is_finished": False, "as_of": as_of})
    return sorted(epochs, key=lambda epoch: int(epoch["epoch"]))


# -- notes ------------------------------------------------------------------------------------------------------------


def _notes(
    run: RunFolder, segments: Sequence[Segment], without_number: Sequence[int], num_failed_late: int
) -> Iterator[str]:
    """Yield what a reader has to know about the numbers: other runs, lost steps, a missing beginning, wrong losses."""
    if run.others:
        yield f"the newest of {len(run.others) + 1} runs here is shown; the others are {', '.join(run.others)}"
    for segment in segments:
        if lost := list(segment.lost_steps):
            num_tokens = sum(event["num_tokens"] for event in lost)
            yield (
                f"the run was resumed from step {segment.stops_at}, and its steps up to {lost[-1]['step']} were lost: "
                f"{num_tokens} tokens were trained again, and count once"
            )
    first = segments[0].start
    if first["event"] == RESUME:
        yield (
            f"the run was resumed from {first['checkpoint']}, and the log of what it trained before is not here: the "
            f"numbers begin after step {first['step']}"
        )
    if without_number:
        others = f" and {len(without_number) - _MAX_STEPS_NAMED} more" if len(without_number) > _MAX_STEPS_NAMED else ""
        yield (
            f"the logged loss is infinite or no number at {counted(len(without_number), 'step')}: "
            f"{', '.join(map(str, without_number[:_MAX_STEPS_NAMED]))}{others} "
            f"(`vlpack inspect --run ... --step {without_number[0]}` shows its rows)"
        )
    if num_failed_late:
        yield steps_are_other(num_failed_late)
