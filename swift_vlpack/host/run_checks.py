"""Check a run before anything heavy is imported: contradicting options, and paths that do not exist (`path_checks.py`).

`vlpack` calls `check_run` with the flags of its command line. In plain `swift sft`, the plugin calls it with ms-swift's
arguments when it is loaded, which is the first moment at which code of this package runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.config import SAMPLES, PackingConfig, is_planned
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.path_checks import (
    check_adapter,
    check_cached,
    check_checkpoint,
    check_data,
    check_exists,
    check_folder,
    check_model,
)
from swift_vlpack.rows.fusion_config import FusionConfig, read_fusion_config
from swift_vlpack.words import did_you_mean

_METRICS = ("loss", "token_acc", "seq_acc", "aux_loss", "runtime", "samples_per_second", "steps_per_second")
"""What an evaluation measures by itself."""
_MORE_METRICS = ("eval_metric", "predict_with_generate", "enable_channel_loss", "loss_type", "eval_dataset")
"""Options with which an evaluation measures more."""
PLUGINS = ("external_plugins", "custom_register_path", "custom_dataset_info")
"""Options whose files may register data sets and tuners. Only the training process loads these files."""


_LEAST = {
    "num_train_epochs": "above 0",
    "max_length": "at least 1",
    "per_device_train_batch_size": "at least 1",
    "per_device_eval_batch_size": "at least 1",
    "gradient_accumulation_steps": "at least 1",
    "logging_steps": "above 0",
    "save_steps": "above 0",
    "eval_steps": "above 0",
    "lora_rank": "at least 1",
    "dataloader_num_workers": "at least 0",
    "split_dataset_ratio": "from 0 to 1",
}
"""Numbers of ms-swift's that would train nothing, or something else than they say, with the bound of each."""
_IS_WITHIN = {"above 0": lambda number: number > 0, "at least 1": lambda number: number >= 1,
              "at least 0": lambda number: number >= 0, "from 0 to 1": lambda number: 0 <= number <= 1}  # fmt: skip


class Registered(NamedTuple):
    """Names that ms-swift and plugins register: of data sets, and by option; None if only training can know them."""

    datasets: Collection[str] | None = None
    values: Mapping[str, Collection[str]] | None = None


def check_run(
    options: Mapping[str, Any],
    config: PackingConfig,
    registered: Registered,
    *,
    num_ranks: int = 1,
    is_training: bool = True,
) -> None:
    """Raise `ConfigError` for a run that cannot work, as far as that shows without a model or the network.

    `options` are ms-swift's, by name; absent options have their defaults. With `is_training`, the output folder has to
    be writable.
    """
    sources = None
    if config.packing:
        refuse_combinations(options, config)
        sources = read_fusion_config(config.fusion_config) if config.fusion_config else None
    refuse_numbers(options)
    if config.packing:  # raises if ranks cannot share effective_batch_size
        accumulation = options.get("gradient_accumulation_steps")
        config.accumulation(num_ranks, options.get("per_device_train_batch_size") or 1, accumulation)
    _need_model_and_data(options, sources)
    refuse_values(options, registered.values or {})
    if options.get("use_ray"):  # the run is on a cluster, whose folders cannot be checked here
        return
    try:
        _check_paths(options, sources, config, registered, is_training=is_training)
    except PermissionError as error:
        raise ConfigError(f"{error.filename} cannot be looked at ({error.strerror})") from None


def _check_paths(
    options: Mapping[str, Any],
    sources: FusionConfig | None,
    config: PackingConfig,
    registered: Registered,
    *,
    is_training: bool,
) -> None:
    _check_files(options)
    if registered.datasets is not None:
        for name in ("dataset", "val_dataset"):
            check_data(f"--{name}", _many(options.get(name)), registered.datasets)
        if sources is not None:
            names = [spec.dataset for spec in sources.sources]
            check_data(f"fusion_config {config.fusion_config}: dataset", names, registered.datasets)
    if is_training:
        check_folder("--output_dir", Path(str(options.get("output_dir") or "output")).expanduser())


def _check_files(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for paths that do not exist. A name that a hub may have is left to ms-swift."""
    if model := options.get("model"):
        check_model(str(model))
    for adapter in _many(options.get("adapters")):
        check_adapter(adapter)
    if checkpoint := options.get("resume_from_checkpoint"):
        check_checkpoint(Path(str(checkpoint)).expanduser())
    for name in ("cached_dataset", "cached_val_dataset"):
        for path in _many(options.get(name)):
            check_cached(f"--{name}", path)
    for name in PLUGINS:
        for path in _many(options.get(name)):
            if path.endswith((".py", ".json")):
                check_exists(f"--{name}", path, expands_home=True)
    deepspeed = options.get("deepspeed")
    if isinstance(deepspeed, str) and deepspeed.endswith(".json"):  # others are names, such as zero3
        check_exists("--deepspeed", deepspeed, expands_home=False)


def _need_model_and_data(options: Mapping[str, Any], sources: FusionConfig | None) -> None:
    get = options.get
    if not (get("model") or get("load_args") or get("resume_only_model")):  # with these, a checkpoint names the model
        raise ConfigError("there is no model to train: give --model, a local folder or a name on the hub")
    if not (get("dataset") or get("cached_dataset") or sources or get("load_data_args")):
        raise ConfigError("there is no data to train on: give --dataset or fusion_config")


def refuse_numbers(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for numbers of ms-swift's that no run can have."""
    for name, bound in _LEAST.items():
        number = options.get(name)
        if isinstance(number, (int, float)) and not isinstance(number, bool) and not _IS_WITHIN[bound](number):
            raise ConfigError(f"--{name} must be {bound}, got {number}")


def refuse_values(options: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> None:
    """Raise `ConfigError` for a value that is not among those that are known for its option; none known: any."""
    for name, values in known.items():
        given = _many(options.get(name))
        for one in given[0].split("+") if name == "loss_scale" and given else given:
            if values and one not in values:
                raise ConfigError(
                    f"--{name} must be one of {', '.join(sorted(values))}, got {one!r}{did_you_mean(one, values)}"
                )


def refuse_metric(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a `--metric_for_best_model` that no evaluation of this run measures."""
    metric = str(options.get("metric_for_best_model") or "loss").removeprefix("eval_")
    if metric in _METRICS or any(options.get(name) for name in _MORE_METRICS):
        return
    raise ConfigError(
        f"--metric_for_best_model must be one of {', '.join(_METRICS)}, unless --eval_metric measures more; "
        f"got {metric!r}{did_you_mean(metric, _METRICS)}"
    )


def refuse_combinations(options: Mapping[str, Any], config: PackingConfig) -> None:
    """Raise `ConfigError` for options of ms-swift that cannot be combined with packing."""
    get = options.get
    is_streaming = bool(get("streaming"))
    if config.fusion_config is not None and get("dataset"):
        raise ConfigError(
            f"both --dataset ({', '.join(options['dataset'])}) and fusion_config ({config.fusion_config}) name the "
            "data; give one of them"
        )
    for is_so, what, way_out in (
        ((get("task_type") or "causal_lm") != "causal_lm", f"--task_type {get('task_type')}", "it is for causal_lm"),
        (
            get("group_by_length") and config.packing_batch != SAMPLES,
            "--group_by_length true",
            "packs are matched in cost already; or set packing_batch=samples, which keeps its steps",
        ),
        (
            is_streaming and (get("cached_dataset") or get("cached_val_dataset")),
            "--streaming true with --cached_dataset",
            "a cached data set has a length; leave --streaming out",
        ),
        (
            config.fusion_config and get("cached_dataset"),
            "--cached_dataset with a fusion_config",
            "a cached data set has no ratio; leave one of them out",
        ),
        (get("tuner_backend") == "unsloth", "--tuner_backend unsloth", "use peft"),
        ((get("sequence_parallel_size") or 1) > 1, "--sequence_parallel_size above 1", "set it to 1"),
        ((get("deepspeed_autotp_size") or 1) > 1, "--deepspeed_autotp_size above 1", "ranks train on different packs"),
        (
            config.eval_packing and get("predict_with_generate"),
            "--predict_with_generate true with eval_packing",
            "answers are written row by row; leave one of them out",
        ),
        (
            config.eval_packing and get("eval_metric"),
            f"--eval_metric {get('eval_metric')} with eval_packing",
            "it is computed from rows, which packs are not (eval_loss and eval_token_acc are still computed); "
            "leave one of them out",
        ),
        (get("lazy_tokenize"), "--lazy_tokenize true", "rows are encoded when they are loaded anyway; leave it out"),
        (get("use_flash_ckpt"), "--use_flash_ckpt true", "it says too early that a checkpoint is saved; leave it out"),
        (
            get("interleave_prob") and not is_streaming,
            "--interleave_prob of data with a length",
            "give a fusion_config with a ratio for each data set, which is the share of its rows in an epoch; or add "
            "--streaming true",
        ),
        (
            is_streaming and config.fusion_config,
            "--streaming true with a fusion_config",
            "ratios need data with a length; leave --streaming out, or name the files with --dataset",
        ),
    ):
        if is_so:
            raise ConfigError(f"{what} cannot be used with packing: {way_out}")
    if config.packing_batch == SAMPLES:
        _refuse_other_objectives(options, config)
    if config.shares_media:
        _refuse_sharing(options)
    if not is_planned(config, is_sized=not is_streaming) and not (get("max_steps") or 0) > 0:
        raise ConfigError(
            "buffer mode does not know how many packs there will be: set --max_steps, "
            "or use packing_mode=plan without --streaming, which knows"
        )


def _refuse_other_objectives(options: Mapping[str, Any], config: PackingConfig) -> None:
    """Raise `ConfigError` for options with which un-packed training depends on batches or ranks that packs lack."""
    get = options.get
    for is_so, what in (
        (get("average_tokens_across_devices") is False, "--average_tokens_across_devices false weighs samples by rank"),
        (get("label_smoothing_factor"), "--label_smoothing_factor weighs samples by their batch"),
        (get("neftune_noise_alpha"), "--neftune_noise_alpha sizes its noise by the longest row of a batch"),
        (config.packing_overflow in ("split", "truncate"), f"packing_overflow={config.packing_overflow} cuts rows"),
    ):
        if is_so:
            raise ConfigError(
                f"{what}, and packing_batch=samples trains what un-packed training would; leave one of them out"
            )


def _refuse_sharing(options: Mapping[str, Any]) -> None:
    """Refuse options of ms-swift that would train a row in another way if it shares its beginning with others."""
    get, attention = options.get, options.get("attn_impl")
    for is_so, what, why in (
        (
            attention not in (None, "sdpa", "eager", "vlpack"),
            f"--attn_impl {attention}",
            "it takes a prefix and its branches for one sample; leave it out, so that packing brings its own attention",
        ),
        (
            get("neftune_noise_alpha"),
            "--neftune_noise_alpha",
            "the noise of a prefix depends on the length of a row, and rows of several lengths share it; leave it out",
        ),
        (
            (get("router_aux_loss_coef") or 0) > 0,
            "--router_aux_loss_coef",
            "it balances experts over the tokens of a sequence, in which a shared prefix is once; set it to 0",
        ),
    ):
        if is_so:
            raise ConfigError(f"{what} cannot be used with packing_share=media: {why}, or leave packing_share out")


def _many(value: Any) -> list[str]:
    """Return the values of an option, which may be one value or a list."""
    values = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    return [one if isinstance(one, str) else str(one) for one in values]
