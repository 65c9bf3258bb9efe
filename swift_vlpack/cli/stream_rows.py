"""Find the file and line of rows of a stream, by reading the stream again without encoding it.

A stream does not know its files: ms-swift shuffles and joins them before rows are counted. So the stream is read again
up to the wanted rows, and their texts are searched in the local files. If exactly one line contains all texts of a row,
that is its line. Any other row is described by the beginning of its text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from swift_vlpack.host.run import Run
from swift_vlpack.host.sources import load_stream
from swift_vlpack.pages.values import StepShown, TrainedPack
from swift_vlpack.plan.shares import Share
from swift_vlpack.rows.media import names_of_files
from swift_vlpack.rows.streams import StreamedRows

_LINES = (".jsonl", ".json")
_SHORTEST = 3
"""Fewest letters of a text that is searched: shorter texts occur in nearly every line."""
_PREVIEW = 60


def with_places(steps: Sequence[StepShown], run: Run, num_shares: int | None) -> list[StepShown]:
    """Add file and line to the samples of steps that a stream trained, shared by `num_shares` readers."""
    if not run.args.streaming or num_shares is None:
        return list(steps)
    stream, _ = load_stream(run.args, run.template)
    packs = [pack for step in steps for pack in step.packs]
    places: dict[tuple[int, str], str] = {}
    for epoch in {pack.epoch for pack in packs}:
        names = {name for pack in packs if pack.epoch == epoch for name in pack.ids}
        rows = rows_at(stream, epoch, {row_number(name) for name in names}, num_shares)
        found = places_of(rows, local_files(run.args.dataset))
        places |= {(epoch, name): found[row_number(name)] for name in names if row_number(name) in found}

    def placed(pack: TrainedPack) -> TrainedPack:
        known = zip(pack.ids, pack.where, strict=True)
        return replace(pack, where=[places.get((pack.epoch, name), where) for name, where in known])

    return [replace(step, packs=list(map(placed, step.packs))) for step in steps]


def row_number(sample_id: str) -> int:
    """Return the row number in the id of a sample, or of a part of a row.

    >>> row_number("stream:17"), row_number("stream:17/2")
    (17, 17)
    """
    return int(sample_id.rpartition(":")[2].partition("/")[0])


def rows_at(
    stream: StreamedRows, epoch: int, numbers: Collection[int], num_shares: int
) -> dict[int, Mapping[str, Any]]:
    """Read the rows with these numbers from a stream that was shared among `num_shares` readers."""
    found: dict[int, Mapping[str, Any]] = {}
    for share in {number % num_shares for number in numbers}:
        wanted = {number for number in numbers if number % num_shares == share}
        last = max(wanted) // num_shares
        for index, row in enumerate(islice(stream.rows_of(epoch, Share(share, num_shares)), last + 1)):
            if (number := Share(share, num_shares).row(index)) in wanted:
                found[number] = row
    return found


def places_of(rows: Mapping[int, Mapping[str, Any]], files: Sequence[Path]) -> dict[int, str]:
    """Return `file:line` of each row, or the beginning of its text if no line or several lines match."""
    texts = {number: _texts(row) for number, row in rows.items()}
    lines: dict[int, list[str]] = {number: [] for number in rows}
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as file:
            for at, line in enumerate(file, start=1):
                for number, needles in texts.items():
                    if needles and all(any(form in line for form in forms) for forms in needles):
                        lines[number].append(f"{path}:{at}")
    return {
        number: lines[number][0] if len(lines[number]) == 1 else f"row {number + 1} of the stream: {preview(row)}"
        for number, row in rows.items()
    }


def local_files(datasets: Iterable[str]) -> list[Path]:
    """Return the local files among the data sets of a run that have a row in each line."""
    paths = (Path(name.rpartition("#")[0] or name) for name in datasets)
    return [path.absolute() for path in paths if path.suffix in _LINES and path.is_file()]


def preview(row: Mapping[str, Any]) -> str:
    """Describe a row by its files and the beginning of its text."""
    words = " ".join(" ".join(_contents(row)).split())
    short = words if len(words) <= _PREVIEW else f"{words[:_PREVIEW]}..."
    return ", ".join([*names_of_files(row), repr(short)])


def _texts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each text of a row in the two ways that JSON files write it: with ASCII escapes, and without."""
    found = {text.strip() for text in chain(_contents(row), names_of_files(row))}
    telling = [text for text in found if len(text) >= _SHORTEST]
    return [(json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]) for text in telling]


def _contents(row: Mapping[str, Any]) -> Iterator[str]:
    for message in row.get("messages") or ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield content
