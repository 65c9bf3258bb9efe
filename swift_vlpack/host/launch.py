"""Work out the training run that a command line names: a training file, flags and environment variables.

`vlpack sft` takes the training file of `swift sft`, with the packing options as additional keys and flags. These are
taken out, checked, and passed on as `VLPACK_*` variables, which every rank that torchrun starts inherits. Everything
else goes to ms-swift unchanged:

>>> launch = train_launch(["--model", "m", "--packing_strategy", "exact"], {"MAX_PIXELS": "50176"})
>>> launch.flags[:2], launch.flags[-2:]
(['--model', 'm'], ['--packing', 'true'])
>>> launch.environ
{'MAX_PIXELS': '50176', 'VLPACK_PACKING_STRATEGY': 'exact'}

`train_launch` describes the process that trains; `run_launch` describes the same run for a command about it, such as
`vlpack plan`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_vlpack.config import ENV_PREFIX, PackingConfig, checked, checked_num_ranks, chosen_options, option_names
from swift_vlpack.errors import ConfigError
from swift_vlpack.gone import refuse_gone
from swift_vlpack.host.machine_checks import check_machine, check_variables, check_weights
from swift_vlpack.host.path_checks import folder_of
from swift_vlpack.host.run_checks import PLUGINS, Registered, check_run, refuse_metric
from swift_vlpack.host.run_flags import (
    OF_TRAINING,
    as_flags,
    given_options,
    ignores_errors,
    loose_word,
    option_name,
    refuse_unknown,
    split_flags,
)
from swift_vlpack.host.swift_flags import VALUES, flag_names, known_values, source_file, tuner_types
from swift_vlpack.plan.registry import known_names
from swift_vlpack.yaml_files import read_yaml

logger = logging.getLogger(__name__)

SWIFT_COMMANDS = ("sft", "pt")
"""ms-swift's commands that this package packs."""
FLAGS_OF_SWIFT = ("packing", "packing_length")
"""Options that are also flags of ms-swift, and are passed to it unchanged."""
CONFIG_FILE = "SWIFT_CONFIG_FILE"
"""ms-swift's variable with the path of the training file, which it copies next to the checkpoints."""
_OF_TORCHRUN = ("NPROC_PER_NODE", "MASTER_PORT", "NNODES", "NODE_RANK", "MASTER_ADDR")
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Variables that a launcher sets for each rank. A command about a run drops them, because it is one process."""
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class TrainLaunch:
    """The process that trains."""

    command: list[str]
    flags: list[str]
    """ms-swift's flags, which are the end of `command`."""
    environ: dict[str, str]
    config: PackingConfig

    @property
    def num_ranks(self) -> int:
        """Return the ranks as far as variables tell: torchrun also takes `gpu`, and a range of nodes."""
        counts = (self.environ.get(name, "") for name in ("NPROC_PER_NODE", "NNODES"))
        return math.prod(int(count) or 1 for count in counts if count.isdecimal())


@dataclass(frozen=True, slots=True)
class RunLaunch:
    """A training run as a command about it needs it, in one process."""

    command: str
    """`sft` or `pt`."""
    flags: list[str]
    """ms-swift's flags."""
    environ: dict[str, str]
    config: PackingConfig
    num_ranks: int
    """Ranks that the run would have."""


def train_launch(argv: Sequence[str], environ: Mapping[str, str], *, command: str = "sft") -> TrainLaunch:
    """Describe the process that `swift sft` or `swift pt` would start and wait for.

    `vlpack sft` replaces itself by this process, so that signals reach the training process itself, or torchrun.
    """
    flags, variables, config = _read_run(argv, environ)
    script = str(source_file("swift", "cli", command))
    return TrainLaunch([sys.executable, *_torchrun(variables), script, *flags], flags, variables, config)


def _torchrun(environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of torchrun; empty if ms-swift would not start it."""
    if "NPROC_PER_NODE" not in environ and "NNODES" not in environ:
        return []
    given = [part for name in _OF_TORCHRUN if name in environ for part in (f"--{name.lower()}", environ[name])]
    return ["-m", "torch.distributed.run", *given]


def run_launch(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    command: str = "sft",
    num_ranks: int | None = None,
    needs_gpu: bool = False,
) -> RunLaunch:
    """Describe the run for a command about it, which is one process.

    With `needs_gpu` the process sees the GPUs that one rank of the run has; otherwise none.
    """
    flags, variables, config = _read_run(argv, environ)
    num_ranks = checked_num_ranks(_num_ranks(variables) if num_ranks is None else num_ranks)
    own = {name: value for name, value in variables.items() if name not in _OF_A_RANK}
    if needs_gpu and config.effective_batch_size is not None:  # the command trains as one of the ranks would
        flags = [*flags, "--gradient_accumulation_steps", str(accumulation_of(flags, config, num_ranks))]
        config = replace(config, effective_batch_size=None)
        own[f"{ENV_PREFIX}EFFECTIVE_BATCH_SIZE"] = "none"
    # If one process saw several GPUs, ms-swift would spread the model over them.
    own |= _gpus_of_a_rank(own, num_ranks) if needs_gpu else {_GPUS: ""}
    return RunLaunch(command, flags, own, config, num_ranks)


def accumulation_of(flags: Sequence[str], config: PackingConfig, num_ranks: int) -> int:
    """Return how many batches a rank of the run accumulates. Raises `ConfigError` if the ranks cannot share a step."""
    options = given_options(flags)
    batch_size, given = (options.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    return config.accumulation(num_ranks, batch_size or 1, given)


def _num_ranks(environ: Mapping[str, str]) -> int:
    """Count the ranks that ms-swift would start."""
    counts = [environ.get(name, "1") for name in ("NPROC_PER_NODE", "NNODES")]
    if not all(count.isdecimal() for count in counts):
        raise ConfigError(
            f"NPROC_PER_NODE={counts[0]} and NNODES={counts[1]} have to be numbers; correct them, or give --num_ranks"
        )
    return int(counts[0]) * int(counts[1])


def _gpus_of_a_rank(environ: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Return the variable that leaves only the first GPU visible. A run of one process keeps all its GPUs."""
    return {} if num_ranks == 1 else {_GPUS: environ.get(_GPUS, "0").partition(",")[0]}


def check_launch(launch: TrainLaunch | RunLaunch) -> None:
    """Raise for a run that cannot work, before anything heavy is imported, loaded or downloaded."""
    if ignores_errors(launch.flags) or not flag_names():  # no flag names: this ms-swift's source cannot be read
        return
    options = given_options(launch.flags)
    plugins = [path for name in PLUGINS for path in options.get(name, ())]
    is_plain = all(map(is_our_plugin, plugins))  # another plugin may register more names
    values = {"tuner_type": tuner_types(), **{option: known_values(option) for option in VALUES}}
    registered = Registered((), values) if is_plain else Registered()
    is_training = isinstance(launch, TrainLaunch)
    check_run(options, launch.config, registered, num_ranks=launch.num_ranks, is_training=is_training)
    if is_plain:
        refuse_metric(options)
    check_variables(launch.environ)
    if isinstance(launch, TrainLaunch) and not options.get("use_ray"):
        for name in ("model", "adapters"):
            given = options.get(name) or ()
            for folder in map(folder_of, [given] if isinstance(given, str) else given):
                check_weights(f"--{name}", folder)
        check_machine(options, launch.environ)


def plugin_path() -> Path:
    """Return the file for `--external_plugins`."""
    return Path(__file__).parents[1] / "plugin" / "vlpack.py"


def is_our_plugin(path: str) -> bool:
    """Tell whether a file is this package's plugin, or a copy: the content is compared."""
    file = Path(path)
    return file.is_file() and file.read_bytes() == plugin_path().read_bytes()


def _read_run(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str], PackingConfig]:
    """Return (ms-swift's flags, the environment with the packing options in it, the checked packing options).

    Idempotent, because `in_run` executes the same command line again in the environment that this returns.
    """
    flags, rest = split_flags(argv)
    path = rest.pop(0) if rest and rest[0].endswith(OF_TRAINING) else None
    if rest and not rest[0].startswith("--"):  # ms-swift would append the word to the last list of the file
        raise ConfigError(loose_word(rest[0]))
    content = {} if path is None else _read_file(path)
    variables = {**_variables(content.pop("ENV", None), path, environ), **environ}
    if path is not None:
        variables[CONFIG_FILE] = path
    refuse_gone(*content)
    keys = {name: content.pop(name) for name in option_names() if name in content}
    refuse_unknown(content, rest, path)

    options = chosen_options(variables, keys, flags)
    options.setdefault("packing", "true")
    has_plugins = PLUGINS[0] in content or any(option_name(part) == PLUGINS[0] for part in rest)
    config = checked(_without_late_strategy(options, variables, environ, has_plugins))
    own = {ENV_PREFIX + name.upper(): _text(value) for name, value in options.items() if name not in FLAGS_OF_SWIFT}

    given = {**keys, **flags, "packing": options["packing"]}  # a packing_length from the environment stays there
    of_swift = [part for name in FLAGS_OF_SWIFT if name in given for part in (f"--{name}", _text(given[name]))]
    return [*_with_plugin([*as_flags(content), *rest]), *of_swift], {**variables, **own}, config


def _read_file(path: str) -> dict[str, Any]:
    content = read_yaml(Path(path), path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of training options")
    return content


def _variables(block: Any, path: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the `ENV` block. As in ms-swift, a variable that is set outside wins over the block."""
    if not isinstance(block or {}, dict):
        raise ConfigError(f"{path}: ENV must be a mapping of variables, got {block!r}")
    variables = {str(name): str(value) for name, value in (block or {}).items()}
    for name, value in variables.items():
        if environ.get(name, value) != value:
            logger.warning(
                "%s=%s is set already and wins over %s in the ENV block of %s", name, environ[name], value, path
            )
    return variables


def _without_late_strategy(
    options: Mapping[str, Any], variables: Mapping[str, str], environ: Mapping[str, str], has_plugins: bool
) -> dict[str, Any]:
    """Leave out a strategy that cannot be checked here: one of a plugin, or on a `PYTHONPATH` of the `ENV` block."""
    name = str(options.get("packing_strategy", ""))
    has_own_path = variables.get("PYTHONPATH") != environ.get("PYTHONPATH")
    is_found_later = has_own_path if ":" in name else has_plugins and name not in known_names()
    return {key: value for key, value in options.items() if key != "packing_strategy" or not is_found_later}


def _with_plugin(flags: list[str]) -> list[str]:
    """Put our plugin first into the last list of plugins, because argparse keeps the last list."""
    own = str(plugin_path())
    lists = [at for at, flag in enumerate(flags) if option_name(flag) == PLUGINS[0]]
    if not lists:
        return [*flags, f"--{PLUGINS[0]}", own]
    at = lists[-1]
    _, _, value = flags[at].partition("=")
    after = [*([value] if value else []), *flags[at + 1 :]]
    return [*flags[:at], f"--{PLUGINS[0]}", *([] if own in after else [own]), *after]


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
