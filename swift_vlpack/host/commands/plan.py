"""`vlpack plan` for a run of `swift sft` or `swift pt`: what it would train on, by its functions, without weights.

The `vlpack` command becomes `plan_process`, which runs `main` here, with the environment of the run, which has to be in
place before ms-swift is imported. The report goes to a file number of its own: whatever a library prints is not in it.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift.arguments import PretrainArguments
from swift.pipelines.train.sft import SwiftSft
from swift.utils import get_logger

from swift_vlpack.core.account.plan_report import plan_report
from swift_vlpack.core.account.plan_text import plan_text
from swift_vlpack.core.config import is_planned
from swift_vlpack.core.epoch.rest_of_run import num_steps as num_steps_of
from swift_vlpack.core.errors import ConfigError, VLPackError
from swift_vlpack.data.feeds.data_report import data_report, left_out_rows
from swift_vlpack.data.feeds.planned import left_out_by, left_out_warning
from swift_vlpack.data.feeds.planned_feed import PlannedFeed
from swift_vlpack.data.rows.left_out import listed
from swift_vlpack.host.args import is_ours, packing_config
from swift_vlpack.host.pipeline import measured_rows, planned_feed, size_of_step
from swift_vlpack.host.ranks import counted_as
from swift_vlpack.host.rows.sources import load_sources

logger = get_logger()

EXIT_USAGE = 2
LEFT_OUT = ("ddp_backend", "deepspeed", "fsdp", "use_liger_kernel")
"""Options of a run that decide nothing about packs, and need devices, packages or processes that a plan does not."""
OVERRIDDEN = ("--report_to", "none", "--add_version", "false", "--use_cpu", "true")
"""Leave no trace; and without `use_cpu` ms-swift refuses bfloat16 on a machine that has no GPU."""


NETWORK_WAY_OUT = (
    "(check the network, HTTPS_PROXY and HF_ENDPOINT, choose the other hub by --use_hf, or give a local folder or file)"
)
_NOBODY_ANSWERED = frozenset(
    (
        "ConnectionError",
        "TimeoutError",
        "Timeout",
        "gaierror",
        "TransportError",
        "MaxRetryError",
        "OfflineModeIsEnabled",
    )
)


class Refused(VLPackError):
    """ms-swift cannot work with what it was given."""


@contextmanager
def _said_by_swift(what: str) -> Iterator[None]:
    """Make one line of an error by which ms-swift and the libraries below it say that an input is wrong."""
    try:
        yield
    except VLPackError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if _is_of_network(error):
            raise Refused(
                f"the hub cannot be reached, and what was named is no local path: {said} {NETWORK_WAY_OUT}"
            ) from error
        if not isinstance(error, (ValueError, AssertionError, OSError)):
            raise
        raise Refused(f"ms-swift {what}: {said}") from error


def _is_of_network(error: BaseException | None) -> bool:
    """Whether it, or what it came from, is that nobody answered; each library has classes of its own for that."""
    if error is None:
        return False
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & _NOBODY_ANSWERED) or _is_of_network(error.__cause__ or error.__context__)


class _WithoutWeights(SwiftSft):
    """The arguments, processor and template of a training run, by the methods of the run."""

    def __init__(self, argv: Sequence[str], command: str) -> None:
        if command == "pt":
            self.args_class = PretrainArguments  # which is all that its pipeline changes
        with _said_by_swift("refuses the options"):
            super(SwiftSft, self).__init__(list(argv))
        self.train_msg: dict[str, Any] = {}
        with _said_by_swift("cannot load the processor"):
            self._prepare_model_tokenizer(load_model=False)  # the length pass of training has no model either
            self._prepare_template()


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and write the report, as JSON or text; a mistake of the user is one line on stderr and exit code 2."""
    file_number, form, failures_file, num_ranks, command, *options = sys.argv[1:] if argv is None else argv
    try:
        report = training_report(options, num_ranks=int(num_ranks), failures_file=Path(failures_file), command=command)
    except VLPackError as error:
        print(f"vlpack plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    with open(int(file_number), "w", encoding="utf-8") as file:
        file.write((json.dumps(report) if form == "json" else plan_text(report)) + "\n")
    return 0


def training_report(
    argv: Sequence[str], *, num_ranks: int, failures_file: Path, command: str = "sft"
) -> dict[str, Any]:
    """What ms-swift's command with the options on so many ranks would train on; rows that cannot be go into a file."""
    start = time.perf_counter()
    _check_list(failures_file)
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder, counted_as(num_ranks):
        # ms-swift makes the output folder when it reads its arguments; a plan leaves none behind.
        pipeline = _WithoutWeights([*_without(argv, LEFT_OUT), *OVERRIDDEN, "--output_dir", folder], command)
        feed, seconds = _feed(pipeline)
    epoch = feed.epoch_plan
    num_listed = _write_list(feed, failures_file)
    if warning := left_out_warning(left_out_by(epoch, feed.dataset), num_rows=len(epoch.schedule)):
        logger.warning(f"packing: {warning}")
    report = plan_report(epoch.unshared, epoch.packs, num_rows=len(epoch.schedule), seconds=time.perf_counter() - start)
    return {
        **report,
        **data_report(epoch, feed.dataset, _merge_size(pipeline.template)),
        **_steps(feed, pipeline.args),
        "failures_file": str(failures_file) if num_listed else None,
        **seconds,
    }


def _without(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """The flags but for those of these names, with their values."""
    kept: list[str] = []
    is_left_out = False
    for part in argv:
        if part.startswith("--"):
            is_left_out = part[2:].partition("=")[0].replace("-", "_") in names
        if not is_left_out:
            kept.append(part)
    return kept


def _feed(pipeline: SwiftSft) -> tuple[PlannedFeed, dict[str, float]]:
    """The feed that training would have, and how long lengths and packs took."""
    args, template = pipeline.args, pipeline.template
    if not is_ours(args):
        raise ConfigError("--packing false has no packs to plan; leave it out")
    config = packing_config(args)
    if not is_planned(config, is_sized=not args.streaming):
        raise ConfigError(
            f"{'--streaming true' if args.streaming else 'packing_mode=buffer'} packs rows as they come and cannot be "
            "planned; plan without it, or train with --max_steps"
        )
    with _said_by_swift("cannot load the data"):
        sources, _ = load_sources(args, config)
    start = time.perf_counter()
    rows = measured_rows(sources, template, args, config)
    measured = time.perf_counter()
    feed = planned_feed(rows, template, args, config)
    seconds = {"seconds_lengths": measured - start, "seconds_plan": time.perf_counter() - measured}
    return feed, {name: round(value, 4) for name, value in seconds.items()}


def _steps(feed: PlannedFeed, args: Any) -> dict[str, Any]:
    """Steps by the arithmetic of Hugging Face's Trainer, where an epoch ends with a step whatever has accumulated."""
    accumulation = args.training_args.gradient_accumulation_steps
    steps_per_epoch = num_steps_of(feed.epoch_plan.packs.num_packs_per_rank, accumulation)
    num_epochs = math.ceil(args.num_train_epochs)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    if args.max_steps > 0:
        num_steps = args.max_steps
        num_epochs = math.ceil(num_steps / steps_per_epoch)
    return {
        "num_epochs": num_epochs,
        "packs_per_epoch": len(feed.epoch_plan),
        "gradient_accumulation_steps": accumulation,
        "steps_per_epoch": steps_per_epoch,
        "num_steps": num_steps,
        "step": size_of_step(feed, args).as_json(),
    }


def _check_list(path: Path) -> None:
    """Before anything is measured: the list of rows that are left out must not take the place of something else."""
    if path.exists() and path.stat().st_size and not any(listed(path)):
        raise ConfigError(f"{path} is no list of rows that were left out; name another file with --failures")


def _write_list(feed: PlannedFeed, path: Path) -> int:
    """One JSON object a line for every row that is left out; no file where there are none, nor an earlier one."""
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in left_out_rows(feed.epoch_plan, feed.dataset)]
    if lines:
        path.write_text("".join(lines), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
    return len(lines)


def _merge_size(template: Any) -> int | None:
    """How many patches in height and width a vision token stands for, where the image processor says so."""
    merge_size = getattr(getattr(template.processor, "image_processor", None), "merge_size", None)
    return merge_size if isinstance(merge_size, int) else None
