"""Make the report of a run as a dictionary of numbers and texts, which `vlpack report --json` prints as it is.

Counts of trained samples come from the run log. Steps that a resume trained again count once. If the log is missing,
the epoch reports, the checkpoints and ms-swift's log are read instead, which have neither times nor padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.errors import StateMismatch
from swift_vlpack.plan.same_steps import steps_are_other
from swift_vlpack.runlog.account import account_json, shared_json
from swift_vlpack.runlog.counts import Counts, SourceCounts, share
from swift_vlpack.runlog.events import FILE, FOLDER, RESUME
from swift_vlpack.runlog.folder import ARGS, Checkpoint, RunFolder, checkpoints, epoch_reports, read_json
from swift_vlpack.runlog.left_out import left_out_report
from swift_vlpack.runlog.losses import losses_of
from swift_vlpack.runlog.over_time import series_of, timeline_of
from swift_vlpack.runlog.segments import Segment, resumed_folder, segments_of
from swift_vlpack.words import counted

Report = dict[str, Any]
_WITHOUT_LOG = "The numbers are from epoch reports and checkpoints, which know neither time nor padding"
_MAX_STEPS_NAMED = 5
_FILL_UNITS = 10_000
"""Units of fill in a pack: epoch reports round fill to four digits, so it is a whole number of these units."""


def run_report(run: RunFolder) -> Report:
    """Return the report of a run."""
    segments = segments_of(run.path)
    folders = list(dict.fromkeys([*(segment.folder for segment in segments), run.path]))
    losses = losses_of(run.path, segments)
    last_step = segments[-1].last_step if segments else max((loss.last for loss in losses), default=0)
    saved = [one for folder in folders for one in checkpoints(folder) if one.step <= last_step]
    reports = epoch_reports(folders, last_step)
    # Without a run log, a last unfinished epoch is known from the last checkpoint in it.
    unfinished = [] if segments else [one for one in _accounts(saved) if one["epoch"] not in reports][-1:]
    of_epochs = counts_by_epoch(segments)
    counts = _sum(of_epochs.values() if segments else map(_from_account, [*reports.values(), *unfinished]))
    args = read_json(run.path / ARGS)
    without_number = [loss.last for loss in losses if loss.number is None]
    return {
        "folder": str(run.path),
        "run": _about(args, segments, last_step),
        "trained": _trained(counts, is_logged=bool(segments)),
        "unpacked": _unpacked(counts, segments[-1].start["unpacked_batch_size"]) if segments else None,
        "balance": _balance(segments, counts),
        "ratio_by": segments[-1].start.get("ratio_by") if segments else None,
        "sources": _sources(segments, counts),
        "left_out": left_out_report(run.path, folders, reports),
        "epochs": _epochs(reports, segments, of_epochs, unfinished),
        "timeline": timeline_of(segments, saved),
        "checkpoints": [
            {"step": one.step, "path": str(one.path), "is_complete": one.state is not None} for one in saved
        ],
        "series": series_of(segments, losses),
        "steps_without_loss": without_number,
        "notes": [*_notes(run, segments), *_note_of_losses(without_number), *_note_of_steps(counts)],
    }


# -- counts -----------------------------------------------------------------------------------------------------------


def counts_by_epoch(segments: Iterable[Segment]) -> dict[int, Counts]:
    """Add up the steps of each epoch, without those that were lost."""
    found: dict[int, Counts] = {}
    for segment in segments:
        for event in segment.steps:
            counts = Counts.from_event(event, segment.start["packing_length"])
            found.setdefault(event["epoch"], Counts(packing_length=1)).merge(counts)
    return found


def _sum(parts: Iterable[Counts]) -> Counts:
    total = Counts(packing_length=1)
    for part in parts:
        total.merge(part)
    return total


def _accounts(saved: Sequence[Checkpoint]) -> Iterator[Report]:
    """Yield the account of the epoch in each complete checkpoint, in the form of an epoch report."""
    for checkpoint in saved:
        if (state := checkpoint.state) is None:
            continue
        try:
            counts = Counts.from_state(state["counted"])
        except StateMismatch:  # written by another version
            counts = Counts(packing_length=1)
        counts.read_what_came()  # a plan counts all rows of the epoch as read; leave out those after the checkpoint
        yield {**account_json(counts, epoch=state["epoch"]), "is_finished": False, "as_of": checkpoint.path.name}


def _from_account(account: Mapping[str, Any]) -> Counts:
    """Return the counts of an epoch report. Its fill is a mean, so every pack gets that fill."""
    names = ("num_packs", "num_images", "num_single_long", "num_padding")
    counts = Counts(_FILL_UNITS, **{name: account.get(name, 0) for name in names})
    num_filled = counts.num_packs - counts.num_single_long
    counts.num_room = num_filled * _FILL_UNITS
    counts.num_pack_tokens = num_filled * round(account["fill_mean"] * _FILL_UNITS)
    for name, source in account["sources"].items():
        counts.sources[name] = SourceCounts(num_packed=source["num_packed"], num_tokens=source["num_tokens"])
    shared = account.get("shared", {})
    for name in ("num_units", "num_in_units", "num_apart", "num_shared_tokens"):
        setattr(counts, name, shared.get(name, 0))
    return counts


# -- sections ---------------------------------------------------------------------------------------------------------


def _about(args: Mapping[str, Any], segments: Sequence[Segment], last_step: int) -> Report:
    start = segments[-1].start if segments else {}
    return {
        "model": args.get("model"),
        "has_ended": segments[-1].has_ended if segments else None,
        "last_sign": segments[-1].last["when"] if segments else None,
        "step": last_step,
        "num_steps": start.get("num_steps"),
        "num_ranks": [segment.start["num_ranks"] for segment in segments],
        "mode": start.get("mode"),
        "packing_length": start.get("packing_length", args.get("packing_length")),
        "packing_strategy": start.get("packing_strategy"),
        "attention": start.get("attention"),
        "proof": start.get("proof"),
    }


def _trained(counts: Counts, *, is_logged: bool) -> Report:
    """Return the totals. Steps, vision tokens and seconds are known from the run log only (`is_logged`)."""
    vision = counts.num_vision_tokens if is_logged else None
    seconds = counts.seconds
    return {
        "num_steps": counts.num_steps if is_logged else None,
        "num_packs": counts.num_packs,
        "num_samples": counts.num_packed,
        "num_tokens": counts.num_tokens,
        "num_images": counts.num_images,
        "num_padding": counts.num_padding,
        "num_vision_tokens": vision,
        "vision_share": None if vision is None else round(share(vision, counts.num_tokens), 4),
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


def _balance(segments: Sequence[Segment], counts: Counts) -> Report:
    planned = [event["balance"] for segment in segments for event in segment.epochs if "balance" in event]
    # A step takes as long as its slowest rank, as if every rank had the tokens of the slowest one.
    slowest = sum(
        segment.start["num_ranks"] * event["num_tokens_slowest"] for segment in segments for event in segment.steps
    )
    return {
        "planned": round(sum(planned) / len(planned), 4) if planned else None,
        "trained": round(slowest / counts.num_tokens, 4) if segments and counts.num_tokens else None,
    }


def _sources(segments: Sequence[Segment], counts: Counts) -> dict[str, Report]:
    known = segments[-1].start.get("sources", {}) if segments else {}
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


def _epochs(
    reports: Mapping[int, Report],
    segments: Sequence[Segment],
    of_epochs: Mapping[int, Counts],
    unfinished: Sequence[Report],
) -> list[Report]:
    """Return the accounts of all epochs; `as_of` says how far an unfinished one is known."""
    epochs = [{**report, "is_finished": True, "as_of": None} for report in reports.values()]
    last_steps = {event["epoch"]: event["step"] for segment in segments for event in segment.steps}
    for epoch, counts in of_epochs.items():
        if epoch not in reports:
            trained = _trained(counts, is_logged=True)
            epochs.append({"epoch": epoch, **trained, "is_finished": False, "as_of": f"step {last_steps[epoch]}"})
    return sorted([*epochs, *unfinished], key=lambda epoch: int(epoch["epoch"]))


# -- notes ------------------------------------------------------------------------------------------------------------


def _notes(run: RunFolder, segments: Sequence[Segment]) -> Iterator[str]:
    """Yield what a reader has to know about the numbers: other runs, lost steps, a missing beginning."""
    if run.others:
        yield f"the newest of {len(run.others) + 1} runs here is shown; the others are {', '.join(run.others)}"
    if not segments:
        yield _why_no_segments(run.path / FOLDER / FILE)
        return
    for segment in segments:
        if lost := list(segment.lost_steps):
            num_tokens = sum(event["num_tokens"] for event in lost)
            yield (
                f"{segment.folder.name} was resumed from step {segment.stops_at}, and its steps up to "
                f"{lost[-1]['step']} were lost: {num_tokens} tokens were trained again, and count once"
            )
    first = segments[0]
    if first.start["event"] == RESUME:
        folder = resumed_folder(first)
        why = "is gone" if folder is None else f"has no run log in {folder / FOLDER}"
        yield (
            f"the run was resumed from {first.start['checkpoint']}, whose run {why}: the numbers begin after step "
            f"{first.start['step']}"
        )


def _why_no_segments(path: Path) -> str:
    try:
        num_lines = len(path.read_bytes().splitlines())
    except FileNotFoundError:
        return f"the run log ({path}) is missing: it was not copied, or could not be written. {_WITHOUT_LOG}"
    except OSError as error:
        return f"the run log ({path}) cannot be read: {error.strerror}. {_WITHOUT_LOG}"
    lines = counted(num_lines, "line")
    return f"the run log ({path}, {lines}) is damaged: it has no start of a run. {_WITHOUT_LOG}"


def _note_of_losses(steps: Sequence[int]) -> list[str]:
    if not steps:
        return []
    others = f" and {len(steps) - _MAX_STEPS_NAMED} more" if len(steps) > _MAX_STEPS_NAMED else ""
    shown = ", ".join(map(str, steps[:_MAX_STEPS_NAMED]))
    return [
        f"the logged loss is infinite or no number at {counted(len(steps), 'step')}: {shown}{others} "
        f"(`vlpack inspect --run ... --step {steps[0]}` shows its rows)"
    ]


def _note_of_steps(counts: Counts) -> list[str]:
    return [steps_are_other(counts.num_failed_late)] if counts.num_failed_late else []
