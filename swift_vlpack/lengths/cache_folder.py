"""Find, list and remove the files of cached lengths.

For every source and context (template and settings) the folder has files named SOURCE-DIGEST: `.lengths`, `.unchecked`
and `.details` (`cache.py`), `.prefixes` (`prefixes.py`), and `.about`, which names their source and model. Files that
earlier versions have left are listed and removed as well.
A file is ours if both its name and its first bytes say so; other files in the folder are neither listed nor removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift_vlpack.files import write_json
from swift_vlpack.lengths.length_file import MAGIC, read_records

_OF_SOURCE = re.compile(
    r"(?P<stem>.+?-[0-9a-f]{12})\.(?P<kind>lengths|unchecked|prefixes|details|about"
    # of 0.2.0
    r"|notes|heads|failures|damaged-\d+|\d+of\d+\.keys|[0-9a-f]{12}\.(?:notes\.)?parts)"
)
_SHARED = re.compile(r"unreachable\.urls|media\.digests|[0-9a-f]{32}\.(?:trust|observed|damaged-\d+)")  # of 0.2.0
_BINARY = ("lengths", "unchecked", "prefixes", "notes", "heads", "keys")
_MAGIC = MAGIC.partition(b" ")[0]  # of every kind and version
_ABOUT = ".about"


def lengths_folder(given: str | None, environ: Mapping[str, str]) -> Path:
    """Return the folder: the option `packing_cache_dir`, or a folder in ms-swift's own cache of models."""
    if given:
        return Path(given).expanduser()
    of_models = environ.get("MODELSCOPE_CACHE", str(Path.home() / ".cache" / "modelscope" / "hub"))
    return (Path(of_models) / "vlpack" / "lengths").expanduser()


def lengths_path(folder: Path, source: str, context: str) -> Path:
    """Return the path of a source's `.lengths` file.

    The context is part of the name, so that sizes under other settings are kept in files of their own.
    """
    name = re.sub(r"[^\w.-]+", "_", source)[-60:]
    digest = hashlib.blake2b(f"{source}\n{context}".encode(), digest_size=6).hexdigest()
    return folder / f"{name}-{digest}.lengths"


@dataclass(frozen=True, slots=True)
class About:
    """The source and model that a file of lengths belongs to, as saved in the `.about` file."""

    source: str
    origin: str | None
    """The file or data set that the rows are from."""
    template: str
    model_type: str
    version: str
    """The version of this package."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The cached files of one source under one context, with their totals."""

    files: tuple[Path, ...]
    num_bytes: int
    num_rows: int
    used: float
    """When they were last used, in seconds since 1970."""
    name: str
    """The name of the source as it is in the file names: shortened, with other characters replaced."""
    about: About | None
    """None if the `.about` file is missing or damaged."""

    @property
    def source(self) -> str:
        """The full name of the source if it is known, otherwise the one in the file names."""
        return self.about.source if self.about else self.name


def write_about(lengths: Path, about: About) -> None:
    """Write the `.about` file of a file of lengths. Its modification time says when the lengths were last used."""
    with suppress(OSError):  # the file of lengths, in the same folder, reports it
        write_json(lengths.with_suffix(_ABOUT), asdict(about))


def remembered_in(folder: Path) -> list[Remembered]:
    """List the cached files in a folder by source and context, most recently used first."""
    stems: dict[str, list[Path]] = {}
    for path in _files(folder):
        if (match := _OF_SOURCE.fullmatch(path.name)) and _is_ours(path, match["kind"]):
            stems.setdefault(match["stem"], []).append(path)
    groups = [_remembered(stem, sorted(paths)) for stem, paths in stems.items()]
    return sorted(groups, key=lambda group: -group.used)


def shared_files(folder: Path) -> list[Path]:
    """List the files that belong to no single source."""
    shared = (path for path in _files(folder) if _SHARED.fullmatch(path.name))
    return sorted(path for path in shared if _is_ours(path, path.suffix.removeprefix(".")))


def removed(files: Sequence[Path]) -> int:
    """Remove files. Returns the number of bytes that this freed."""
    num_bytes = 0
    for path in files:
        with suppress(FileNotFoundError):  # another process removed it
            size = path.stat().st_size
            path.unlink()
            num_bytes += size
    return num_bytes


def _files(folder: Path) -> Iterator[Path]:
    """Yield the regular files in a folder. Links are skipped, because this package makes none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _is_ours(path: Path, kind: str) -> bool:
    # A file that 0.2.0 set aside is damaged, perhaps in its first bytes. Its name has a digest and a process id.
    if kind.startswith("damaged-"):
        return True
    with path.open("rb") as file:
        if kind.endswith(_BINARY):
            return file.read(len(_MAGIC)) in (_MAGIC, b"")
        return file.read(1) in (b"{", b"[", b'"', b"")  # as JSON begins


def _remembered(stem: str, files: Sequence[Path]) -> Remembered:
    states = [path.stat() for path in files]
    lengths = next((path for path in files if path.suffix == ".lengths"), None)
    return Remembered(
        files=tuple(files),
        num_bytes=sum(state.st_size for state in states),
        num_rows=0 if lengths is None else len(np.unique(read_records(lengths)["key"])),
        used=max(state.st_mtime for state in states),
        name=stem[:-13],
        about=_about(next((path for path in files if path.suffix == _ABOUT), None)),
    )


def _about(path: Path | None) -> About | None:
    if path is None:
        return None
    with suppress(OSError, ValueError, TypeError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return About(**content)
    return None
