"""Write what a plan is for a reader: the report of `vlpack plan`, which training logs before its first step, too."""

from __future__ import annotations

from typing import Any

from swift_vlpack.lines import labelled, table
from swift_vlpack.plan.report import about_step, nothing_packed, share_lines, without_target
from swift_vlpack.reasons import kept_by
from swift_vlpack.words import by_reason, counted


def plan_text(report: dict[str, Any]) -> str:
    """Write the report for a reader: of a file of lengths, or of a run, whose report also has `sources`."""
    time = f"{report['seconds']:.2f} s"
    if "sources" not in report:
        steps = (
            f"{report['steps_per_epoch']} an epoch, gradient_accumulation_steps {report['gradient_accumulation_steps']}"
        )
        return labelled([*_about_packs(report), ("steps", steps), *about_step(report), ("time", time)])
    parts = f"{report['seconds_lengths']:.2f} s for lengths, {report['seconds_plan']:.2f} s for packs"
    return labelled([*run_lines(report), ("time", f"{parts}, {time} in all")])


def run_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe the data, the packs and the steps of a run."""
    return [*_about_data(report), *_about_packs(report), *_about_steps(report)]


def _about_packs(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = counted(report["num_rows"], "row") + (f" in epoch {report.get('epoch', 0)}" if "sources" in report else "")
    samples, split = counted(report["num_samples"], "sample"), counted(report["packs_split"], "pack")
    samples_per_pack = report["num_samples"] / max(1, report["num_packs"])
    # Un-packed, every sample would be a sequence.
    saved = 1 - report["num_packs"] / report["num_samples"] if report["num_samples"] else 0.0
    per_rank = f"{counted(report['packs_per_rank'], 'pack')} each, slowest rank {report['balance']:.3f} x mean"
    if report["num_giants"]:
        giants = counted(report["num_giants"], "sample costs", "samples cost")
        per_rank += f" (floor {report['balance_floor']:.3f}: {giants} more than a mean pack)"
    return [
        ("rows", f"{rows}, {samples} packed, {counted(report['num_tokens'], 'token')}"),
        ("packs", f"{counted(report['num_packs'], 'pack')} of {report['packing_length']} tokens by {report['method']}"),
        ("", f"{samples_per_pack:.1f} samples a pack, {100 * saved:.1f}% fewer sequences"),
        *_about_fill(report),
        *_about_padding(report),
        *(share_lines(report["share"]) if report.get("share") else []),
        ("ranks", f"{report['num_ranks']}: {per_rank}"),
        ("", f"{split} cut in two, {report['packs_empty']} without a sample, for equal steps"),
        ("single-long", f"{counted(report['single_long'], 'sample')} too large for a pack, alone in a sequence"),
        ("left out", _left_out(report)),
        *(_about_cutting(report["cut"]) if report.get("cut") else []),
    ]


def _left_out(report: dict[str, Any]) -> str:
    """Say what the packer left out and why, and how many samples never reached it because they cannot be read."""
    num_all = report["num_rows"]
    if cut := report.get("cut"):
        num_all = cut["num_samples"] - sum(lost["num_parts"] for lost in cut["lost_by_cutting"].values())
    num_unreadable = num_all - report["num_samples"] - report["num_dropped"]
    unreadable = f", and {num_unreadable} unreadable" if num_unreadable else ""
    return f"{report['num_dropped']} ({by_reason(report['dropped'])}{kept_by(report['dropped'])}){unreadable}"


def _about_fill(report: dict[str, Any]) -> list[tuple[str, str]]:
    if nothing := nothing_packed(report):
        return [("fill", nothing)]
    return [
        ("fill", f"{100 * report['mean_fill']:.2f}% mean"),
        ("lower bound", _lower_bound(report)),
    ]


def _about_padding(report: dict[str, Any]) -> list[tuple[str, str]]:
    if report["packing_pad_to"] is None:
        return []
    num_padding, pad_to = report["num_padding"], report["packing_pad_to"]
    share = num_padding / max(1, report["num_tokens"] + num_padding)
    padding = f"{counted(num_padding, 'token')} by packing_pad_to={pad_to}, {share:.1%} of all in the sequences"
    return [("padding", padding)]


def _about_cutting(cut: dict[str, Any]) -> list[tuple[str, str]]:
    """Say which rows were cut, what was lost by it, and that all rows are accounted for."""
    num_read, num_packed = (sum(counts[name] for counts in cut["rows"].values()) for name in ("num_read", "num_packed"))
    rows, parts = counted(cut["num_rows_cut"], "row"), counted(cut["num_parts"], "part")
    lines = [("long rows", f"{cut['packing_overflow']}: {rows} longer than a pack, in {parts}")]
    lines += [
        (
            "",
            f"{counted(lost['num_parts'], 'part')} left out ({reason}): {counted(lost['num_tokens'], 'token')}, "
            f"{counted(lost['num_images'], 'image')}",
        )
        for reason, lost in cut["lost_by_cutting"].items()
    ]
    return [*lines, ("", f"{num_read} rows read = {num_packed} packed + {num_read - num_packed} left out")]


def _about_data(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe the data: a table of the sources, then lengths and images."""
    asked = ", ratios are shares of tokens" if report["ratio_by"] == "tokens" else ""
    lines = [("data", f"{counted(report['rows'], 'row')} in {counted(len(report['sources']), 'source')}{asked}")]
    rows = [
        (
            name,
            str(source["rows"]),
            f"{source['asked_ratio']:g}",
            *(f"{source[of]:.1%}" for of in ("asked_share", "share_of_samples", "share_of_tokens")),
        )
        for name, source in report["sources"].items()
    ]
    lines += [("", line) for line in table(("source", "rows", "ratio", "asked", "samples", "tokens"), rows)]
    unreadable = f"{counted(sum(report['unreadable'].values()), 'row')} ({by_reason(report['unreadable'])})"
    if report["failures_file"]:
        what = "" if report["unreadable"] else " what is left out for other reasons is"
        unreadable += f",{what} listed in {report['failures_file']}"
    if num_deleted := sum(source["num_deleted_by_loader"] or 0 for source in report["sources"].values()):
        lines.append(("", f"{counted(num_deleted, 'more row was', 'more rows were')} deleted by ms-swift's loader"))
    if unnamed := [name for name, source in report["sources"].items() if source["num_deleted_by_loader"] is None]:
        lines.append(("", f"how many rows the loader deleted of {', '.join(unnamed)} is not known"))
    numbers = report["lengths"]
    lengths = ", ".join(f"{name} {numbers[name]}" for name in ("min", "median", "p95", "p99", "max", "mean"))
    images = f"{report['share_of_rows_with_image']:.1%} of the rows have one"
    if report["share_of_vision_tokens"] is not None:
        images += f", {report['share_of_vision_tokens']:.1%} of the tokens are vision"
    lines.append(("unreadable", unreadable))
    if num_rows := report["rows_with_surplus_tags"]:
        lines.append(
            (
                "",
                f"{counted(num_rows, 'row has', 'rows have')} more tags than media: the surplus is words",
            )
        )
    if num_rows := report["rows_without_target"]:
        lines.append(("", f"{without_target(num_rows)}: all labels are -100"))
    return [*lines, ("lengths", f"{lengths} tokens"), ("images", images)]


def _lower_bound(report: dict[str, Any]) -> str:
    packs = counted(report["lower_bound"], "pack")
    if report.get("kept_steps"):
        return f"{packs}, if steps could share packs"
    return f"{packs}; {report['excess_per_cent']:.3f}% above it"


def _about_steps(report: dict[str, Any]) -> list[tuple[str, str]]:
    in_all = f"{report['num_steps']} in {counted(report['num_epochs'], 'epoch')}, {report['steps_per_epoch']} an epoch"
    packs = counted(report["gradient_accumulation_steps"], "pack")
    a_step = (
        f"; {counted(report['num_ranks'], 'rank')} x {packs} a step, "
        f"{counted(report['packs_per_epoch'], 'pack')} in every epoch"
    )
    as_many = ", as many as un-packed" if report.get("kept_steps") else a_step
    return [("steps", f"{in_all}{as_many}"), *about_step(report)]
