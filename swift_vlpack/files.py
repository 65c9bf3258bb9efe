"""Write files and folders whole or not at all, even if the process is killed or the machine goes down."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError

try:
    import fcntl
except ImportError:  # no such locks on this system, which has no shared disk either
    fcntl = None  # type: ignore[assignment]

_SECONDS_TO_WAIT = 6.0
"""Time to wait for the lock of a folder: processes that outlive a killed one hold it for some 2 s."""


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


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder whole or not at all: yields a hidden folder beside it, which takes its name at the end.

    A folder of that name is replaced. What a killed process left in the hidden one is removed. Raises `ConfigError` if
    another process is at it.
    """
    partial, old = (folder.with_name(f".{folder.name}.{what}") for what in ("partial", "old"))
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _lock(handle, partial)
        yield from _filled(folder, partial, old)
    finally:
        os.close(handle)


def _filled(folder: Path, partial: Path, old: Path) -> Iterator[Path]:
    for left_over in (*partial.iterdir(), old):
        _remove(left_over)
    try:
        yield partial
        sync_tree(partial)
        if folder.exists():
            folder.replace(old)
        partial.replace(folder)
        sync_folder(folder.parent)
        _remove(old)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _lock(handle: int, partial: Path) -> None:
    """Lock a folder, so that two processes do not write it at once."""
    deadline = time.monotonic() + _SECONDS_TO_WAIT
    while not _is_locked(handle):
        if time.monotonic() > deadline:
            raise ConfigError(f"another process is writing {partial}; wait for it, or name another folder")
        time.sleep(_SECONDS_TO_WAIT / 20)


def _is_locked(handle: int) -> bool:
    """Try to lock. Also returns True on a file system without locks."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
