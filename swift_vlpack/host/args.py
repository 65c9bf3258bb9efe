"""Make the options of a packed run once, from ms-swift's arguments, and refuse options that contradict each other.

ms-swift makes its arguments in one long `__post_init__`. `host/install.py` calls two functions from inside of it:

    settle_options(args)   first: read the `VLPACK_*` variables, and check all options
    prepare_args(args)     later, when the model's length is known: make the `PackingConfig` of the run, and keep it

From then on `packing_config(args)` returns that one config, and `plans_ahead(args)` tells whether the run plans its
packs. Nothing reads the variables again.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swift.arguments import PretrainArguments, SftArguments, get_supported_tuners
from swift.dataset import DATASET_MAPPING
from swift.model import MODEL_MAPPING
from swift.template import TEMPLATE_MAPPING
from swift.utils import get_logger, parse_args
from transformers import PretrainedConfig

from swift_vlpack.attention import attention
from swift_vlpack.config import ENV_PREFIX, SAMPLES, PackingConfig, checked, chosen_options, is_planned
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import CONFIG_FILE, is_our_plugin
from swift_vlpack.host.losses import refuse_loss_type
from swift_vlpack.host.ranks import num_ranks_of_run
from swift_vlpack.host.run_checks import Registered, check_run, refuse_combinations
from swift_vlpack.host.seam import CALLBACK
from swift_vlpack.host.swift_flags import VALUES, registered_values
from swift_vlpack.plan.parts import Cutting
from swift_vlpack.plan.same_steps import UnpackedStep
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.words import did_you_mean
from swift_vlpack.yaml_files import read_yaml

logger = get_logger()

FIELDS_OF_SWIFT = ("packing", "packing_length", "packing_strategy")
"""Packing options that are fields of ms-swift's arguments as well."""
OURS = (SftArguments, PretrainArguments)
"""The arguments of `swift sft` and `swift pt`. Other commands have subclasses of these, which are left alone."""
_NO_ARCHITECTURE = "null"
"""ms-swift stores this as the architecture of a model type that has none."""
OWN_ATTENTION = (None, "sdpa", "eager", attention.NAME)
"""Values of `--attn_impl` with which the model gets the attention `vlpack`. ms-swift handles all other values."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Settled:
    """The options of a run that ms-swift's arguments have no field for."""

    options: Mapping[str, Any]
    """Packing options by name, from flags, the training file and variables."""
    config: PackingConfig | None = None
    """All options with their defaults; None until the model's length is known."""
    unpacked_batch_size: int = 1
    """`per_device_train_batch_size` as the user gave it."""
    accumulation: int = 1
    """`gradient_accumulation_steps` as the user gave it, or as `PackingConfig.accumulation` works it out."""
    lazy_tokenize: bool | None = None
    """`lazy_tokenize` as the user gave it. ms-swift replaces it by a value that depends on packing."""


_settled: dict[int, _Settled] = {}
"""The options of each run, by the `id` of its arguments; an entry is deleted with the arguments.

It is no attribute of the arguments, because ms-swift writes those to args.json and compares them. It is no
`WeakKeyDictionary`, because a dataclass that can be compared has no hash.
"""


def _keep(args: Any, settled: _Settled) -> None:
    if id(args) not in _settled:
        weakref.finalize(args, _settled.pop, id(args), None)
    _settled[id(args)] = settled


def is_ours(args: Any) -> bool:
    """Tell whether these are arguments of `swift sft` or `swift pt` with packing, not of rlhf, infer or export."""
    return type(args) in OURS and bool(args.packing)


def packing_config(args: Any) -> PackingConfig:
    """Return the config of the run, which `prepare_args` has made."""
    config = _settled[id(args)].config
    assert config is not None, "ms-swift asked for the packing options before it checked its own"
    return config


def plans_ahead(args: Any) -> bool:
    """Tell whether the run plans its packs before training. If not, packs are made as rows come."""
    return is_planned(packing_config(args), is_sized=not args.streaming)


def data_seed(args: Any) -> int:
    """Return the seed of draws and orders: `--data_seed`, or `--seed` if that was not given."""
    return int(args.data_seed if args.data_seed is not None else args.seed)


def unpacked_batch_size(args: Any) -> int:
    """Return the number of samples that would share a padded batch of one rank without packing."""
    return _settled[id(args)].unpacked_batch_size


def unpacked_step(args: Any) -> UnpackedStep | None:
    """Return the optimizer step of the same run without packing, if its samples are kept; else None."""
    settled = _settled[id(args)]
    if packing_config(args).packing_batch != SAMPLES:
        return None
    return UnpackedStep(settled.unpacked_batch_size, settled.accumulation, num_ranks_of_run())


def deletes_failing_rows(args: Any) -> bool:
    """Tell whether plain `swift sft` would delete all rows that cannot be encoded before it draws any.

    Otherwise it encodes a row when the row is trained, and replaces a row that fails by another one.
    """
    plain = copy.copy(args)
    plain.packing, plain.lazy_tokenize = False, _settled[id(args)].lazy_tokenize
    level = logger.level
    logger.setLevel(logging.WARNING)  # otherwise ms-swift logs a setting that is not this run's
    try:
        plain._init_lazy_tokenize()
    finally:
        logger.setLevel(level)
    return not plain.lazy_tokenize


def settle_options(args: Any) -> None:
    """Collect the options from flags, the training file and variables, and check all of them.

    Call it before ms-swift looks at a field or asks a hub for a model. Values of variables are written into ms-swift's
    own fields.
    """
    given = _flags_given(args)
    args.packing = _wants_packing(args, given)
    if not is_ours(args):
        number = os.environ.get(f"{ENV_PREFIX}EFFECTIVE_BATCH_SIZE", "none")
        if type(args) in OURS and number != "none":
            logger.warning("effective_batch_size=%s has no effect un-packed; give gradient_accumulation_steps", number)
        return
    options = chosen_options(os.environ, flags={name: getattr(args, name) for name in given})
    config = checked({**options, "packing": True})
    _read_training_file_again()
    values = {"tuner_type": get_supported_tuners(), **{option: registered_values(option) for option in VALUES}}
    registered = Registered(None if args.custom_dataset_info else set(DATASET_MAPPING), values)
    check_run(vars(args), config, registered, num_ranks=num_ranks_of_run())
    _refuse_unknown_types(args)
    if args.truncation_strategy == "split":
        options["packing_overflow"] = _overflow_of_split(options)
        config = dataclasses.replace(config, packing_overflow=options["packing_overflow"])
        args.truncation_strategy = "delete"  # with this value, packing_overflow decides about long rows
    _refuse_contradictions(args, config)
    _keep(args, _Settled(options, lazy_tokenize=args.lazy_tokenize))
    for name in set(options) & {"packing_length", "packing_strategy"}:
        setattr(args, name, getattr(config, name))


def _refuse_unknown_types(args: Any) -> None:
    """Raise `ConfigError` for an unknown type, with a suggestion. ms-swift would print its several hundred types."""
    for name, known in (("model_type", MODEL_MAPPING), ("template", TEMPLATE_MAPPING)):
        if (given := getattr(args, name)) and given not in known:
            raise ConfigError(f"--{name} {given} is not known to ms-swift{did_you_mean(given, known)}")


def _read_training_file_again() -> None:
    """Raise `ConfigError` if the training file gives a key twice: ms-swift has silently taken the last value."""
    path = os.environ.get(CONFIG_FILE)
    if path and os.path.isfile(path):  # if it was a temporary file, it may be gone by now
        read_yaml(Path(path), path)


def _overflow_of_split(options: Mapping[str, Any]) -> str:
    """Return the `packing_overflow` that `--truncation_strategy split` means. Raises if another one was given, too."""
    given = str(options.get("packing_overflow", "split"))
    if given != "split":
        raise ConfigError(f"--truncation_strategy split and packing_overflow={given} contradict each other; give one")
    return given


def _wants_packing(args: Any, given: set[str]) -> bool:
    """Read the option `packing` alone: in a run that does not pack, wrong or misspelt options do not matter."""
    variable = f"{ENV_PREFIX}PACKING"
    environ = {variable: os.environ[variable]} if variable in os.environ else {}
    flags = {"packing": args.packing} if "packing" in given else {}
    return PackingConfig.from_mapping(chosen_options(environ, flags=flags), packing_length=1).packing


def _flags_given(args: Any) -> set[str]:
    """Return the options among ms-swift's own fields that were given by a flag or a key of the training file.

    A field with its default value may have been given all the same. So look for the flags that ms-swift is parsing at
    this moment, in the frame of its `parse_args`. For arguments that were made in Python, only a value other than the
    default counts as given.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not parse_args.__code__:
        frame = frame.f_back
    argv = [] if frame is None else frame.f_locals["argv"]
    named = {part[2:].partition("=")[0].replace("-", "_") for part in argv if part.startswith("--")}
    default = {spec.name: spec.default for spec in dataclasses.fields(args)}
    return {name for name in FIELDS_OF_SWIFT if name in named or getattr(args, name) != default[name]}


def check_packing_of_others(args: Any, *, flash_check: Callable[[Any], None]) -> None:
    """Leave packing of other commands (`swift rlhf`) to ms-swift, and log that. If it refuses, name the way out."""
    if not args.packing:
        flash_check(args)
        return
    command = _OTHERS.get(type(args).__name__, type(args).__name__)
    served = f"swift_vlpack packs `swift sft` and `swift pt`; --packing true of {command} is ms-swift's own packing"
    try:
        flash_check(args)
    except ValueError:
        raise ConfigError(
            f"{served}, which needs the flash-attn package and --attn_impl flash_attn. Give that, "
            "or leave --packing out"
        ) from None
    logger.warning(served)


_OTHERS = {"RLHFArguments": "`swift rlhf`"}
"""Names of commands by the class of their arguments."""


def portable(args: Any) -> Any:
    """Copy the arguments for args.json, without the plugin, callback and attention of this package.

    `swift infer` and `swift export` read args.json on machines that may not have this package. Plugins of the user
    stay.
    """
    saved = copy.copy(args)
    for name in ("external_plugins", "custom_register_path"):
        setattr(saved, name, [path for path in getattr(args, name, None) or () if not is_our_plugin(path)])
    saved.callbacks = [name for name in args.callbacks if name != CALLBACK]
    saved.training_args = copy.copy(args.training_args)
    saved.training_args.callbacks = saved.callbacks
    if (step := unpacked_step(args)) is not None:
        for one in (saved, saved.training_args):
            one.per_device_train_batch_size, one.gradient_accumulation_steps = step.batch_size, step.accumulation
    if args.attn_impl == attention.NAME:
        saved.attn_impl = saved.training_args.attn_impl = None
    return saved


def make_config(args: Any) -> PackingConfig:
    """Make the one `PackingConfig` of the run, and keep it for `packing_config`."""
    settled = _settled[id(args)]
    config = PackingConfig.from_mapping({**settled.options, **{name: getattr(args, name) for name in FIELDS_OF_SWIFT}})
    given = {"unpacked_batch_size": args.per_device_train_batch_size, "accumulation": _accumulation(args, config)}
    _keep(args, dataclasses.replace(settled, config=config, **given))
    return config


def prepare_args(args: Any, *, flash_check: Callable[[Any], None]) -> None:
    """Check a packed run before anything is loaded, and change its arguments to what packing needs."""
    config = make_config(args)
    refuse_combinations(vars(args), config)  # check again, because the task may follow from the model
    _refuse_another_model(args)
    if config.fusion_config is not None:
        args.dataset = [spec.dataset for spec in read_fusion_config(config.fusion_config).sources]
    if args.attn_impl not in OWN_ATTENTION:
        flash_check(args)  # ms-swift's own check of the attention's name
    args.padding_free = True
    if config.packing_batch == SAMPLES:
        _accumulate_by_steps(args)
    else:
        _fold_batch_size(args, config)
    if not plans_ahead(args) or config.packing_loss != "token":
        _count_tokens_of_all_ranks(args)
    if CALLBACK not in args.callbacks:
        args.callbacks = [*args.callbacks, CALLBACK]


def _refuse_another_model(args: Any) -> None:
    """Raise `ConfigError` if `--model_type` is for another architecture than config.json names.

    ms-swift trusts the option: it would load the weights into the wrong architecture, and use the wrong template. An
    architecture that ms-swift does not know is not checked.
    """
    own = args.model_meta.architectures
    found = (PretrainedConfig.get_config_dict(args.model_dir)[0].get("architectures") or [None])[0]
    types = [name for name, meta in MODEL_MAPPING.items() if found in meta.architectures]
    if not types or not own or own == [_NO_ARCHITECTURE] or found in own:
        return
    raise ConfigError(
        f"--model_type {args.model_type} is for {', '.join(own)}, but config.json of {args.model} says {found}, which "
        f"is --model_type {' or '.join(types)}; give the right one, or leave --model_type out"
    )


def _refuse_contradictions(args: Any, config: PackingConfig) -> None:
    """Raise `ConfigError` for options of ms-swift that contradict packing options."""
    cutting = Cutting.of(config)
    if cutting is not None and cutting.how != "drop" and args.truncation_strategy in ("left", "right"):
        raise ConfigError(
            f"--truncation_strategy {args.truncation_strategy} and packing_overflow={cutting.how} are two rules for "
            "long rows; leave one of them out"
        )
    refuse_loss_type(args.loss_type)
    if config.packing_loss != "token" and (args.loss_type or args.label_smoothing_factor):
        raise ConfigError(
            f"packing_loss={config.packing_loss} weighs samples by loss_scale, which --loss_type and "
            "--label_smoothing_factor do not see; leave these out, or packing_loss"
        )


def _count_tokens_of_all_ranks(args: Any) -> None:
    """Let ms-swift divide the loss by the tokens of all ranks.

    Otherwise it takes the mean of the ranks' means, which would count a rank without packs as a loss of 0, and weigh
    samples by their rank.
    """
    if not args.average_tokens_across_devices and args.global_world_size > 1:
        args.average_tokens_across_devices = True
        logger.warning(
            "packing: --average_tokens_across_devices becomes true, because packs of different ranks can weigh "
            "differently, and in buffer mode a rank can be without a pack for a step"
        )


def _accumulation(args: Any, config: PackingConfig) -> int:
    given: int | None = args.gradient_accumulation_steps
    return config.accumulation(num_ranks_of_run(), args.per_device_train_batch_size, given)


def _accumulate_by_steps(args: Any) -> None:
    """Let the trainer take each step whole, because the number of sequences differs from step to step.

    args.json and the log keep the batch size and the accumulation that were given (`unpacked_step`).
    """
    step = unpacked_step(args)
    assert step is not None
    args.per_device_train_batch_size = args.gradient_accumulation_steps = 1
    logger.info(
        f"packing_batch=samples: every optimizer step trains the {step.num_samples} samples that it trains un-packed "
        f"(batches of {step.batch_size} x {step.accumulation} accumulated x {step.num_ranks} ranks)"
    )


def _fold_batch_size(args: Any, config: PackingConfig) -> None:
    """Turn a batch size above 1 into accumulation, because a batch is one pack. The effective batch size stays."""
    per_device = args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps = _accumulation(args, config)
    if config.effective_batch_size is not None:
        logger.info(
            f"packing: effective_batch_size {config.effective_batch_size} makes gradient_accumulation_steps "
            f"{accumulation} ({num_ranks_of_run()} ranks x batches of {per_device})"
        )
    if per_device <= 1:
        return
    args.per_device_train_batch_size = 1
    args.gradient_accumulation_steps = accumulation * per_device
    logger.warning(
        f"packing: per_device_train_batch_size {per_device} becomes 1 (one sequence is one pack) and "
        f"gradient_accumulation_steps {accumulation} becomes {accumulation * per_device}, so the effective batch stays"
    )
