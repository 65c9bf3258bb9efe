"""`begun.jsonl`: where every epoch of a run was begun or resumed, so that a step leads back to its packs.

One line each time, with what the run cannot be asked for later: the packing options and variables it was started with,
how many ranks shared the packs, and how far the epoch had come. What a killed run trained follows from it too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from swift.utils import get_logger

from swift_vlpack import json_lines
from swift_vlpack.feed.feed import Feed
from swift_vlpack.lengths.context import variables_read_by
from swift_vlpack.runlog.run_files import LOG

logger = get_logger()

_ROOT_OF_IMAGES = "ROOT_IMAGE_DIR"


def note_epoch(path: Path, feed: Feed, template: Any, args: Any, step: int) -> None:
    """Note that the feed is at the beginning of an epoch, or where it was resumed, behind so many steps."""
    names = {*variables_read_by(type(template)), _ROOT_OF_IMAGES}
    line = {
        "step": step,
        "kind": feed.kind,
        "num_ranks": feed.num_ranks,
        "num_workers": args.dataloader_num_workers,
        "accumulation": args.gradient_accumulation_steps,
        "state": feed.state(),
        "options": feed.config.changed(),
        "variables": {name: os.environ[name] for name in sorted(names) if name in os.environ},
        "origins": {source.name: source.origin or source.name for source in feed.sources},
    }
    if step == 0:  # lines already there are from an earlier run in the same folder
        log = path.parent.parent / LOG
        line["log_bytes"] = log.stat().st_size if log.is_file() else 0
    try:
        json_lines.append(path, [line])
    except OSError as error:  # the run goes on: training is dearer than looking back at it
        logger.warning(f"{path} cannot be written, so `vlpack inspect --run` will know less: {error}")
