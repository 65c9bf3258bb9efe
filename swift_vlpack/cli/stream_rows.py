"""Rows of a stream by their numbers, read again without being encoded, and where they stand in local files.

A stream knows no files: ms-swift shuffles and joins them before anybody counts. So a row is looked for by what is in
it, and has a line if exactly one line of the files has all of its texts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from swift_vlpack.plan.shares import Share
from swift_vlpack.rows.media import names_of_files
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.streams import StreamedRows

_LINES = (".jsonl", ".json")
_SHORTEST = 3
"""Letters of a text that says something; shorter ones are everywhere."""
_PREVIEW = 60


def rows_at(
    stream: StreamedRows, epoch: int, numbers: Collection[int], num_shares: int
) -> dict[int, Mapping[str, Any]]:
    """The rows of these numbers, where the stream was read in so many shares."""
    found: dict[int, Mapping[str, Any]] = {}
    for share in {number % num_shares for number in numbers}:
        wanted = {number for number in numbers if number % num_shares == share}
        last = max(wanted) // num_shares
        for index, row in enumerate(islice(_read(stream, epoch, Share(share, num_shares)), last + 1)):
            if (number := Share(share, num_shares).row(index)) in wanted:
                found[number] = row
    return found


def _read(stream: StreamedRows, epoch: int, share: Share) -> Iterator[Mapping[str, Any]]:
    # What is drawn while rows are read, to shuffle them, is drawn as in the run.
    reading = RandomStream(stream.seed, epoch, stream.name, *share)
    rows = stream.rows_of(epoch, share)
    while True:
        with reading:
            row = next(rows, None)
        if row is None:
            return
        yield row


def places_of(rows: Mapping[int, Mapping[str, Any]], files: Sequence[Path]) -> dict[int, str]:
    """File and line of each row, or what is in it where that is not known for certain."""
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
    """The files of lines among the data sets of a run."""
    paths = (Path(name.rpartition("#")[0] or name) for name in datasets)
    return [path.absolute() for path in paths if path.suffix in _LINES and path.is_file()]


def preview(row: Mapping[str, Any]) -> str:
    """A row in short: its files and the beginning of its text."""
    words = " ".join(" ".join(_contents(row)).split())
    short = words if len(words) <= _PREVIEW else f"{words[:_PREVIEW]}..."
    return ", ".join([*names_of_files(row), repr(short)])


def _texts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each text of a row as JSON writes it, with letters beyond ASCII or without."""
    found = {text.strip() for text in chain(_contents(row), names_of_files(row))}
    said = [text for text in found if len(text) >= _SHORTEST]
    return [(json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]) for text in said]


def _contents(row: Mapping[str, Any]) -> Iterator[str]:
    for message in row.get("messages") or ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield content
