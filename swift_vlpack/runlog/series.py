"""How numbers of a run went, over its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_vlpack.runlog import files
from swift_vlpack.runlog.legs import Leg
from swift_vlpack.runlog.step_counts import share

Point = dict[str, Any]
Lines = dict[int, dict[str, Any]]


def losses_of(folders: Sequence[Path], legs: Sequence[Leg]) -> Lines:
    """The lines of ms-swift's log that have a loss, by step, as far as they became a part of the run."""
    found: Lines = {}
    for folder in folders:
        last = next((leg.last_step or leg.step for leg in reversed(legs) if leg.folder == folder), None)
        for step, line in files.log_lines(folder):
            if "loss" in line and (last is None or step <= last):
                # A step that comes again was resumed before; what lay behind it was lost.
                found = {at: of for at, of in found.items() if at < step} if step <= max(found, default=0) else found
                found[step] = line
    return found


def series_of(legs: Sequence[Leg], losses: Mapping[int, Mapping[str, Any]]) -> list[Point]:
    """One point for each note of steps; loss where a line was logged for that very step."""
    return [
        {
            "step": event["step"],
            "when": event["when"],
            "leg": number,
            "fill": _fill(event, leg.facts["packing_length"]),
            "tokens_per_second": round(share(event["num_tokens"], event["seconds"]), 1),
            "padding_saved": _padding_saved(leg, event),
            "vision_share": _rounded_share(event["num_vision_tokens"], event["num_tokens"]),
            "loss": _number(losses.get(event["step"], {}).get("loss")),
        }
        for number, leg in enumerate(legs)
        for event in leg.steps
    ]


def series_of_lines(losses: Mapping[int, Mapping[str, Any]]) -> list[Point]:
    """The same of a run that kept no notes, as far as its log goes."""
    unknown = dict.fromkeys(("when", "tokens_per_second", "padding_saved", "vision_share"))
    return [
        {**unknown, "step": step, "leg": 0, "fill": line.get("pack/fill"), "loss": _number(line["loss"])}
        for step, line in losses.items()
    ]


def without_number(losses: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The steps at which a loss was logged that is infinite or no number."""
    return [step for step, line in sorted(losses.items()) if _number(line["loss"]) is None]


def _number(value: Any) -> float | None:
    """What a curve and JSON have a place for."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _fill(event: Mapping[str, Any], packing_length: int) -> float | None:
    """Of the packs that are no single-long sample; None where there is none."""
    room = (event["num_packs"] - event["num_single_long"]) * packing_length
    return _rounded_share(event["num_pack_tokens"], room) if room else None


def _padding_saved(leg: Leg, event: Mapping[str, Any]) -> float:
    num_unpacked = leg.num_tokens_unpacked(event)
    return _rounded_share(num_unpacked - event["num_tokens"] - event["num_padding"], num_unpacked)


def _rounded_share(part: float, whole: float) -> float:
    return round(share(part, whole), 4)
