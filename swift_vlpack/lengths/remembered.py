"""The files that remember lengths: which there are, of what, and which may go.

A file is ours by its name and by what it begins with; anything else in the folder is neither listed nor touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift_vlpack.files import write_json
from swift_vlpack.lengths.length_file import MAGIC, read_records

_OF_SOURCE = re.compile(r"(?P<stem>.+-[0-9a-f]{12})\.(?P<kind>lengths|notes|failures|about|damaged-\d+)")
_SHARED = re.compile(r"[0-9a-f]{32}\.(?:trust|observed|damaged-\d+)|unreachable\.urls")
"""Files of all sources: which kinds of rows were compared, which addresses did not answer."""
_WITH_MAGIC = ("lengths", "notes")
ABOUT = ".about"


@dataclass(frozen=True, slots=True)
class About:
    """What the lengths of a file are of."""

    source: str
    origin: str | None
    """The file or data set."""
    template: str
    model_type: str
    version: str
    """Of this package."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The files of one source under one template and its settings."""

    files: tuple[Path, ...]
    num_bytes: int
    num_rows: int
    used: float
    """When it was last used, in seconds since 1970."""
    name: str
    """As the files have it: what is left of the source's."""
    about: About | None
    """None where a version wrote it that did not say."""

    @property
    def source(self) -> str:
        """The name of the source, as far as it is known."""
        return self.about.source if self.about else self.name


def tell_about(lengths: Path, about: About) -> None:
    """Note beside a file of lengths what it is of, and, by its time, that it is used."""
    with suppress(OSError):  # a folder that cannot be written is told of by the file of lengths itself
        write_json(lengths.with_suffix(ABOUT), asdict(about))


def remembered_in(folder: Path) -> list[Remembered]:
    """All that is remembered there, the latest used first."""
    stems: dict[str, list[Path]] = {}
    for path in _files(folder):
        if (match := _OF_SOURCE.fullmatch(path.name)) and _is_ours(path, match["kind"]):
            stems.setdefault(match["stem"], []).append(path)
    groups = [_remembered(stem, sorted(paths)) for stem, paths in stems.items()]
    return sorted(groups, key=lambda group: -group.used)


def shared_files(folder: Path) -> list[Path]:
    """Those that belong to no one source: what is trusted, and what could not be reached."""
    shared = (path for path in _files(folder) if _SHARED.fullmatch(path.name))
    return sorted(path for path in shared if _is_ours(path, path.suffix.removeprefix(".")))


def removed(files: Sequence[Path]) -> int:
    """Remove files; how many bytes are free now."""
    num_bytes = 0
    for path in files:
        with suppress(FileNotFoundError):  # somebody else was quicker
            size = path.stat().st_size
            path.unlink()
            num_bytes += size
    return num_bytes


def _files(folder: Path) -> Iterator[Path]:
    """Ordinary files right inside; a link leads to what is not ours."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _is_ours(path: Path, kind: str) -> bool:
    if kind in _WITH_MAGIC:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) in (MAGIC, b"")
    # A file that was set aside is damaged, perhaps in its first bytes; its name has two numbers of ours in it.
    return kind.startswith("damaged-") or _is_lines(path)


def _is_lines(path: Path) -> bool:
    """Whether it begins as JSON does, as all that we write beside lengths."""
    with path.open("rb") as file:
        return file.read(1) in (b"{", b"[", b'"', b"")


def _remembered(stem: str, files: Sequence[Path]) -> Remembered:
    states = [path.stat() for path in files]
    lengths = next((path for path in files if path.suffix == ".lengths"), None)
    return Remembered(
        files=tuple(files),
        num_bytes=sum(state.st_size for state in states),
        num_rows=0 if lengths is None else len(np.unique(read_records(lengths)["key"])),
        used=max(state.st_mtime for state in states),
        name=stem[:-13],
        about=_about(next((path for path in files if path.suffix == ABOUT), None)),
    )


def _about(path: Path | None) -> About | None:
    if path is None:
        return None
    with suppress(OSError, ValueError, TypeError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return About(**content)
    return None
