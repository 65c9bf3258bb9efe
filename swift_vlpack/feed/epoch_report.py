"""Report an epoch's plan and what it leaves out: counts for its account, numbers for commands and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.epoch import EpochPlan, num_shared_anywhere, prefixes_in
from swift_vlpack.plan.report import plan_report, sharing_report, step_size
from swift_vlpack.plan.resume_schedule import num_steps
from swift_vlpack.plan.same_steps import kept_steps
from swift_vlpack.plan.units import NO_KEY
from swift_vlpack.reasons import warning_of_left_out
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.left_out import LeftOutRows, as_json, in_no_epoch, in_order
from swift_vlpack.rows.samples import Address, LeftOut, TooManyFailures
from swift_vlpack.rows.source import RowSource, prefixes_of
from swift_vlpack.runlog.account import account_json
from swift_vlpack.runlog.counts import Counts

# -- left-out samples -------------------------------------------------------------------------------------------------


def left_out_by(plan: EpochPlan, rows: FusionCaptionDataset) -> list[LeftOut]:
    """Return the scheduled samples that are in no pack, with reasons."""

    def address(position: int) -> Address:
        return Address(*plan.sample(position))

    left_out = [rows.failed(address(position)) for position in plan.unreadable.tolist()]
    for reason, positions in plan.packs.dropped.items():
        for position in positions.tolist():
            said = f"{plan.lengths[position]} tokens, {plan.images[position]} images"
            left_out.append(LeftOut(rows.sample_id(address(position)), reason, said))
    return in_order(left_out)


def left_out_warning(plan: EpochPlan, left_out: Sequence[LeftOut], config: PackingConfig) -> str | None:
    """Return a warning about the samples that an epoch leaves out, with remedies; None if they are few."""
    reasons = Counter(one.reason for one in left_out)
    return warning_of_left_out(reasons, num_of=len(plan.schedule), what=config.what_is_packed)


def count_rows(counted: Counts, plan: EpochPlan, rows: FusionCaptionDataset) -> None:
    """Count all samples of an epoch, and those that are in no pack."""
    schedule, further = plan.schedule, plan.is_further_part
    num_further = np.bincount(schedule.source[further], minlength=len(schedule.names)).tolist()
    for name, num_samples, num in zip(schedule.names, schedule.num_rows_per_source, num_further, strict=True):
        counted.read(name, num_samples, num_further=num)
    for left_out in left_out_by(plan, rows):
        left_out.count_in(counted)


# -- packs and samples ------------------------------------------------------------------------------------------------


def plan_facts(
    plan: EpochPlan, *, accumulation: int, seconds: float = 0.0, is_decoded_ahead: bool = False
) -> dict[str, Any]:
    """Return the numbers of an epoch's packs and steps, for the summary of a run and for `vlpack plan`.

    `step` describes a step if packs decide what it trains; `kept_steps` does if steps keep their samples.
    """
    kept = None
    if plan.step is not None:
        assert plan.batch is not None
        kept = kept_steps(plan.packs, plan.batch, plan.step)._asdict()
    return {
        **plan_report(plan.unshared, plan.packs, num_rows=plan.num_rows, seconds=seconds),
        "packs_per_epoch": len(plan),
        "steps_per_epoch": plan.num_steps if kept else num_steps(plan.packs.num_packs_per_rank, accumulation),
        **({"is_decoded_ahead": True} if is_decoded_ahead else {}),
        **({"kept_steps": kept} if kept else {"step": size_of_step(plan, accumulation)}),
    }


def data_report(epoch: EpochPlan, dataset: FusionCaptionDataset, merge_size: int | None = None) -> dict[str, Any]:
    """Return lengths, images and mix of an epoch, and how many rows of its sources cannot be encoded.

    `merge_size`: a vision token stands for this many patches in height and in width; None if not known.
    """
    is_usable = epoch.lengths > 0
    lengths = epoch.lengths[is_usable]
    num_tokens = int(lengths.sum())
    num_patches = int(epoch.patches[is_usable].sum())
    unreadable = Counter(reason for source in dataset.sources for reason in _failures(source).values())
    return {
        "rows": sum(len(source.rows) for source in dataset.sources),
        "lengths": _summary(lengths),
        "share_of_rows_with_image": _share(int((epoch.images[is_usable] > 0).sum()), len(lengths)),
        "share_of_vision_tokens": None if merge_size is None else _share(num_patches // merge_size**2, num_tokens),
        "unreadable": dict(sorted(unreadable.items())),
        "rows_with_surplus_tags": sum(len(source.sizes.surplus_tags) for source in dataset.sources if source.sizes),
        "rows_without_target": sum(map(_num_without_target, dataset.sources)),
        "ratio_by": dataset.mix.ratio_by,
        "sources": _mix(epoch, dataset),
        **({"cut": _cut(epoch, dataset)} if epoch.packs.config.cuts_rows else {}),
        **({"share": _share_of_rows(epoch, dataset)} if epoch.packs.config.shares_media else {}),
    }


def _share_of_rows(epoch: EpochPlan, dataset: FusionCaptionDataset) -> dict[str, Any]:
    """Count what rows of an epoch share, how many rows have each beginning, and why rows stay alone."""
    config, prefixes = epoch.packs.config, prefixes_of(dataset.sources)
    report = sharing_report(epoch.packs)
    key = prefixes_in(epoch, prefixes, config).key
    rows = np.unique(key[key != NO_KEY], return_counts=True)[1]
    if epoch.step is not None:
        report["num_tokens_anywhere"] = report["num_tokens_alone"] - num_shared_anywhere(epoch, prefixes, config)
    return {
        "packing_share": config.packing_share,
        "packing_share_max": config.packing_share_max,
        **report,
        "rows_per_prefix": _rows_per_prefix(rows),
        "alone": _alone_by_cause(dataset.sources),
    }


def _rows_per_prefix(rows: NDArray[np.int64]) -> dict[str, int] | None:
    if not len(rows):
        return None
    median, p95 = np.percentile(rows, (50, 95), method="higher").tolist()
    return {"num_prefixes": len(rows), "median": median, "p95": p95, "max": int(rows.max())}


def _alone_by_cause(sources: Sequence[RowSource]) -> dict[str, dict[str, Any]]:
    """Count rows that share with none although another row has their medium; all sources together, by cause."""
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        for one in getattr(source.prefixes, "alone", ()):
            cause = found.setdefault(
                one.cause.text, {"num_rows": 0, "example": source.where(one.example), "way_out": one.cause.way_out}
            )
            cause["num_rows"] += one.num_rows
    return dict(sorted(found.items(), key=lambda one: -one[1]["num_rows"]))


def size_of_step(epoch: EpochPlan, accumulation: int) -> dict[str, float]:
    """Count the packs, samples and targets of an optimizer step of the epoch."""
    members = epoch.packs.members
    supervised, num_ranks = int(epoch.supervised[members].sum()), epoch.num_ranks
    return step_size(
        num_packs=len(epoch), num_samples=len(members), num_supervised=supervised,
        accumulation=accumulation, num_ranks=num_ranks,
    )  # fmt: skip


def _cut(epoch: EpochPlan, dataset: FusionCaptionDataset) -> dict[str, Any]:
    """Count the rows that are cut into parts, and compute the account that the epoch will have after training."""
    num_samples = len(epoch.schedule)
    is_part = np.zeros(num_samples, dtype=bool) if epoch.spans is None else epoch.spans.astype(bool).max(axis=0)
    account = account_json(_account_of(epoch, dataset))
    return {
        "packing_overflow": epoch.packs.config.packing_overflow,
        "num_rows_cut": int((is_part & ~epoch.is_further_part).sum()),
        "num_parts": int(is_part.sum()),
        "num_samples": num_samples,
        "lost_by_cutting": account.get("lost_by_cutting", {}),
        "rows": account.get("rows", {}),
    }


def _account_of(epoch: EpochPlan, dataset: FusionCaptionDataset) -> Counts:
    """Count an epoch as if it was trained. All samples count as one pack: the account of rows needs no packs."""
    counted = Counts(packing_length=epoch.packs.config.packing_length)
    count_rows(counted, epoch, dataset)
    members, names = epoch.packs.members, epoch.schedule.names
    source = epoch.schedule.source[members]
    samples = ((names[number], length) for number, length in zip(source, epoch.lengths[members].tolist(), strict=True))
    further = (names[number] for number in source[epoch.is_further_part[members]])
    counted.packed(samples, further=further, single_long=True)
    return counted


def left_out_rows(epoch: EpochPlan, dataset: FusionCaptionDataset) -> Iterator[dict[str, Any]]:
    """Yield every row that is in no pack, as lines of `left_out.jsonl`. Rows that no epoch can pack have no epoch."""
    origins = {source.name: source.origin or source.name for source in dataset.sources}
    for left_out in in_no_epoch(dataset.sources):
        yield as_json(left_out, None, origins)
    for left_out in left_out_by(epoch, dataset):
        if left_out.sample_id.part is not None or left_out.reason in epoch.packs.dropped:
            yield as_json(left_out, epoch.epoch, origins)


@contextmanager
def listing(path: Path, *, is_new: bool = False) -> Iterator[None]:
    """List the rows in a file, new or with further lines, if this block raises `TooManyFailures` before training."""
    try:
        yield
    except TooManyFailures as error:
        if not error.sources:
            raise
        if is_new:
            path.unlink(missing_ok=True)
        LeftOutRows(path, error.sources).add(None, in_no_epoch(error.sources))
        raise TooManyFailures(f"{error}; all of them are listed in {path}") from error.__cause__


def _failures(source: RowSource) -> dict[int, str]:
    return {} if source.sizes is None else dict(source.sizes.failures)


def _num_without_target(source: RowSource) -> int:
    """Count the rows that can be encoded and have no label: they train nothing."""
    sizes = source.sizes
    return 0 if sizes is None else int(((sizes.lengths > 0) & (sizes.supervised == 0)).sum())


def _summary(lengths: NDArray[Any]) -> dict[str, float]:
    # Use the method "higher", so that percentiles are lengths that occur, in whole tokens.
    median, p95, p99 = np.percentile(lengths, (50, 95, 99), method="higher").tolist()
    least, most, mean = int(lengths.min()), int(lengths.max()), round(float(lengths.mean()), 1)
    return {"min": least, "median": median, "p95": p95, "p99": p99, "max": most, "mean": mean}


def _mix(epoch: EpochPlan, dataset: FusionCaptionDataset) -> dict[str, dict[str, Any]]:
    """Compare the requested share of each source with its share of the packed samples and tokens."""
    packed = epoch.packs.members
    num_sources = len(dataset.sources)
    is_by_tokens = dataset.mix.ratio_by == "tokens"
    asked = [source.ratio * (1 if is_by_tokens else source.num_used) for source in dataset.sources]
    source_of_sample = epoch.schedule.source[packed]
    num_samples = np.bincount(source_of_sample, minlength=num_sources).tolist()
    tokens = np.bincount(source_of_sample, weights=epoch.lengths[packed], minlength=num_sources)
    num_tokens = tokens.astype(np.int64).tolist()
    return {
        source.name: {
            "rows": len(source.rows),
            "num_unreadable": len(_failures(source)),
            "num_deleted_by_loader": source.num_lost,
            "asked_ratio": source.ratio,
            "asked_share": _share(asked[number], sum(asked)),
            "num_samples": num_samples[number],
            "share_of_samples": _share(num_samples[number], sum(num_samples)),
            "num_tokens": num_tokens[number],
            "share_of_tokens": _share(num_tokens[number], sum(num_tokens)),
        }
        for number, source in enumerate(dataset.sources)
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
