"""`vlpack export`: write a cached data set for ms-swift and Megatron, as `swift export --to_cached_dataset true` does.

The lengths come from image headers, so no image is decoded. The folder gets its name when everything is in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from swift_vlpack.cli.command import Command, add_run_flags
from swift_vlpack.cli.in_run import in_run, is_in_run
from swift_vlpack.errors import ConfigError
from swift_vlpack.files import whole_folder
from swift_vlpack.host.launch import RunLaunch, check_launch
from swift_vlpack.host.path_checks import check_folder
from swift_vlpack.host.run_flags import given_options
from swift_vlpack.lines import labelled, listed
from swift_vlpack.runlog.left_out import FILE as LEFT_OUT
from swift_vlpack.words import by_reason, counted

MODES = ("train", "rlhf", "kto")
PARTS = ("train", "val")
_OF_EXPORT = {*PARTS, "val_dataset.jsonl", LEFT_OUT, "settings.json", "sizes.npz", "packed"}
"""Files and folders that an export writes; earlier versions also wrote the last three."""
_OF_KTO = (
    "swift rlhf --rlhf_type kto --loss_type apo_zero_unpaired; for its other loss, ms-swift makes the rows of the KL "
    "term from --dataset only"
)
_BOOLEAN = ("true", "false")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser, num_ranks=False)
    parser.add_argument(
        "--output",
        "--output_dir",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where train and val are written; a new folder, or that of an earlier export with --exist_ok true",
    )
    parser.add_argument(
        "--template_mode", choices=MODES, default="train", help="what the data is for, as of swift export"
    )
    _add_switch(parser, "check_pixels", "decode all images, and leave out rows with broken pixels, as ms-swift does")
    _add_switch(parser, "exist_ok", "replace an earlier export")
    _add_switch(parser, "to_cached_dataset", "accepted, because commands of swift export have it", default="true")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str, *, default: str = "false") -> None:
    """Add a flag that takes true or false; without a value it means true."""
    parser.add_argument(
        f"--{name}", nargs="?", const="true", choices=_BOOLEAN, default=default, help=f"{text} (default: {default})"
    )


def _run(args: argparse.Namespace) -> int:
    if args.to_cached_dataset != "true":
        raise ConfigError("--to_cached_dataset false leaves nothing to do; other exports are those of swift export")
    if not is_in_run():
        _check_output(args.output, may_exist=args.exist_ok == "true")
    # An export packs nothing, so options that cannot be combined with packing are allowed.
    args.flags = [*args.flags, "--packing", "false"]
    with in_run(args, check=_check_run) as (run, out):
        from swift_vlpack.host.export import ExportOptions, export

        options = ExportOptions(
            mode=args.template_mode,
            check_pixels=args.check_pixels == "true",
            cache_dir=run.config.packing_cache_dir,
        )
        with whole_folder(args.output.absolute()) as folder:
            report = export(run.flags, folder, options, command=run.command)
        report = {"output": str(args.output), **report}
        print(json.dumps(report) if args.json else export_text(report), file=out)
    return 0


def _check_run(run: RunLaunch) -> None:
    """Refuse what cannot be exported, before anything heavy is imported."""
    if run.config.fusion_config is not None:
        raise ConfigError(
            f"fusion_config {run.config.fusion_config} cannot be exported, because a cached data set has no ratios; "
            "name the files with --dataset"
        )
    if given_options(run.flags).get("streaming"):
        raise ConfigError("--streaming true cannot be exported: a cached data set has a length; leave it out")
    check_launch(run)


def _check_output(folder: Path, *, may_exist: bool) -> None:
    """Raise `ConfigError` if the folder cannot be written, or has files in it that no export wrote."""
    check_folder("--output", folder)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if others := sorted(names - _OF_EXPORT):
        raise ConfigError(f"--output {folder} has {others[0]} in it, which no export wrote; name a new folder")
    if names and not may_exist:
        raise ConfigError(f"--output {folder} has an export in it; name a new folder, or give --exist_ok true")


def export_text(report: dict[str, Any]) -> str:
    """Write the report for a reader."""
    lines = [("output", report["output"])]
    for name in PARTS:
        if name in report:
            lines += listed(name, _about_part(report[name], report["check_pixels"]))
    if report["template_mode"] == "kto":
        lines.append(("train", _OF_KTO))
    return labelled([*lines, ("time", f"{report['seconds']:.1f} s")])


def _about_part(part: dict[str, Any], check_pixels: bool) -> list[str]:
    lines = [f"{counted(part['num_rows'], 'row')}, {counted(part['num_tokens'], 'token')}"]
    if num := sum(part["left_out"].values()):
        lines.append(f"{counted(num, 'row')} left out ({by_reason(part['left_out'])}), listed in left_out.jsonl")
    if num := part["num_images_not_decoded"]:
        lines.append(
            f"{num} of {counted(part['num_images'], 'image')} not decoded: broken pixels show in training "
            "(--check_pixels decodes all)"
        )
    return lines


EXPORT = Command(
    name="export",
    text="write a cached data set for ms-swift and Megatron, without decoding images",
    usage=(
        "vlpack export [sft|pt] [--config CONFIG.yaml] --output FOLDER [--template_mode train|rlhf|kto]\n"
        "                     [--check_pixels] [any option of swift export] [--json]"
    ),
    description=(
        "Write what `swift export --to_cached_dataset true` writes (train and val, with the lengths of every row), "
        "from the file, flags and environment of a run. Lengths come from image headers, which are checked on some "
        "rows and remembered in --packing_cache_dir. Plain `swift sft --cached_dataset FOLDER/train --packing true` "
        "and Megatron train from it without this package."
    ),
    add_flags=_add_flags,
    run=_run,
    takes_run_flags=True,
)
