"""Load cached data sets (`--cached_dataset`) as sources: the rows that plain ms-swift would train, with their numbers.

ms-swift trusts the column `lengths` of such a data set, which does not say by which settings it was made, nor how many
patches and targets a row has. `vlpack export` notes both beside the rows (`SETTINGS`, `SIZES`). By equal settings, the
sizes that it noted are those of this run, if rows that are measured have them, too (`with_exported_sizes`). Otherwise
all rows are measured as those of every source are, and `compare_lengths` says where the column has other lengths, and
which settings differ.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from datasets import Dataset as HfDataset
from numpy.typing import NDArray
from swift.dataset import DatasetLoader
from swift.pipelines import utils as swift_utils
from swift.utils import get_logger, is_master

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.host.messages import said_by_swift
from swift_vlpack.host.row_numbers import ROW, column
from swift_vlpack.lengths.context import dependencies_of, digest_of, plain
from swift_vlpack.rows.sequences import rounded_up
from swift_vlpack.rows.sizes import NUM_COLUMNS
from swift_vlpack.rows.source import RowSource
from swift_vlpack.words import counted

logger = get_logger()

SETTINGS = "settings.json"
"""The settings that lengths of an export depend on; beside `train` and `val`."""
SIZES = "sizes.npz"
"""By name of the folder (5, num_rows): tokens before they are rounded up, images, patches, targets and aspect."""
_LENGTHS = ("lengths", "length")
"""Names of the column in this version of ms-swift and in older ones."""
_NAMED = ("settings", "variables", "packages")
"""Groups of settings that are saved one by one. Of all other groups a digest is saved."""
_OF_NO_WHOLE_ROW = ("settings max_length",)
"""Settings that change the size of no row unless rows are truncated: a row that is too long is left out."""
NUM_NAMED = 8
"""Most settings that a warning names."""


def cached_sources(args: Any, config: PackingConfig) -> list[RowSource]:
    """Load the training sources that `--cached_dataset` names."""
    if not getattr(args, "cached_dataset", None):
        return []
    loaded, _ = _load(args, config)
    names = [_name_of(path) for path in args.cached_dataset]
    return [
        _source(name if names.count(name) == 1 else f"{name}-{number}", one)
        for number, (name, one) in enumerate(zip(names, loaded, strict=True))
    ]


def with_cached_validation(rows: Any, args: Any, config: PackingConfig) -> Any:
    """Add the validation rows that `--cached_val_dataset` names to those of the run; either may be None."""
    if not getattr(args, "cached_val_dataset", None):
        return rows
    _, loaded = _load(args, config)
    own = [one.rows.remove_columns([name for name in (ROW, *_LENGTHS) if name in one.rows.column_names])
           for one in loaded]  # fmt: skip
    return DatasetLoader.concat_datasets([*own, *([] if rows is None else [rows])])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cached:
    """A cached data set as ms-swift loads it, with the number of each row in the column `ROW`."""

    rows: HfDataset
    folder: Path
    too_long: Sequence[int]
    """Numbers of the rows that ms-swift leaves out for `--max_length`."""


def _load(args: Any, config: PackingConfig) -> tuple[list[_Cached], list[_Cached]]:
    """Load both lists in one call, as plain ms-swift does: it draws the `#N` rows of all from one random stream."""
    if config.cuts_rows:  # keep ms-swift from deleting long rows, which are cut later
        args = copy.copy(args)
        args.truncation_strategy = None
    found: list[tuple[Path, Sequence[int]]] = []
    with said_by_swift("cannot load the cached data"), _noting(found, args):
        both = swift_utils.get_cached_dataset(args)
    noted = iter(found)
    train, val = ([_Cached(rows=rows, folder=at[0], too_long=at[1]) for rows, at in zip(some, noted)] for some in both)  # noqa: B905
    return train, val


@contextmanager
def _noting(found: list[tuple[Path, Sequence[int]]], args: Any) -> Iterator[None]:
    """Number the rows of every data set that ms-swift reads inside this block, and append its folder to `found`."""
    read = swift_utils.load_from_disk

    def numbered(path: str) -> HfDataset:
        rows = read(path)
        known = next((name for name in _LENGTHS if name in rows.column_names), None)
        if known is None:
            raise DataError(
                f"--cached_dataset {path} has no column lengths; `vlpack export` and `swift export` write it"
            )
        is_limited = args.truncation_strategy == "delete" and args.max_length is not None
        lengths = np.array([max(_numbers(one)) for one in rows[known]], dtype=np.int64)
        too_long = np.flatnonzero(lengths > args.max_length).tolist() if is_limited else ()
        found.append((Path(path).absolute(), too_long))
        return rows.add_column(ROW, np.arange(len(rows)))

    swift_utils.load_from_disk = numbered
    try:
        yield
    finally:
        swift_utils.load_from_disk = read


def _numbers(lengths: Any) -> list[int]:
    return lengths if isinstance(lengths, list) else [lengths]


def _name_of(path: str) -> str:
    """Return the name of a source: `captions_cached/train`."""
    folder = Path(path.rpartition("#")[0] if not os.path.exists(path) else path).absolute()
    return f"{folder.parent.name}/{folder.name}"


def _source(name: str, one: _Cached) -> RowSource:
    known = next(column for column in _LENGTHS if column in one.rows.column_names)
    if one.too_long:
        logger.warning(f"source {name}: {counted(len(one.too_long), 'row')} over --max_length left out")
    return RowSource(
        name=name,
        rows=one.rows.remove_columns([ROW, known]),
        row_numbers=column(one.rows, ROW),
        num_lost=len(one.too_long),
        lost_rows=one.too_long,
        origin=str(one.folder),
        cached_lengths=np.array([sum(_numbers(of_row)) for of_row in one.rows[known]], dtype=np.int64),
    )


# -- settings ---------------------------------------------------------------------------------------------------------


def settings_of(template: Any, plugins: Sequence[str]) -> dict[str, Any]:
    """Return everything that lengths depend on, by name, as JSON can hold it."""
    parts = dependencies_of(template, plugins)
    named = {f"{group} {name}": value for group in _NAMED for name, value in parts.pop(group).items()}
    digests = {name: digest_of(part, 8) for name, part in parts.items()}
    found: dict[str, Any] = json.loads(json.dumps({**named, **digests}, default=plain))
    return found


def write_settings(
    folder: Path, template: Any, plugins: Sequence[str], multiple: int, sizes: Mapping[str, NDArray[np.float64]]
) -> None:
    """Note by which settings an export was made, and the sizes that were measured by them."""
    content = {"multiple": multiple, "max_length": template.max_length, "settings": settings_of(template, plugins)}
    (folder / SETTINGS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if sizes:
        np.savez_compressed(folder / SIZES, allow_pickle=False, **sizes)


def with_exported_sizes(sources: Sequence[RowSource], template: Any, plugins: Sequence[str]) -> list[RowSource]:
    """Give cached sources the sizes that `vlpack export` noted, if it had the settings of this run."""
    return [_with_exported_sizes(source, template, plugins) for source in sources]


def _with_exported_sizes(source: RowSource, template: Any, plugins: Sequence[str]) -> RowSource:
    if source.cached_lengths is None or source.origin is None:
        return source
    folder = Path(source.origin)
    noted = _noted(folder.parent / SETTINGS)
    now = settings_of(template, plugins)
    if names := _differing(noted, now, _OF_NO_WHOLE_ROW if template.truncation_strategy == "raise" else ()):
        if noted and is_master():
            logger.info(f"source {source.name}: its rows are measured anew; {_in_words(names, noted, now)}")
        return source
    sizes = _exported_sizes(folder)
    if sizes is None or source.row_numbers is None or sizes.shape[1] <= max(source.row_numbers, default=-1):
        return source
    sizes = sizes[:, source.row_numbers]
    # The rows may have been replaced since, as by an export of ms-swift into the same folder.
    is_of_rows = (_as_exported(sizes[0].astype(np.int64), noted) == source.cached_lengths).all()
    return replace(source, exported_sizes=sizes) if is_of_rows else source


def _exported_sizes(folder: Path) -> NDArray[np.float64] | None:
    """Read the sizes that an export noted for the rows of a folder; None if they cannot be read."""
    with suppress(OSError, ValueError, KeyError, BadZipFile), (folder.parent / SIZES).open("rb") as file:
        sizes: NDArray[np.float64] = np.load(file)[folder.name]
        if sizes.dtype == np.float64 and sizes.ndim == 2 and len(sizes) == NUM_COLUMNS + 1 and (sizes[0] > 0).all():
            return sizes
    return None


def compare_lengths(sources: Sequence[RowSource], template: Any, plugins: Sequence[str]) -> None:
    """Warn if cached lengths differ from the lengths of this run, with which packs are planned."""
    for source in sources:
        if source.cached_lengths is None or source.sizes is None or source.origin is None or not is_master():
            continue
        noted = _noted(Path(source.origin).parent / SETTINGS)
        own = source.sizes.lengths
        wanted = _as_exported(own, noted)
        differing = np.flatnonzero((own > 0) & (wanted != source.cached_lengths))
        if len(differing):
            first = int(differing[0])
            example = f"{source.where(first)}: {source.cached_lengths[first]} there, {wanted[first]} here"
            logger.warning(
                f"source {source.name}: {len(differing)} of {counted(len(own), 'length')} in the cached data set are "
                f"not those of this run, which were measured anew ({example}); "
                f"{_differences(noted, settings_of(template, plugins))}"
            )


def _as_exported(lengths: NDArray[np.int64], noted: dict[str, Any]) -> NDArray[np.int64]:
    """Round lengths as the export did."""
    multiple = noted.get("multiple", 1)
    rounded = rounded_up(lengths.tolist(), multiple, noted.get("max_length")) if multiple > 1 else lengths
    return np.array(rounded, dtype=np.int64)


def _noted(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {}


def _differences(noted: dict[str, Any], now: dict[str, Any]) -> str:
    """Name the settings that differ.

    >>> _differences({"settings": {"variables MAX_PIXELS": "50176", "code": 1}}, {"variables MAX_PIXELS": None})
    'settings that differ: code (1 there, None here), variables MAX_PIXELS (50176 there, None here)'
    """
    if "settings" not in noted:
        return "which settings differ is not known, because ms-swift's export does not save them"
    names = _differing(noted, now)
    return _in_words(names, noted, now) if names else "no setting that is noted differs"


def _differing(noted: dict[str, Any], now: dict[str, Any], but: Sequence[str] = ()) -> list[str]:
    """Return the names of the settings that differ; of all, if none are noted."""
    before = noted.get("settings", {})
    return sorted(name for name in {*before, *now} - {*but} if before.get(name) != now.get(name))


def _in_words(names: Sequence[str], noted: dict[str, Any], now: dict[str, Any]) -> str:
    before = noted.get("settings", {})
    shown = [f"{name} ({before.get(name)} there, {now.get(name)} here)" for name in names[:NUM_NAMED]]
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"settings that differ: {', '.join(shown)}{more}"
