"""Write files whole or not at all, even if the process is killed or the machine goes down."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system. Hidden, because it is not complete.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            # Content before name: after a crash, a file that was renamed first can be there and be empty.
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder, and its own name, to the disk."""
    # Bottom-up, so that a name is on the disk only after what it names.
    for below, _, names in os.walk(folder, topdown=False):
        for name in names:
            # Opened for reading, which is enough for fsync, because the files of others may not be ours to write.
            with open(Path(below, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(below))
    # The name of the folder is stored in its parent.
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; does nothing on file systems that cannot."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
