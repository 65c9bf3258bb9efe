"""`vlpack sft`: ms-swift's command with the packing options as real flags and YAML keys.

The options are taken out and travel as `VLPACK_*` variables, which every rank that torchrun starts inherits; everything
else is handed to `swift sft` unchanged.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and with which environment."""

    command: list[str]
    environ: dict[str, str]


def plugin_path() -> Path:
    """The file for `--external_plugins`."""
    return Path(__file__).parent / "plugin" / "vlpack.py"


def sft_launch(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Take the packing options out of flags and YAML, check them, and build the command for `swift sft`."""
    flags, rest = split_flags(argv)
    keys: dict[str, Any] = {}
    if rest and rest[0].endswith((".yaml", ".yml", ".json")):
        keys, rest[0] = _split_file(Path(rest[0]), extend_plugins=f"--{PLUGINS}" not in rest)
    elif f"--{PLUGINS}" not in rest:
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
    return Launch([sys.executable, "-m", "swift.cli.main", "sft", *rest], {**environ, **own})


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


def _split_file(path: Path, *, extend_plugins: bool) -> tuple[dict[str, Any], str]:
    """Separate packing keys from a training file; the rest goes into a file of the same name for ms-swift."""
    import yaml

    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of training options")
    keys = {name: content.pop(name) for name in option_names() if name in content}
    if extend_plugins:
        plugins = content.get(PLUGINS) or []
        plugins = [plugins] if isinstance(plugins, str) else list(plugins)
        content[PLUGINS] = [*plugins, *([] if str(plugin_path()) in plugins else [str(plugin_path())])]
    copy = Path(tempfile.mkdtemp(prefix="vlpack-")) / f"{path.stem}.yaml"
    copy.write_text(yaml.safe_dump(content, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return keys, str(copy)


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
