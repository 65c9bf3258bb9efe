"""ms-swift's arguments: which runs are ours, what they ask for, and what cannot go together."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift.arguments import PretrainArguments, SftArguments, get_supported_tuners
from swift.dataset import DATASET_MAPPING
from swift.model import MODEL_MAPPING
from swift.template import TEMPLATE_MAPPING
from swift.utils import get_logger, parse_args
from transformers import PretrainedConfig

from swift_vlpack.attention import attention
from swift_vlpack.config import ENV_PREFIX, PackingConfig, checked, chosen_options, is_planned
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import CONFIG_FILE, is_our_plugin
from swift_vlpack.host.losses import refuse_loss_type
from swift_vlpack.host.ranks import num_ranks_of_run
from swift_vlpack.host.run_checks import Registered, check_run, refuse_combinations
from swift_vlpack.host.seam import CALLBACK
from swift_vlpack.plan.parts import Cutting
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.words import did_you_mean
from swift_vlpack.yaml_files import read_yaml

logger = get_logger()

FIELDS_OF_SWIFT = ("packing", "packing_length", "packing_strategy")
"""Packing options that are fields of ms-swift's arguments as well."""
OVERFLOW = "_vlpack_overflow"
"""Attribute of arguments that asked for `--truncation_strategy split`: the option that it is."""
OURS = (SftArguments, PretrainArguments)
"""`swift sft`, and `swift pt`, which is the same with two other defaults; other commands have subclasses of these."""
_NO_ARCHITECTURE = "null"
"""ms-swift stores this as the architecture of a model type that has none."""
OWN_ATTENTION = (None, "sdpa", "eager", attention.NAME)


def is_ours(args: Any) -> bool:
    """`swift sft` or `swift pt` with packing; the arguments of rlhf, infer, export and Megatron are other classes."""
    return type(args) in OURS and bool(args.packing)


def packing_config(args: Any) -> PackingConfig:
    """The options of the run; `settle_options` has decided between ms-swift's own fields and the variables."""
    flags = {name: getattr(args, name) for name in FIELDS_OF_SWIFT} | getattr(args, OVERFLOW, {})
    return PackingConfig.from_mapping(chosen_options(os.environ, flags=flags))


def settle_options(args: Any) -> None:
    """Give ms-swift's own fields what variables say where neither flag nor YAML does, and check all options.

    Before ms-swift looks at a field, or asks a hub for a model.
    """
    given = _flags_given(args)
    args.packing = _wants_packing(args, given)
    if not is_ours(args):
        return
    options = chosen_options(os.environ, flags={name: getattr(args, name) for name in given})
    config = checked({**options, "packing": True})
    _read_training_file_again()
    registered = Registered(None if args.custom_dataset_info else set(DATASET_MAPPING), get_supported_tuners())
    check_run(vars(args), config, registered)
    _refuse_unknown_types(args)
    _split_as_ours(args, options, config)
    _refuse_what_cannot_be(args, dataclasses.replace(config, **getattr(args, OVERFLOW, {})))
    for name in set(options) & {"packing_length", "packing_strategy"}:
        setattr(args, name, getattr(config, name))


def _refuse_unknown_types(args: Any) -> None:
    """Refuse an unknown type and suggest the one that was meant; ms-swift would print its several hundred types."""
    for name, known in (("model_type", MODEL_MAPPING), ("template", TEMPLATE_MAPPING)):
        if (given := getattr(args, name)) and given not in known:
            raise ConfigError(f"--{name} {given} is nothing that ms-swift knows{did_you_mean(given, known)}")


def _read_training_file_again() -> None:
    """Refuse a training file that gives a key twice, because ms-swift silently took the last value."""
    path = os.environ.get(CONFIG_FILE)
    if path and os.path.isfile(path):  # a temporary file may be gone by now
        read_yaml(Path(path), path)


def _split_as_ours(args: Any, options: dict[str, Any], config: PackingConfig) -> None:
    """ms-swift's own way of splitting rows is ours; what it has beside that goes on as without it."""
    if args.truncation_strategy != "split":
        return
    asked = options.get("packing_overflow", "split")
    if asked != "split":
        raise ConfigError(f"--truncation_strategy split and packing_overflow={asked} contradict each other; give one")
    args.truncation_strategy = "delete"
    setattr(args, OVERFLOW, {"packing_overflow": "split"})


def _wants_packing(args: Any, given: set[str]) -> bool:
    """The option `packing` alone: a run that does not pack may have any other variable, also one that means nothing."""
    variable = f"{ENV_PREFIX}PACKING"
    environ = {variable: os.environ[variable]} if variable in os.environ else {}
    flags = {"packing": args.packing} if "packing" in given else {}
    return PackingConfig.from_mapping(chosen_options(environ, flags=flags), packing_length=1).packing


def _flags_given(args: Any) -> set[str]:
    """Options among ms-swift's own fields that flags or YAML keys gave, which are flags to it too.

    An option that was given its default looks as if it was not given, so the arguments that ms-swift is parsing at
    this moment are looked up where its function has them. Arguments made in Python have only their values.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not parse_args.__code__:
        frame = frame.f_back
    argv = [] if frame is None else frame.f_locals["argv"]
    named = {part[2:].partition("=")[0].replace("-", "_") for part in argv if part.startswith("--")}
    default = {spec.name: spec.default for spec in dataclasses.fields(args)}
    return {name for name in FIELDS_OF_SWIFT if name in named or getattr(args, name) != default[name]}


def check_packing_of_others(args: Any, *, flash_check: Callable[[Any], None]) -> None:
    """`swift rlhf` and its kind pack as ms-swift does; say so, and what would serve where it refuses."""
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
"""What a command is called."""


def portable(args: Any) -> Any:
    """The arguments as they are saved: what is of this package is left out, the user's own plugins stay.

    `swift infer` and `swift export` import the plugins again and take the attention from there, on any machine.
    """
    saved = copy.copy(args)
    vars(saved).pop(OVERFLOW, None)
    for name in ("external_plugins", "custom_register_path"):
        setattr(saved, name, [path for path in getattr(args, name, None) or () if not is_our_plugin(path)])
    saved.callbacks = [name for name in args.callbacks if name != CALLBACK]
    saved.training_args = copy.copy(args.training_args)
    saved.training_args.callbacks = saved.callbacks
    if args.attn_impl == attention.NAME:
        saved.attn_impl = saved.training_args.attn_impl = None
    return saved


def prepare_args(args: Any, *, flash_check: Callable[[Any], None]) -> None:
    """Check a packed run before anything is loaded, and bring its arguments into the shape packing needs."""
    config = packing_config(args)
    refuse_combinations(vars(args), config)  # again, because the task may follow from the model
    _refuse_another_model(args)
    if config.fusion_config is not None:
        args.dataset = [spec.dataset for spec in read_fusion_config(config.fusion_config).sources]
    if args.attn_impl not in OWN_ATTENTION:
        flash_check(args)  # ms-swift's own check of the name
    args.padding_free = True
    _fold_batch_size(args)
    if not is_planned(config, is_sized=not args.streaming) or config.packing_loss != "token":
        _count_tokens_of_all_ranks(args)
    if CALLBACK not in args.callbacks:
        args.callbacks = [*args.callbacks, CALLBACK]


def _refuse_another_model(args: Any) -> None:
    """Refuse a `--model_type` for another architecture than config.json names, if ms-swift knows that architecture.

    ms-swift trusts the option. It would load the weights into the wrong architecture, and use the wrong template.
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


def _refuse_what_cannot_be(args: Any, config: PackingConfig) -> None:
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
    """A mean of the ranks' means would count a rank that has run dry as a loss of 0, and samples by their rank."""
    if not args.average_tokens_across_devices and args.global_world_size > 1:
        args.average_tokens_across_devices = True
        logger.warning(
            "packing: --average_tokens_across_devices becomes true: packs of different ranks may weigh unlike, and in "
            "buffer mode a rank may have none for a step"
        )


def _fold_batch_size(args: Any) -> None:
    """One row is one pack: a larger batch becomes accumulation, so that the effective batch stays."""
    per_device = args.per_device_train_batch_size
    args.unpacked_batch_size = per_device  # what padding saved is counted against
    accumulation = args.gradient_accumulation_steps
    if accumulation is None:  # ms-swift's own default
        accumulation = args.gradient_accumulation_steps = max(1, math.ceil(16 / per_device / num_ranks_of_run()))
    if per_device <= 1:
        return
    args.per_device_train_batch_size = 1
    args.gradient_accumulation_steps = accumulation * per_device
    logger.warning(
        f"packing: per_device_train_batch_size {per_device} becomes 1 (one sequence is one pack) and "
        f"gradient_accumulation_steps {accumulation} becomes {accumulation * per_device}, so the effective batch stays"
    )
