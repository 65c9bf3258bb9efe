"""`vlpack sft`: ms-swift's command with the packing options as real flags and YAML keys.

The options are taken out and travel as `VLPACK_*` variables, which every rank that torchrun starts inherits; everything
else is handed to `swift sft` unchanged. `vlpack plan` takes the same options.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_vlpack.core.config import ENV_PREFIX, PackingConfig, option_names, options_in_env
from swift_vlpack.core.errors import ConfigError
from swift_vlpack.yaml_files import read_yaml

SWIFTS_OWN = ("packing", "packing_length")
"""Options that are flags of ms-swift as well and go to it as they are."""

PLUGINS = "external_plugins"
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Variables of a launcher; a plan is one process, whoever starts it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and with which environment."""

    command: list[str]
    environ: dict[str, str]


@dataclass(frozen=True, slots=True)
class PlanLaunch:
    """A run to plan: the flags of `swift sft`, the environment, and how many ranks it is of."""

    flags: list[str]
    environ: dict[str, str]
    num_ranks: int


def plugin_path() -> Path:
    """The file for `--external_plugins`."""
    return Path(__file__).parent / "plugin" / "vlpack.py"


def sft_launch(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Take the packing options out of flags and YAML, check them, and build the command for `swift sft`."""
    run = _taken_apart(argv, environ)
    flags = run.flags if run.path is None else [_written(run.keys, run.path), *run.flags]
    return Launch([sys.executable, "-m", "swift.cli.main", "sft", *flags], run.environ)


def plan_launch(argv: Sequence[str], environ: Mapping[str, str], *, num_ranks: int | None = None) -> PlanLaunch:
    """The same run taken apart for `vlpack plan`: one process, all its options as flags, and how many ranks it is of.

    What `swift sft` does before it starts training is done here: the `ENV` block of the file becomes environment,
    where it does not win over what is set, and the other keys become flags before those of the command line.
    """
    run = _taken_apart(argv, environ)
    keys = dict(run.keys)
    block = keys.pop("ENV", None) or {}
    if not isinstance(block, dict):
        raise ConfigError(f"{run.path}: ENV must be a mapping of variables, got {block!r}")
    environ = {**{name: str(value) for name, value in block.items()}, **run.environ}
    num_ranks = _num_ranks(environ) if num_ranks is None else num_ranks
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    own = {name: value for name, value in environ.items() if name not in _OF_A_RANK}
    own.setdefault("LOG_LEVEL", "WARNING")  # ms-swift prints pages; who wants them sets INFO
    # A plan needs no GPU. Where it saw several, ms-swift would take its one process for a model spread over them.
    return PlanLaunch([*_as_flags(keys), *run.flags], {**own, "CUDA_VISIBLE_DEVICES": ""}, num_ranks)


def _num_ranks(environ: Mapping[str, str]) -> int:
    """The ranks that ms-swift would start."""
    counts = [environ.get(name, "1") for name in ("NPROC_PER_NODE", "NNODES")]
    if not all(count.isdecimal() for count in counts):
        raise ConfigError(
            f"NPROC_PER_NODE={counts[0]} and NNODES={counts[1]} do not say how many ranks there are; give --num_ranks"
        )
    return int(counts[0]) * int(counts[1])


def _as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Keys of a training file as ms-swift's flags: a list is several values, a mapping is JSON."""
    flags: list[str] = []
    for name, value in keys.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        flags += [f"--{name}", *map(str, text if isinstance(text, list) else [text])]
    return flags


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with the packing options taken out: they are ms-swift's flags or `VLPACK_*` variables now."""

    path: Path | None
    """The training file, of which `keys` are left."""
    keys: dict[str, Any]
    flags: list[str]
    environ: dict[str, str]


def _taken_apart(argv: Sequence[str], environ: Mapping[str, str]) -> _Run:
    flags, rest = split_flags(argv)
    path = Path(rest.pop(0)) if rest and rest[0].endswith((".yaml", ".yml", ".json")) else None
    keys, content = ({}, {}) if path is None else _split_file(path, extend_plugins=f"--{PLUGINS}" not in rest)
    if path is None and f"--{PLUGINS}" not in rest:
        rest += [f"--{PLUGINS}", str(plugin_path())]
    if f"--{PLUGINS}" in rest and str(plugin_path()) not in rest:
        rest.insert(rest.index(f"--{PLUGINS}") + 1, str(plugin_path()))
    options = {**keys, **flags}
    PackingConfig.from_mapping(
        {**options_in_env(environ), **options, "packing_length": options.get("packing_length", 1)}
    )
    options.setdefault("packing", "true")
    for name in SWIFTS_OWN:
        if name in options:
            rest += [f"--{name}", _text(options.pop(name))]
    own = {ENV_PREFIX + name.upper(): _text(value) for name, value in options.items()}
    return _Run(path, content, rest, {**environ, **own})


def split_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate packing flags, `--name value`, `--name=value` or a bare `--name` for true, from the others."""
    known = set(option_names())
    flags: dict[str, str] = {}
    rest: list[str] = []
    at = 0
    while at < len(argv):
        name, has_value, value = argv[at].partition("=")
        option = name[2:].replace("-", "_") if name.startswith("--") else ""
        at += 1
        if option not in known:
            rest.append(argv[at - 1])
            continue
        if not has_value:
            is_bare = at == len(argv) or argv[at].startswith("--")
            value = "true" if is_bare else argv[at]
            at += not is_bare
        flags[option] = value
    return flags, rest


def _split_file(path: Path, *, extend_plugins: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the packing keys of a training file from those for ms-swift."""
    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of training options")
    keys = {name: content.pop(name) for name in option_names() if name in content}
    if extend_plugins:
        plugins = content.get(PLUGINS) or []
        plugins = [plugins] if isinstance(plugins, str) else list(plugins)
        content[PLUGINS] = [*plugins, *([] if str(plugin_path()) in plugins else [str(plugin_path())])]
    return keys, content


def _written(content: dict[str, Any], path: Path) -> str:
    """A file of the same name for ms-swift."""
    import yaml

    copy = Path(tempfile.mkdtemp(prefix="vlpack-")) / f"{path.stem}.yaml"
    copy.write_text(yaml.safe_dump(content, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return str(copy)


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
