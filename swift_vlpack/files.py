"""Files that are there whole or not at all, whatever goes down in between."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write whole or not at all, also when the machine goes down."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write whole or not at all, also when the machine goes down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a file system can only rename inside of itself. Hidden, as it is no file of a checkpoint yet.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            # Content before name: a file that is renamed first can be there and empty after a crash of the machine.
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync_tree(folder: Path) -> None:
    """Wait until all that is in a folder, and its own name, is on the disk, where a crash cannot reach it."""
    # From the leaves up, so that a name is on the disk only when what it names is.
    for below, _, names in os.walk(folder, topdown=False):
        for name in names:
            # Opened for reading, which syncs as well: the files are those of others, and perhaps not ours to write.
            with open(Path(below, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(below))
    # The folder's own name stands in the one above it.
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where its file system knows such a thing."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
