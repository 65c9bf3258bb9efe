"""Check paths that a run or a command names: data, models, adapters, checkpoints, and what is to be written.

Each check raises an error that names the path, what is wrong, and a path like it that is there:

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
_MOST_NAMES = 10_000
"""Most names of a folder to search for one like a missing name; a folder of images may have millions."""


def check_model(model: str) -> None:
    """Refuse a folder without a model."""
    path = _folder(model)
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
    """Refuse an adapter that is named by a path that is not there."""
    if _is_path(adapter.partition(":")[0]) and not _folder(adapter).exists():
        raise ConfigError(f"--adapters {adapter}: no such folder{_near(adapter)}")


def check_cached(what: str, given: str) -> None:
    """Refuse what is no folder of a cached data set; `folder#N` means N of its rows."""
    path = Path(given if os.path.exists(given) else given.rpartition("#")[0] or given)
    if not path.is_dir():
        raise ConfigError(f"{what} {given}: no such folder{_near(str(path))}")
    if not (path / "dataset_info.json").is_file():
        inside = [name for name in ("train", "val") if (path / name / "dataset_info.json").is_file()]
        hint = f"; did you mean {path / inside[0]}?" if inside else "; `vlpack export` writes one"
        raise ConfigError(f"{what} {given} is no cached data set{hint}")


def check_exists(what: str, path: str, *, expands_home: bool) -> None:
    """Refuse a file that is not there. With `expands_home`, ms-swift reads `~` in the path as the home folder."""
    if not (Path(path).expanduser() if expands_home else Path(path)).exists():
        raise ConfigError(f"{what} {path}: no such file{_near(path)}")


def _folder(name: str) -> Path:
    """Return the folder of weights that ms-swift means: `~` is the home, and `folder:inner` is a folder in a folder."""
    path = os.path.expanduser(name)
    inner = "/".join(path.split(":", 1))
    return Path(inner if os.path.exists(inner) and not os.path.exists(path) else path)


def check_checkpoint(path: Path) -> None:
    """Refuse a folder that is no checkpoint."""
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
        raise ConfigError(f"{what} is no checkpoint{hint}")


def check_data(what: str, datasets: Iterable[str], registered: Collection[str] = ()) -> None:
    """Refuse data that is named as a file or folder and is not there, and files that are empty."""
    for dataset in datasets:
        if dataset.endswith((".yaml", ".yml")):  # a word that the list of data sets has swallowed
            raise ConfigError(loose_word(dataset))
        path = _local(dataset)
        if path is None or path in registered or dataset in registered:
            continue
        if not os.path.exists(path):
            home = os.path.expanduser(path)
            hint = f"; ms-swift does not expand ~ here, write {home}" if home != path else _near(path)
            raise ConfigError(f"{what} {dataset}: no such file{hint}")
        if os.path.isfile(path) and not _has_content(path):
            raise DataError(f"{what} {dataset}: the file is empty, there is no row in it")


def _local(dataset: str) -> str | None:
    """Return the path that is meant, by ms-swift's rules (`path#rows`, `folder:subset`); None for a name on a hub."""
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
    """Tell a path from a name on a hub, which is one word, or an owner and a name with one slash between them."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith(OF_DATA) or name.count("/") > 1


def _has_content(path: str) -> bool:
    """Tell whether a file has a row; a file that is no text is left to its own reader."""
    if not path.endswith((".jsonl", ".json", ".csv", ".txt")):
        return True
    with open(path, "rb") as file:
        return any(line.strip() for line in file)


def check_folder(what: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written into. Leaves nothing there."""
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
    """Refuse a file that cannot be written. Leaves it as it is."""
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
    """Return the end of an error about a missing file: one with a name like it, else where it was looked for."""
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
