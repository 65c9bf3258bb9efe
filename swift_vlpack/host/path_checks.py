"""Check the paths that a run or a command reads or writes: data, models, adapters, checkpoints, output.

Each check raises an error that names the path, says what is wrong, and suggests a similar path that exists:

>>> check_data("--dataset", ["/nowhere/rows.jsonl"])
Traceback (most recent call last):
    ...
swift_vlpack.errors.ConfigError: --dataset /nowhere/rows.jsonl: no such file

A name that a hub may know (`owner/name`) is left to ms-swift.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.run_flags import OF_DATA, loose_word
from swift_vlpack.words import did_you_mean

_HUBS = ("hf::", "ms::")
_UNREAD = (".gz", ".zip", ".zst", ".xz", ".bz2", ".7z", ".tgz", ".tsv", ".xlsx", ".xls", ".pkl")
"""Suffixes of files for which ms-swift's loader, which goes by the suffix, has no reader."""
_MOST_NAMES = 10_000
"""Most names of a folder among which to look for a similar name. A folder of images may have millions."""


def check_model(model: str) -> None:
    """Raise `ConfigError` for a path without a model."""
    path = folder_of(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            is_adapter = (path / "adapter_config.json").is_file()
            hint = "it is an adapter: give it with --adapters" if is_adapter else "name the folder of a model"
            raise ConfigError(f"--model {model}: there is no config.json in it; {hint}")
    elif path.is_file():
        raise ConfigError(f"--model {model} is a file; name the folder of a model, or a model on the hub")
    elif _is_path(model.partition(":")[0]):
        raise ConfigError(f"--model {model}: no such folder{_near(model)}")


def check_adapter(adapter: str) -> None:
    """Raise `ConfigError` for the path of an adapter that does not exist."""
    name = adapter.partition(":")[0]
    # Adapters on a hub have an owner.
    if (_is_path(name) or "/" not in name) and not folder_of(adapter).exists():
        raise ConfigError(f"--adapters {adapter}: no such folder{_near(adapter)}")


def check_cached(what: str, given: str) -> None:
    """Raise `ConfigError` unless this is the folder of a cached data set. `folder#N` means N of its rows."""
    path = Path(given if os.path.exists(given) else given.rpartition("#")[0] or given)
    if not path.is_dir():
        raise ConfigError(f"{what} {given}: no such folder{_near(str(path))}")
    if not (path / "dataset_info.json").is_file():
        inside = [name for name in ("train", "val") if (path / name / "dataset_info.json").is_file()]
        hint = f"; did you mean {path / inside[0]}?" if inside else "; `vlpack export` writes one"
        raise ConfigError(f"{what} {given} is not a cached data set{hint}")


def check_exists(what: str, path: str, *, expands_home: bool) -> None:
    """Raise `ConfigError` if a file does not exist. With `expands_home`, `~` is the home folder, as for ms-swift."""
    if not (Path(path).expanduser() if expands_home else Path(path)).exists():
        raise ConfigError(f"{what} {path}: no such file{_near(path)}")


def folder_of(name: str) -> Path:
    """Return the folder that ms-swift would open: `~` is the home folder, and `folder:inner` is a folder inside."""
    path = os.path.expanduser(name)
    inner = "/".join(path.split(":", 1))
    return Path(inner if os.path.exists(inner) and not os.path.exists(path) else path)


def check_checkpoint(path: Path) -> None:
    """Raise `ConfigError` unless the path is a checkpoint."""
    what = f"--resume_from_checkpoint {path}"
    beside = path if path.is_dir() else path.parent
    found = sorted(beside.glob("checkpoint-*"), key=lambda one: (len(one.name), one.name))
    hint = f"; there is {found[-1]}" if found else ""
    if not path.exists():
        raise ConfigError(f"{what}: no such checkpoint{hint or _looked_in(str(path))}")
    if not path.is_dir():
        raise ConfigError(f"{what} is a file; name the folder of a checkpoint{hint}")
    if hint and not any(
        (path / name).exists() for name in ("trainer_state.json", "config.json", "adapter_config.json")
    ):
        raise ConfigError(f"{what} is not a checkpoint{hint}")


def check_data(what: str, datasets: Iterable[str], registered: Collection[str] = ()) -> None:
    """Raise `ConfigError` for a file or folder of data that does not exist, `DataError` for an empty file."""
    for dataset in datasets:
        if dataset.endswith((".yaml", ".yml")):  # a training file that was typed after --dataset
            raise ConfigError(loose_word(dataset))
        path = _local(dataset)
        if path is None or path in registered or dataset in registered:
            continue
        if not os.path.exists(path):
            home = os.path.expanduser(path)
            hint = f"; ms-swift does not expand ~ here, write {home}" if home != path else _near(path)
            raise ConfigError(f"{what} {dataset}: no such file{hint}")
        _, _, number = dataset.removeprefix(path).rpartition("#")
        if dataset != path and "#" in dataset and not (number.isdecimal() and int(number)):
            raise ConfigError(f"{what} {dataset}: after # comes the number of rows to draw, at least 1")
        if os.path.isfile(path) and path.endswith(_UNREAD):
            raise ConfigError(
                f"{what} {dataset}: ms-swift does not read such a file; unpack it, or make it .jsonl, .json, .csv, "
                ".parquet or .arrow"
            )
        if os.path.isfile(path) and not _has_content(path):
            raise DataError(f"{what} {dataset}: the file is empty; name a file with rows")


def _local(dataset: str) -> str | None:
    """Return the path in a `--dataset` value (`path#rows`, `folder:subset`), or None for a name on a hub."""
    if os.path.exists(dataset):
        return dataset
    if dataset.startswith(_HUBS):
        return None
    for path in (dataset.rpartition("#")[0], dataset.rpartition("#")[0].partition(":")[0], dataset.partition(":")[0]):
        if path and os.path.exists(path):
            return path
    path = dataset.rpartition("#")[0] or dataset
    return path if _is_path(path.partition(":")[0]) else None


def _is_path(name: str) -> bool:
    """Tell whether a name is a path. A name on a hub is one word, or an owner and a name with a single slash."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith(OF_DATA) or name.count("/") > 1


def _has_content(path: str) -> bool:
    """Tell whether a text file has a row. A file of another kind is not opened, and counts as having rows."""
    if not path.endswith((".jsonl", ".json", ".csv", ".txt")):
        return True
    with open(path, "rb") as file:
        return any(line.strip() for line in file)


def check_folder(what: str, folder: Path) -> None:
    """Raise `ConfigError` if a folder cannot be made or written into. Leaves nothing behind."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{what} {folder}: {there} is a file; name a folder that can be made")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{what} {folder}: {there} cannot be written ({error.strerror}); name another one") from None


def check_file(what: str, path: Path) -> None:
    """Raise `ConfigError` if a file cannot be written. Does not change the file."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{what} {path}: no such directory; name a file in one that exists")
    if path.is_dir():
        raise ConfigError(f"{what} {path} is a directory; name a file in it")
    if not path.exists():
        check_folder(f"{what} {path}: folder", folder)
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{what} {path} cannot be written; name a file that can be")


def _near(path: str) -> str:
    """Return the end of an error about a missing file: a similar name, or else the folder that was searched."""
    folder = Path(path).parent
    is_readable = folder.is_dir() and os.access(folder, os.R_OK)
    names = [one.name for one in islice(folder.iterdir(), _MOST_NAMES)] if is_readable else []
    close = did_you_mean(Path(path).name, names)
    if not close:
        return _looked_in(path)
    name = close.removeprefix("; did you mean ").removesuffix("?")
    return f"; did you mean {name if str(folder) == '.' else folder / name}?"


def _looked_in(path: str) -> str:
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"
