"""`vlpack inspect` for a run of `swift sft` or `swift pt`, before it or after it: its packs, its steps, its rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from swift_vlpack import json_lines
from swift_vlpack.cli.inspect_planned import PlannedRun
from swift_vlpack.cli.inspect_streamed import found_of_stream, found_on_record
from swift_vlpack.cli.trained import TrainedRun
from swift_vlpack.cli.wanted import Found, Wanted
from swift_vlpack.feed.streamed_feed import StreamedFeed
from swift_vlpack.host.args import packing_config, plans_ahead
from swift_vlpack.host.launch import RunLaunch
from swift_vlpack.host.pipeline import build_feed
from swift_vlpack.host.run import Run, feed_of, run_of
from swift_vlpack.pages.browser import browser
from swift_vlpack.pages.overview import overview_parts
from swift_vlpack.pages.page import write_page
from swift_vlpack.pages.terminal import example_parts, pack_parts, printed, step_parts
from swift_vlpack.pages.values import member_json


def look_at(settings: Mapping[str, Any], launch: RunLaunch, out: TextIO) -> int:
    """Look, and write what is seen."""
    wanted = Wanted.of(settings)
    with run_of(launch.flags, num_ranks=launch.num_ranks, command=launch.command) as run:
        for text in told(look(run, wanted), wanted, settings, run.args.model):
            out.write(text)
            out.flush()
    return 0


def look(run: Run, wanted: Wanted) -> Found:
    """Everything that was asked for, of a run that is to be started or of one that was trained."""
    trained = None if wanted.folder is None else TrainedRun(wanted.folder)
    can_be_planned = plans_ahead(run.args)
    if trained is not None and wanted.is_of_steps and (trained.kind == StreamedFeed.kind or not can_be_planned):
        return found_on_record(run, trained, wanted)
    if not can_be_planned:
        feed, _ = build_feed(run.args, run.template, packing_config(run.args))
        return found_of_stream(run, feed, wanted)
    planned = feed_of(run)[0] if trained is None else trained.feed(run)
    return PlannedRun(run, planned, trained, with_thumbnails=wanted.html is not None).found(wanted)


def told(found: Found, wanted: Wanted, settings: Mapping[str, Any], model: str | None = None) -> Iterator[str]:
    """Say what was found as a page, JSON or text."""
    if wanted.html is not None:
        page, said = browser(
            found.packs, found.overview, found.steps, most_mb=wanted.html_mb, num_packs=found.num_packs, model=model
        )
        write_page(wanted.html, page)
        yield f"{wanted.html}: {said}\n"
    elif settings["form"] == "json":
        yield json.dumps(json_lines.with_numbers(as_json(found)), allow_nan=False) + "\n"
    else:
        width, is_colourful = settings["width"], settings["is_colourful"]
        for parts in _parts(found, width):
            yield printed(parts, width=width, is_colourful=is_colourful)


def as_json(found: Found) -> dict[str, Any]:
    """For machines."""
    return {
        "overview": found.overview,
        "steps": [step.as_json() for step in found.steps],
        "packs": [pack.as_json() for pack in found.packs],
        "examples": [member_json(member) for member in found.examples],
    }


def _parts(found: Found, width: int) -> Iterator[Iterable[Any]]:
    if found.overview is not None:
        yield overview_parts(found.overview)
    yield from map(step_parts, found.steps)
    yield from (pack_parts(pack, width) for pack in found.packs)
    yield from (example_parts(member, width) for member in found.examples)
