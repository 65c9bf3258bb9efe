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
except ImportError:  # this system has no such locks; runs on it share no disk, which locks are for
    fcntl = None  # type: ignore[assignment]

_SECONDS_TO_WAIT = 6.0
"""Longest wait for the lock of a folder. Child processes of a killed process hold its lock for some 2 s."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The partial file is in the same folder, because a rename is atomic only within one file system.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            # Flush the content before the rename: otherwise, after a crash, the file may be there and empty.
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder whole or not at all: yield a hidden folder next to it, which gets its name at the end.

    A folder of that name is replaced. Files that a killed process left in the hidden folder are removed. Raises
    `ConfigError` if another process is writing it.
    """
    partial, old = (folder.with_name(f".{folder.name}.{what}") for what in ("partial", "old"))
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _lock(handle, f"is writing {partial}")
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


def _lock(handle: int, what: str) -> None:
    """Lock a folder, so that two processes do not write it at once. Raises `ConfigError` if it stays locked."""
    deadline = time.monotonic() + _SECONDS_TO_WAIT
    while not _is_locked(handle):
        if time.monotonic() > deadline:
            raise ConfigError(f"another process {what}; wait for it, or name another folder")
        time.sleep(_SECONDS_TO_WAIT / 20)


def _is_locked(handle: int) -> bool:
    """Try to lock. Returns True on success, and on a file system without locks."""
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


_held: dict[Path, int] = {}
"""The folders that this process holds, with their descriptors."""


def hold(folder: Path, what: str) -> None:
    """Lock a folder until this process ends, however it ends. Raises `ConfigError` if another process holds it.

    `what` says in the error what the other process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    if folder in _held:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, f"{what} {folder}")
    except ConfigError:
        os.close(handle)
        raise
    _held[folder] = handle


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder, and its own name, to the disk."""
    # Go bottom-up, so that a file's content is on the disk before its name.
    for below, _, names in os.walk(folder, topdown=False):
        for name in names:
            # Open for reading, which is enough for fsync: this process may not be allowed to write all files.
            with open(Path(below, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(below))
    # The name of the folder is stored in its parent.
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Does nothing on file systems that cannot do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
