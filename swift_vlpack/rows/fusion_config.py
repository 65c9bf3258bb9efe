"""The `fusion_config` file: sources of data and how they take part.

ratio_by: rows                     # or tokens: ratios are then shares of the tokens of an epoch
sources:
  - dataset: data/captions.jsonl   # anything ms-swift's --dataset takes
    name: captions                 # default: the data set's own name
    ratio: 0.5                     # share of its rows in every epoch; above 1 repeats
    sample_limit: 10000            # at most so many of its rows
    system: You describe images.   # for rows without a system prompt
    max_pixels: 602112             # pixel limit of its images
    seed: 7                        # seed of its draws
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.mix import RATIOS_BY
from swift_vlpack.yaml_files import read_yaml

KINDS = {
    "dataset": (str,),
    "name": (str,),
    "ratio": (int, float),
    "sample_limit": (int,),
    "system": (str,),
    "max_pixels": (int,),
    "seed": (int,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One source as the file asks for it."""

    dataset: str
    name: str
    ratio: float = 1.0
    sample_limit: int | None = None
    system: str | None = None
    max_pixels: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """The whole file."""

    sources: tuple[SourceSpec, ...]
    ratio_by: str = "rows"


def read_fusion_config(path: str) -> FusionConfig:
    """Read and check the file; an error names the file, the source and the key."""
    content = read_yaml(Path(path), f"fusion_config {path}")
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("sources"), list)
        or not set(content) <= {"sources", "ratio_by"}
    ):
        raise ConfigError(f"fusion_config {path}: expected the key sources, a list, and at most ratio_by beside it")
    ratio_by = content.get("ratio_by", "rows")
    if ratio_by not in RATIOS_BY:
        raise ConfigError(f"fusion_config {path}: ratio_by must be one of {', '.join(RATIOS_BY)}, got {ratio_by!r}")
    specs = [
        _spec(entry, f"fusion_config {path}: source {n}", Path(path).parent)
        for n, entry in enumerate(content["sources"], start=1)
    ]
    return FusionConfig(sources=_named_apart(specs, f"fusion_config {path}"), ratio_by=ratio_by)


def specs_of(datasets: list[str]) -> list[SourceSpec]:
    """The sources that `--dataset` names, ratio 1 each; where names are equal they are numbered."""
    names = [_name_of(dataset) for dataset in datasets]
    return [
        SourceSpec(dataset=dataset, name=name if names.count(name) == 1 else f"{name}-{names[:at].count(name)}")
        for at, (dataset, name) in enumerate(zip(datasets, names, strict=True))
    ]


def _spec(entry: Any, where: str, folder: Path) -> SourceSpec:
    if isinstance(entry, str):
        entry = {"dataset": entry}
    if not isinstance(entry, dict) or "dataset" not in entry:
        raise ConfigError(f"{where}: expected a mapping with the key dataset, got {entry!r}")
    known = [spec.name for spec in fields(SourceSpec)]
    for key, value in entry.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
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
    if not Path(dataset).exists() and (folder / dataset).exists():  # beside the file is a good place too
        dataset = str(folder / dataset)
    return SourceSpec(**{"name": _name_of(dataset), **entry, "dataset": dataset})


def _name_of(dataset: str) -> str:
    """`data/captions.jsonl#500` is called captions; a hub name keeps its owner."""
    path = dataset.rsplit("#", 1)[0]
    return Path(path).stem if Path(path).exists() else path


def _named_apart(specs: list[SourceSpec], where: str) -> tuple[SourceSpec, ...]:
    """Names are how reports and seeds tell sources apart."""
    names = [spec.name for spec in specs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: two sources are named {duplicates[0]!r}; give each a name")
    return tuple(specs)
