"""`vlpack inspect`: look at packs, steps and rows of a run that is to be started, or of one that was trained.

`inspect_run.py` finds the packs and steps that the flags ask for, and `inspect_packs.py` reads them as training would.
`--run` names a trained run, whose record of packs `trained_steps.py` reads. That, and a saved data set of blocks of
documents, need neither ms-swift nor a model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swift_vlpack.cli.command import Command, PassThrough, add_packing_flags, add_run_flags
from swift_vlpack.cli.in_run import in_run
from swift_vlpack.cli.trained_steps import trained_step
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.path_checks import check_file
from swift_vlpack.json_lines import with_numbers
from swift_vlpack.pages.page import write_page
from swift_vlpack.runlog.folder import find_run

if TYPE_CHECKING:
    from swift_vlpack.cli.inspect_run import InspectRequest, InspectResult

_WIDTH_OF_FILES = 120
_NUM_EXAMPLES = 5
_WHAT = ("pack", "step", "sample")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    blocks = parser.add_argument_group("a saved data set of blocks, without a model")
    blocks.add_argument(
        "--dataset",
        action=PassThrough,  # also ms-swift's flag: `_is_of_blocks` decides which of the two is meant
        nargs="*",
        metavar="DIR",
        help="folder of `save_to_disk` with blocks of documents",
    )
    blocks.add_argument(
        "--tokenizer", metavar="NAME", help="name or folder of a tokenizer, or `byte`, to see their text"
    )
    blocks.add_argument("--examples", type=int, metavar="K", help=f"show the first K blocks (default: {_NUM_EXAMPLES})")
    _add_own_flags(parser)
    add_packing_flags(parser, packing_length="the run's --max_length")


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="output_dir of a run that was trained, or is training")
    what = parser.add_argument_group("what to look at (default: the first pack, and which are longest and emptiest)")
    what.add_argument("--pack", type=int, metavar="N", help="pack N of the epoch, counted from 0")
    what.add_argument(
        "--step", type=int, metavar="N", help="the packs of optimizer step N, counted from 1 as in the log"
    )
    what.add_argument("--sample", metavar="SOURCE:ROW", help="the packs that have this row, named as in every report")
    what.add_argument("--epoch", type=int, metavar="E", help="the epoch that packs are of, counted from 0 (default: 0)")
    form = parser.add_argument_group("how to show it")
    form.add_argument(
        "--json", action="store_true", help="one JSON object, with ids, labels and positions of every token"
    )
    form.add_argument("--html", type=Path, metavar="FILE", help="one page that needs no network, with thumbnails")


def _run(args: argparse.Namespace) -> int:
    if _is_of_blocks(args):
        return _inspect_blocks(args)
    _check(args)
    if args.run is not None:
        return _inspect_trained(args)
    width, is_colourful = _terminal()  # ask now: `in_run` redirects stdout, which is no terminal then
    with in_run(args) as (launch, out):
        from swift_vlpack.cli.inspect_run import InspectRequest, look
        from swift_vlpack.host.run import run_of

        request = InspectRequest(*(getattr(args, name) for name in InspectRequest._fields))
        with run_of(launch.flags, num_ranks=launch.num_ranks, command=launch.command) as run:
            result = look(run, request)
            if request.html is not None:
                out.write(write_packs_page(result, request, run.args.model))
            elif args.json:
                out.write(json.dumps(with_numbers(result.as_json()), allow_nan=False) + "\n")
            else:
                for text in inspect_text(result, width, is_colourful=is_colourful):
                    out.write(text)
                    out.flush()  # show this pack now, because reading the next one may take a while
    return 0


def write_packs_page(result: InspectResult, request: InspectRequest, model: str | None = None) -> str:
    """Write the page of `--html`. Returns the line that says what is on it."""
    from swift_vlpack.pages.browser import browser

    assert request.html is not None
    page, said = browser(result.packs, result.overview, num_packs=result.num_packs, model=model)
    write_page(request.html, page)
    return f"{request.html}: {said}\n"


def inspect_text(result: InspectResult, width: int, *, is_colourful: bool) -> Iterator[str]:
    """Yield the text for a terminal, part by part."""
    from swift_vlpack.pages.terminal import overview_line, pack_parts, printed

    if result.overview is not None:
        yield f"{overview_line(result.overview)}\n\n"
    for pack in result.packs:
        yield printed(pack_parts(pack, width), width=width, is_colourful=is_colourful)


def _inspect_trained(args: argparse.Namespace) -> int:
    """Show a step of a run that was trained."""
    from swift_vlpack.pages.terminal import printed, step_parts

    step = trained_step(find_run(args.run).path, args.step)
    if args.json:
        print(json.dumps(with_numbers({"steps": [step.as_json()]}), allow_nan=False))
        return 0
    width, is_colourful = _terminal()
    print(printed(step_parts(step), width=width, is_colourful=is_colourful), end="")
    return 0


def _check(args: argparse.Namespace) -> None:
    given = _given(args, *_WHAT)
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are different things to look at; give one of them")
    if args.run is not None and args.step is None:
        raise ConfigError("--run shows the rows of a step: give --step N; packs are those of --config")
    if args.run is not None and args.html is not None:
        raise ConfigError("--html is a page of packs, which --run has not; give --config")
    if args.epoch is not None and args.step is not None:
        raise ConfigError("--epoch: a step is of the epoch that it is in; steps are counted through the whole run")
    for name, least in (("step", 1), ("pack", 0), ("epoch", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    if args.html is not None:
        check_file("--html", args.html)
    if args.html is not None and args.json:
        raise ConfigError("--html and --json are different forms; give one of them")
    if args.examples is not None:
        raise ConfigError("--examples is of a saved data set of blocks; a row of a run is shown by --sample")


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    return [f"--{name}" for name in names if getattr(args, name) is not None]


def _terminal() -> tuple[int, bool]:
    """Return the width of the terminal, and whether it shows colours (https://no-color.org)."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if is_terminal else _WIDTH_OF_FILES
    return width, is_terminal and not os.environ.get("NO_COLOR")


def _is_of_blocks(args: argparse.Namespace) -> bool:
    """Tell whether the flags name a data set of blocks: `--dataset`, and no flag of a run, such as `--model`."""
    names = {flag.split("=")[0] for flag in args.flags}
    is_run = names & {"--model", "--ckpt_dir", "--resume_from_checkpoint"} or any(
        flag.endswith((".yaml", ".yml")) for flag in args.flags
    )
    return "--dataset" in names and not is_run and args.config is None and args.run is None


def _inspect_blocks(args: argparse.Namespace) -> int:
    """Show a saved data set of blocks: the report of `swift_vlpack.text`, and the first blocks as text."""
    from swift_vlpack.text.report import block_report, examples_of, saved_blocks, text_of_examples
    from swift_vlpack.text.tokenizer import tokenizer_named

    at = args.flags.index("--dataset")
    dataset, unknown = args.flags[at + 1 : at + 2], [*args.flags[:at], *args.flags[at + 2 :]]
    if unknown or not dataset:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}" if unknown else "--dataset needs a folder")
    if others := _given(args, *_WHAT, "html"):
        raise ConfigError(f"{', '.join(others)}: of a run; a data set of blocks is shown with --examples and --json")
    num_examples = _NUM_EXAMPLES if args.examples is None else args.examples
    if num_examples < 1:
        raise ConfigError(f"--examples must be at least 1, got {num_examples}")
    blocks = saved_blocks(Path(dataset[0]))
    examples = examples_of(blocks, num_examples, None if args.tokenizer is None else tokenizer_named(args.tokenizer))
    if args.json:
        with contextlib.redirect_stdout(io.StringIO()):  # block_report prints its text, too
            report = block_report(blocks)
        print(json.dumps({"report": report, "examples": examples}))
        return 0
    block_report(blocks)
    for line in text_of_examples(examples):
        print(line)
    return 0


INSPECT = Command(
    name="inspect",
    text="look at packs, and find the rows of a step",
    usage=(
        "vlpack inspect [sft|pt] [--config CONFIG.yaml] [any option of swift sft] [--num_ranks N]\n"
        "                      [--pack N | --step N | --sample SOURCE:ROW] [--epoch E]\n"
        "                      [--json | --html FILE]\n"
        "       vlpack inspect --run OUTPUT_DIR --step N [--json]\n"
        "       vlpack inspect --dataset SAVED_BLOCKS [--tokenizer NAME] [--examples K] [--json]"
    ),
    description=(
        "Look at the packs that a run would train on, or has trained on: members, masks, image tokens, decoded text. "
        "What is shown are the tensors that training gets; no weights are loaded and no GPU is used."
    ),
    add_flags=_add_flags,
    run=_run,
    takes_run_flags=True,
)
