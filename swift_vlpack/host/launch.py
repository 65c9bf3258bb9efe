"""`vlpack sft` and `vlpack pt`: ms-swift's command with the packing options as real flags and YAML keys.

The options are taken out and travel as `VLPACK_*` variables, which every rank that torchrun starts inherits; everything
else goes to ms-swift unchanged: what its own command does with a training file before it starts training is done here,
so that the command can become the training process itself. `vlpack plan` takes the same options.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_vlpack.config import ENV_PREFIX, PackingConfig, checked, chosen_options, kind_of, option_names
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.run_checks import OF_TRAINING, PLUGINS, Registered, check_run, given_options, loose_word
from swift_vlpack.host.swift_flags import flag_names, source_file, tuner_types
from swift_vlpack.plan.registry import known_names
from swift_vlpack.words import did_you_mean
from swift_vlpack.yaml_files import read_yaml

logger = logging.getLogger(__name__)

COMMANDS = ("sft", "pt")
"""ms-swift's commands that are packed, by their names."""
FLAGS_OF_SWIFT = ("packing", "packing_length")
"""Options that are flags of ms-swift as well and go to it as they are."""

CONFIG_FILE = "SWIFT_CONFIG_FILE"
"""ms-swift's variable of the training file, which it copies beside the checkpoints."""
_OF_TORCHRUN = ("NPROC_PER_NODE", "MASTER_PORT", "NNODES", "NODE_RANK", "MASTER_ADDR")
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Variables of a launcher; a plan is one process, whoever starts it."""
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and with which environment."""

    command: list[str]
    environ: dict[str, str]
    flags: list[str]
    """The flags for ms-swift in `command`."""
    config: PackingConfig


@dataclass(frozen=True, slots=True)
class RunLaunch:
    """A run to say something of: the flags of ms-swift, the environment, and how many ranks it is of."""

    flags: list[str]
    environ: dict[str, str]
    command: str
    """`sft` or `pt`."""
    num_ranks: int
    config: PackingConfig


def plugin_path() -> Path:
    """The file for `--external_plugins`."""
    return Path(__file__).parents[1] / "plugin" / "vlpack.py"


def train_launch(argv: Sequence[str], environ: Mapping[str, str], *, command: str = "sft") -> Launch:
    """Take the packing options out of flags and YAML, check them, and build the command that trains.

    It is the one that `swift sft` or `swift pt` would start and wait for, so a signal meets the training process or
    torchrun.
    """
    flags, own, config = _taken_apart(argv, environ)
    script = str(source_file("swift", "cli", command))
    return Launch([sys.executable, *_torchrun(own), script, *flags], own, flags, config)


def check_launch(launch: Launch | RunLaunch) -> None:
    """Refuse what cannot become a run while it costs nothing: before an import, a model, a network."""
    if _is_ignoring_errors(launch.flags) or not flag_names():  # of a version whose flags cannot be read
        return
    options = given_options(launch.flags)
    plugins = [path for name in PLUGINS for path in options.get(name, ())]
    is_plain = all(map(is_our_plugin, plugins))  # a plugin may register what only the training process knows
    registered = Registered((), tuner_types()) if is_plain else Registered()
    check_run(options, launch.config, registered, is_training=isinstance(launch, Launch))


def is_our_plugin(path: str) -> bool:
    """Tell whether the file is this package's plugin. The content decides, so copies and other checkouts count too."""
    file = Path(path)
    return file.is_file() and file.read_bytes() == plugin_path().read_bytes()


def run_launch(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    command: str = "sft",
    num_ranks: int | None = None,
    needs_gpu: bool = False,
) -> RunLaunch:
    """The same run taken apart for a command that says something of it: one process, and how many ranks it is of.

    With `needs_gpu` it has those that one rank of the run has; otherwise none.
    """
    flags, variables, config = _taken_apart(argv, environ)
    num_ranks = checked_num_ranks(_num_ranks(variables) if num_ranks is None else num_ranks)
    own = {name: value for name, value in variables.items() if name not in _OF_A_RANK}
    # Where it saw several GPUs, ms-swift would take its one process for a model spread over them.
    own |= _gpus_of_a_rank(own, num_ranks) if needs_gpu else {_GPUS: ""}
    return RunLaunch(flags, own, command, num_ranks, config)


def _gpus_of_a_rank(environ: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """The first one, where every rank has its own; a run of one process has all that it sees."""
    return {} if num_ranks == 1 else {_GPUS: environ.get(_GPUS, "0").partition(",")[0]}


def checked_num_ranks(num_ranks: int) -> int:
    """The number, if there can be so many ranks."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    return num_ranks


def _torchrun(environ: Mapping[str, str]) -> list[str]:
    """What starts the ranks, where ms-swift would start some."""
    if "NPROC_PER_NODE" not in environ and "NNODES" not in environ:
        return []
    given = [part for name in _OF_TORCHRUN if name in environ for part in (f"--{name.lower()}", environ[name])]
    return ["-m", "torch.distributed.run", *given]


def _num_ranks(environ: Mapping[str, str]) -> int:
    """The ranks that ms-swift would start."""
    counts = [environ.get(name, "1") for name in ("NPROC_PER_NODE", "NNODES")]
    if not all(count.isdecimal() for count in counts):
        raise ConfigError(
            f"NPROC_PER_NODE={counts[0]} and NNODES={counts[1]} do not say how many ranks there are; give --num_ranks"
        )
    return int(counts[0]) * int(counts[1])


def _taken_apart(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str], PackingConfig]:
    """Return ms-swift's flags, the environment with the packing options in it, and the checked packing options."""
    flags, rest = split_flags(argv)
    path = rest.pop(0) if rest and rest[0].endswith(OF_TRAINING) else None
    if rest and not rest[0].startswith("--"):  # it would become part of the file's last list
        raise ConfigError(loose_word(rest[0]))
    content = {} if path is None else _read(path)
    variables = {**_variables(content.pop("ENV", None), path, environ), **environ}
    if path is not None:
        variables[CONFIG_FILE] = path
    keys = {name: content.pop(name) for name in option_names() if name in content}
    _refuse_unknown(content, rest, path)
    options = chosen_options(variables, keys, flags)
    has_plugins = PLUGINS[0] in content or any(_option_name(part.partition("=")[0]) == PLUGINS[0] for part in rest)
    options.setdefault("packing", "true")
    config = checked(_checked_here(options, variables, environ, has_plugins))
    own = {ENV_PREFIX + name.upper(): _text(value) for name, value in options.items() if name not in FLAGS_OF_SWIFT}
    given = {**keys, **flags, "packing": options["packing"]}  # a length in the environment stays there
    of_swift = [part for name in FLAGS_OF_SWIFT if name in given for part in (f"--{name}", _text(given[name]))]
    return [*_with_plugin([*_as_flags(content), *rest]), *of_swift], {**variables, **own}, config


def _checked_here(
    options: Mapping[str, Any], variables: Mapping[str, str], environ: Mapping[str, str], has_plugins: bool
) -> dict[str, Any]:
    """The options without a strategy that only the training process can find: by a plugin, or a path it gets."""
    name = str(options.get("packing_strategy", ""))
    has_own_path = variables.get("PYTHONPATH") != environ.get("PYTHONPATH")
    is_found_later = has_own_path if ":" in name else has_plugins and name not in known_names()
    return {key: value for key, value in options.items() if key != "packing_strategy" or not is_found_later}


def _read(path: str) -> dict[str, Any]:
    content = read_yaml(Path(path), path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of training options")
    return content


def _variables(block: Any, path: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The `ENV` block of a training file. As for ms-swift, what is set outside wins over it."""
    if not isinstance(block or {}, dict):
        raise ConfigError(f"{path}: ENV must be a mapping of variables, got {block!r}")
    variables = {str(name): str(value) for name, value in (block or {}).items()}
    for name, value in variables.items():
        if environ.get(name, value) != value:
            logger.warning(
                "%s=%s is set already and wins over %s in the ENV block of %s", name, environ[name], value, path
            )
    return variables


def _as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Keys of a training file as ms-swift's flags: a list is several values, a mapping is JSON."""
    flags: list[str] = []
    for name, value in keys.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        flags += [f"--{name}", *map(str, text if isinstance(text, list) else [text])]
    return flags


def _with_plugin(flags: list[str]) -> list[str]:
    """The last list of plugins is the one that counts; ours comes first in it."""
    own = str(plugin_path())
    lists = [at for at, flag in enumerate(flags) if _option_name(flag.partition("=")[0]) == PLUGINS[0]]
    if not lists:
        return [*flags, f"--{PLUGINS[0]}", own]
    at = lists[-1]
    _, _, value = flags[at].partition("=")
    after = [*([value] if value else []), *flags[at + 1 :]]
    return [*flags[:at], f"--{PLUGINS[0]}", *([] if own in after else [own]), *after]


def split_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate packing flags, `--name value`, `--name=value` or a bare `--name` for true, from the others."""
    known = set(option_names())
    flags: dict[str, str] = {}
    rest: list[str] = []
    at = 0
    while at < len(argv):
        name, has_value, value = argv[at].partition("=")
        option = _option_name(name)
        at += 1
        if option not in known:
            rest.append(argv[at - 1])
            continue
        if not has_value:
            is_bare = at == len(argv) or argv[at].startswith("--")
            if is_bare and "true" not in kind_of(option):
                raise ConfigError(f"--{option} needs a value: {kind_of(option)}")
            value = "true" if is_bare else argv[at]
            at += not is_bare
        flags[option] = value
    return flags, rest


def _option_name(flag: str) -> str:
    return flag[2:].replace("-", "_") if flag.startswith("--") else ""


def _refuse_unknown(keys: Iterable[str], flags: Sequence[str], path: str | None) -> None:
    """Name every key and flag that ms-swift does not have, and what was meant: it would say so in half a minute."""
    known = flag_names()
    if not known or _is_ignoring_errors(flags) or "ignore_args_error" in keys:
        return
    given = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    unknown = [name for name in given if " " not in name and not _is_known(_option_name(name), known)]
    names = {*known, *option_names()}
    problems = [f"unknown option {name}{_meant(name, {f'--{one}' for one in names})}" for name in unknown]
    problems += [f"{path}: unknown key {key}{_meant(key, names)}" for key in keys if not _is_known(str(key), known)]
    if problems:
        raise ConfigError(f"{'; '.join(problems)} (`swift sft --help` and `vlpack sft --help` list all)")


def _is_ignoring_errors(flags: Sequence[str]) -> bool:
    return any(_option_name(flag.partition("=")[0]) == "ignore_args_error" for flag in flags)


def _is_known(name: str, known: frozenset[str]) -> bool:
    """Whether ms-swift takes it: a field, its negation, or the beginning of one, as every argparse does."""
    name = name.replace("-", "_")
    return any(option.startswith((name, name.removeprefix("no_"))) for option in known)


def _meant(name: object, known: Iterable[str]) -> str:
    return did_you_mean(name, known).replace(";", ",")


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
