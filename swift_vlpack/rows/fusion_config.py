"""Read a `fusion_config` file, which lists sources of data and how they are mixed:

ratio_by: rows                     # or tokens: ratios are then shares of the tokens of an epoch
sources:
  - dataset: data/captions.jsonl   # anything ms-swift's --dataset takes
    name: captions                 # default: the data set's own name
    ratio: 0.5                     # share of its rows in every epoch; above 1 repeats
    sample_limit: 10000            # use at most this many of its rows
    system: You describe images.   # for rows without a system prompt
    max_pixels: 602112             # pixel limit of its images
    seed: 7                        # seed of its draws

A file of CoordExp is taken as well: `targets` are sources, and an entry with `train_jsonl` has its name as `dataset`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from swift_vlpack.errors import ConfigError
from swift_vlpack.gone import refuse_gone
from swift_vlpack.plan.mix import RATIOS_BY
from swift_vlpack.yaml_files import read_yaml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """A source as the file describes it."""

    dataset: str
    name: str
    ratio: float = 1.0
    sample_limit: int | None = None
    system: str | None = None
    max_pixels: int | None = None
    seed: int | None = None


def _kinds_of(hint: Any) -> tuple[type, ...]:
    """Return the types that YAML may give for a field; a float may be written as a whole number.

    >>> _kinds_of(float | None)
    (<class 'int'>, <class 'float'>)
    """
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return (int, float) if float in kinds else tuple(kinds)


KINDS = {name: _kinds_of(hint) for name, hint in get_type_hints(SourceSpec).items()}
"""The types that each key of a source may have."""

_UNUSED = ("template", "mode", "augmentation_enabled", "curriculum_enabled")
"""Keys of an entry that change nothing in CoordExp either, without its augmentation."""
_INSTEAD = {
    "sample_without_replacement": "give a ratio of at most 1, and take it out here",
    "system_prompt": "write system",
    "user_prompt": "write it into the rows",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """The sources of a `fusion_config` file, and what their ratios count."""

    sources: tuple[SourceSpec, ...]
    ratio_by: str = "rows"


def read_fusion_config(path: str) -> FusionConfig:
    """Read and check the file. Raises `ConfigError`, which names the file, the source and the key."""
    content = read_yaml(Path(path), f"fusion_config {path}")
    if isinstance(content, dict):
        refuse_gone(*content)
        if isinstance(targets := content.pop("targets", None), list):
            content["sources"] = [*targets, *(content.get("sources") or [])]
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("sources"), list)
        or not set(content) <= {"sources", "ratio_by"}
    ):
        raise ConfigError(
            f"fusion_config {path}: expected the key sources, which is a list, and no other key but ratio_by"
        )
    ratio_by = content.get("ratio_by", "rows")
    if ratio_by not in RATIOS_BY:
        raise ConfigError(f"fusion_config {path}: ratio_by must be one of {', '.join(RATIOS_BY)}, got {ratio_by!r}")
    specs = [
        _spec(entry, f"fusion_config {path}: source {n}", Path(path).parent)
        for n, entry in enumerate(content["sources"], start=1)
    ]
    return FusionConfig(sources=_named_apart(specs, f"fusion_config {path}"), ratio_by=ratio_by)


def specs_of(datasets: list[str]) -> list[SourceSpec]:
    """Return the sources that `--dataset` names, each with ratio 1. Equal names get numbers: `chat-0`, `chat-1`."""
    names = [_name_of(dataset) for dataset in datasets]
    return [
        SourceSpec(dataset=dataset, name=name if names.count(name) == 1 else f"{name}-{names[:at].count(name)}")
        for at, (dataset, name) in enumerate(zip(datasets, names, strict=True))
    ]


def _spec(entry: Any, where: str, folder: Path) -> SourceSpec:
    if isinstance(entry, str):
        entry = {"dataset": entry}
    if isinstance(entry, dict) and "train_jsonl" in entry:
        entry = _of_coordexp(entry, where)
    if not isinstance(entry, dict) or "dataset" not in entry:
        raise ConfigError(f"{where}: expected a mapping with the key dataset, got {entry!r}")
    for key, value in entry.items():
        if key not in KINDS:
            raise ConfigError(f"{where}: unknown key {key!r}; known: {', '.join(KINDS)}")
        if not isinstance(value, KINDS[key]) or isinstance(value, bool):
            raise ConfigError(
                f"{where}: {key} must be {' or '.join(kind.__name__ for kind in KINDS[key])}, got {value!r}"
            )
    if entry.get("ratio", 1) < 0:
        raise ConfigError(f"{where}: ratio must be 0 or more, got {entry['ratio']}")
    for key in ("sample_limit", "max_pixels"):
        if entry.get(key, 1) < 1:
            raise ConfigError(f"{where}: {key} must be at least 1, got {entry[key]}")
    dataset = entry["dataset"]
    # A path may also be relative to the folder of the file.
    if not Path(dataset).exists() and (folder / dataset).exists():
        dataset = str(folder / dataset)
    return SourceSpec(**{"name": _name_of(dataset), **entry, "dataset": dataset})


def _of_coordexp(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an entry of a CoordExp file as one of ours. Raises `ConfigError` for what would be mixed otherwise."""
    given = {key: value for key, value in entry.items() if value is not None and key not in _UNUSED}
    for key, instead in _INSTEAD.items():
        if given.pop(key, False):
            raise ConfigError(f"{where}: {key} is a key of CoordExp: {instead}")
    if given.pop("val_jsonl", None):
        _warn_of_validation(where)
    if "train_jsonl" not in given:
        raise ConfigError(f"{where}: train_jsonl names no file; give one, or dataset and name in its place")
    dataset = given.pop("train_jsonl")
    return {"name": given.get("dataset"), **given, "dataset": dataset}


@cache
def _warn_of_validation(where: str) -> None:
    """Warn once in a process, which reads the file several times."""
    logger.warning("%s: val_jsonl is not read; name rows for evaluation by val_dataset", where)


def _name_of(dataset: str) -> str:
    """Return the name of a data set: `captions` for `data/captions.jsonl#500`; a hub name keeps its owner."""
    path = dataset.rsplit("#", 1)[0]
    return Path(path).stem if Path(path).exists() else path


def _named_apart(specs: list[SourceSpec], where: str) -> tuple[SourceSpec, ...]:
    """Raise `ConfigError` if two sources have the same name: reports and seeds tell sources apart by name."""
    names = [spec.name for spec in specs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: two sources are named {duplicates[0]!r}; give each a name")
    return tuple(specs)
