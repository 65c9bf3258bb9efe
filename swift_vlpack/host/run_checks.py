"""Check what a run names before anything heavy is imported: words, values, files, folders, and options that clash.

`vlpack` asks with the flags it was given, and the plugin with ms-swift's arguments, as soon as it is loaded: in plain
`swift sft` that is the first moment that this package sees.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.config import PackingConfig, is_planned
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.swift_flags import flags as flags_of_swift
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.rows.fusion_config import FusionConfig, read_fusion_config
from swift_vlpack.words import did_you_mean

OF_DATA = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
OF_TRAINING = (".yaml", ".yml", ".json")
"""Endings of a training file, by which ms-swift knows it."""
_HUBS = ("hf::", "ms::")
_MOST_NAMES = 10_000
"""Most names of a folder to search for one like a missing name; a folder of images may have millions."""
PLUGINS = ("external_plugins", "custom_register_path", "custom_dataset_info")
"""Options with files that may register data sets and tuners, which only the training process then knows."""


def given_options(flags: Sequence[str]) -> dict[str, Any]:
    """Return the value of every flag, by option: a list where ms-swift takes one, else text, number or true and false.

    Raises `ConfigError` for a word that no flag takes, and for a value that the flag does not have.
    """
    known = flags_of_swift()
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    most = 0
    for part in flags:
        if part.startswith("--") and " " not in part:
            name, has_value, value = part.partition("=")
            option = _option_of(name[2:].replace("-", "_"), known)
            values = found[option] = [value] if has_value else []
            most = _most_values(option, known)
        elif values is None or (most == 1 and len(values) == 1):
            raise ConfigError(loose_word(part))
        else:
            values.append(part)
    return {name: _checked_value(name, given, known) for name, given in found.items()}


def _option_of(name: str, known: Collection[str]) -> str:
    """Return the option that argparse would take the name for: itself, or the only one that begins with it."""
    if name in known:
        return name
    longer = [option for option in known if option.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _most_values(name: str, known: Mapping[str, Any]) -> int:
    """Return 1 where ms-swift takes one value, and 0 for any number, also of an option that is not known."""
    return 1 if name in known and not known[name].takes_list else 0


def loose_word(word: str) -> str:
    """Return the error about a word that belongs to no option."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        return f"{word}: give one training file, as the first word; options come after it"
    if path.suffix in OF_DATA:
        return f"{word} is no training file; name data with --dataset {word}"
    if path.is_dir():
        return f"{word} is a folder; name a training file in it ({', '.join(OF_TRAINING)}), or --model {word}"
    return (
        f"no option takes {word!r}; a training file comes first and ends in {', '.join(OF_TRAINING)}, and every option "
        "begins with --"
    )


def _checked_value(name: str, given: Sequence[str], known: Mapping[str, Any]) -> Any:
    flag = known.get(name)
    if flag is None or flag.takes_list:
        return list(given)
    if flag.choices and given and given[0] not in flag.choices:
        raise ConfigError(
            f"--{name} must be one of {', '.join(flag.choices)}, got {given[0]!r}{did_you_mean(given[0], flag.choices)}"
        )
    return _value(given[0]) if given else True


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text


class Registered(NamedTuple):
    """Names that ms-swift knows, by itself or by a plugin; None where only the training process can know them."""

    datasets: Collection[str] | None = None
    tuners: Collection[str] | None = None


def check_run(
    options: Mapping[str, Any], config: PackingConfig, registered: Registered, *, is_training: bool = True
) -> None:
    """Refuse a run that cannot work, as far as that can be known without a model or the network.

    `options` are ms-swift's, by name; those that are absent have their default. A run that is no training writes
    nothing into its output folder.
    """
    sources = None
    if config.packing:
        refuse_combinations(options, config)
        sources = read_fusion_config(config.fusion_config) if config.fusion_config else None
    _need_model_and_data(options, sources)
    tuner, tuners = options.get("tuner_type"), registered.tuners
    if tuner and tuners and tuner not in tuners:
        raise ConfigError(
            f"--tuner_type must be one of {', '.join(sorted(tuners))}, got {tuner!r}{did_you_mean(tuner, tuners)}"
        )
    if options.get("use_ray"):  # a cluster runs it, and has its own folders
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


def _need_model_and_data(options: Mapping[str, Any], sources: FusionConfig | None) -> None:
    get = options.get
    if not (get("model") or get("load_args") or get("resume_only_model")):  # which a checkpoint may name too
        raise ConfigError("there is no model to train: give --model, a local folder or a name on the hub")
    if not (get("dataset") or get("cached_dataset") or sources or get("load_data_args")):
        raise ConfigError("there is no data to train on: give --dataset or fusion_config")


def refuse_combinations(options: Mapping[str, Any], config: PackingConfig) -> None:
    """Refuse ms-swift's options that packing cannot be used with."""
    get = options.get
    is_streaming = bool(get("streaming"))
    if config.fusion_config is not None and get("dataset"):
        raise ConfigError(
            f"both --dataset ({', '.join(options['dataset'])}) and fusion_config ({config.fusion_config}) name the "
            "data; give one of them"
        )
    for is_so, what, way_out in (
        ((get("task_type") or "causal_lm") != "causal_lm", f"--task_type {get('task_type')}", "it is for causal_lm"),
        (get("group_by_length"), "--group_by_length true", "packs are matched in cost already"),
        (get("cached_dataset") or get("cached_val_dataset"), "--cached_dataset", "use --dataset"),
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
            "it is computed of rows, which packs are not (eval_loss and eval_token_acc are those of rows); leave one "
            "of them out",
        ),
        (get("use_flash_ckpt"), "--use_flash_ckpt true", "it says too early that a checkpoint is saved; leave it out"),
        (
            is_streaming and config.fusion_config,
            "--streaming true with a fusion_config",
            "ratios need data with a length; leave --streaming out, or name the files with --dataset",
        ),
    ):
        if is_so:
            raise ConfigError(f"{what} cannot be used with packing: {way_out}")
    if get("interleave_prob") and not is_streaming:
        raise ConfigError(
            f"--interleave_prob cannot be used with packing of data with a length: {_as_sources(options)}"
        )
    _refuse_truncation_of_windows(options, config)
    if not is_planned(config, is_sized=not is_streaming) and not (get("max_steps") or 0) > 0:
        raise ConfigError(
            "buffer mode does not know how many packs there will be: set --max_steps, "
            "or use packing_mode=plan without --streaming, which knows"
        )


def _as_sources(options: Mapping[str, Any]) -> str:
    """Return the fusion_config that draws as many rows of each data set as `--interleave_prob` does."""
    datasets, shares = _many(options.get("dataset")), [float(share) for share in options["interleave_prob"]]
    if len(datasets) != len(shares) or not all(share > 0 for share in shares):
        return "it needs one share above 0 for each --dataset; or give ratios in a fusion_config"
    sizes = [_num_rows(dataset) for dataset in datasets]
    if all(sizes):
        # An epoch of ms-swift ends when the first of them has no more rows, or when the last one has none.
        ends = [size / share for size, share in zip(sizes, shares, strict=True)]
        end = max(ends) if options.get("stopping_strategy") == "all_exhausted" else min(ends)
        ratios = [f"{share * end / size:.4g}" for size, share in zip(sizes, shares, strict=True)]
        hint = ""
    else:
        ratios = [f"N x {share:g} / ROWS" for share in shares]
        hint = ", where ROWS are the rows of each and N are those of an epoch"
    sources = ", ".join(f"{{dataset: {name}, ratio: {ratio}}}" for name, ratio in zip(datasets, ratios, strict=True))
    return (
        "leave it and --dataset out, and give --fusion_config a file that draws as many rows of each, "
        f"`sources: [{sources}]`{hint}"
    )


def _num_rows(dataset: str) -> int:
    """Count the rows of a file, or take the number that the name asks for; 0 where neither can be known."""
    _, _, number = dataset.rpartition("#")
    if number.isdecimal() and not os.path.exists(dataset):
        return int(number)
    if not dataset.endswith(".jsonl") or not os.path.isfile(dataset):
        return 0
    with open(dataset, "rb") as file:
        return sum(1 for line in file if line.strip())


def _refuse_truncation_of_windows(options: Mapping[str, Any], config: PackingConfig) -> None:
    """Refuse ms-swift's own ways to shorten rows where windows cut them."""
    asked = options.get("truncation_strategy")
    if config.packing_strategy == WINDOW and asked in ("split", "left", "right"):
        raise ConfigError(
            "packing_strategy=window cuts rows wherever a pack is full, so --truncation_strategy "
            f"{asked} cannot be used with it; leave that out, or take another strategy"
        )


def _check_files(options: Mapping[str, Any]) -> None:
    """Refuse paths that lead nowhere; a name that a hub may have is left to ms-swift."""
    _check_model(options.get("model"))
    for adapter in _many(options.get("adapters")):
        if _is_path(adapter.partition(":")[0]) and not _folder(adapter).exists():
            raise ConfigError(f"--adapters {adapter}: no such folder{_near(adapter)}")
    if checkpoint := options.get("resume_from_checkpoint"):
        _check_checkpoint(Path(str(checkpoint)).expanduser())
    for name in PLUGINS:
        for path in _many(options.get(name)):
            if path.endswith((".py", ".json")) and not Path(path).expanduser().exists():
                raise ConfigError(f"--{name} {path}: no such file{_near(path)}")
    deepspeed = options.get("deepspeed")
    if isinstance(deepspeed, str) and deepspeed.endswith(".json") and not Path(deepspeed).exists():
        raise ConfigError(f"--deepspeed {deepspeed}: no such file{_near(deepspeed)}")


def _check_model(model: Any) -> None:
    if not model:
        return
    path = _folder(str(model))
    if path.is_dir():
        if not (path / "config.json").is_file():
            is_adapter = (path / "adapter_config.json").is_file()
            hint = "it is an adapter: give it with --adapters" if is_adapter else "name the folder of a model"
            raise ConfigError(f"--model {model}: there is no config.json in it; {hint}")
    elif path.is_file():
        raise ConfigError(f"--model {model} is a file; name the folder of a model, or a model on the hub")
    elif _is_path(str(model).partition(":")[0]):
        raise ConfigError(f"--model {model}: no such folder{_near(str(model))}")


def _folder(name: str) -> Path:
    """Return the folder of weights that ms-swift means: `~` is the home, and `folder:inner` is a folder in a folder."""
    path = os.path.expanduser(name)
    inner = "/".join(path.split(":", 1))
    return Path(inner if os.path.exists(inner) and not os.path.exists(path) else path)


def _check_checkpoint(path: Path) -> None:
    what = f"--resume_from_checkpoint {path}"
    beside = path if path.is_dir() else path.parent
    found = sorted(beside.glob("checkpoint-*"), key=lambda one: (len(one.name), one.name))
    hint = f"; there is {found[-1]}" if found else ""
    if not path.exists():
        raise ConfigError(f"{what}: no such checkpoint{hint or _looked_in(str(path))}")
    if not path.is_dir():
        raise ConfigError(f"{what} is a file; name the folder of a checkpoint{hint}")
    if hint and not any(
        (path / name).exists() for name in ("trainer_state.json", "config.json", "adapter_config.json")
    ):
        raise ConfigError(f"{what} is no checkpoint{hint}")


def check_data(what: str, datasets: Iterable[str], registered: Collection[str] = ()) -> None:
    """Refuse data that is named as a file or folder and is not there, and files that are empty."""
    for dataset in datasets:
        if dataset.endswith((".yaml", ".yml")):  # a word that the list of data sets has swallowed
            raise ConfigError(loose_word(dataset))
        path = _local(dataset)
        if path is None or path in registered or dataset in registered:
            continue
        if not os.path.exists(path):
            home = os.path.expanduser(path)
            hint = f"; ms-swift does not expand ~ here, write {home}" if home != path else _near(path)
            raise ConfigError(f"{what} {dataset}: no such file{hint}")
        if os.path.isfile(path) and not _has_content(path):
            raise DataError(f"{what} {dataset}: the file is empty, there is no row in it")


def _local(dataset: str) -> str | None:
    """Return the path that is meant, by ms-swift's rules (`path#rows`, `folder:subset`); None for a name on a hub."""
    if os.path.exists(dataset):
        return dataset
    if dataset.startswith(_HUBS):
        return None
    for path in (dataset.rpartition("#")[0], dataset.rpartition("#")[0].partition(":")[0], dataset.partition(":")[0]):
        if path and os.path.exists(path):
            return path
    path = dataset.rpartition("#")[0] or dataset
    return path if _is_path(path.partition(":")[0]) else None


def _is_path(name: str) -> bool:
    """Tell a path from a name on a hub, which is one word, or an owner and a name."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith(OF_DATA) or name.count("/") > 1


def _has_content(path: str) -> bool:
    """Refuse a file without a row; a file that is no text is left to its own reader."""
    if not path.endswith((".jsonl", ".json", ".csv", ".txt")):
        return True
    with open(path, "rb") as file:
        return any(line.strip() for line in file)


def check_folder(what: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written into; leaves nothing there."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{what} {folder}: {there} is a file; name a folder that can be made")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{what} {folder}: {there} cannot be written ({error.strerror}); name another one") from None


def check_file(what: str, path: Path) -> None:
    """Refuse a file that cannot be written; leaves it as it is."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{what} {path}: no such directory; name a file in one that exists")
    if path.is_dir():
        raise ConfigError(f"{what} {path} is a directory; name a file in it")
    if not path.exists():
        check_folder(f"{what} {path}: folder", folder)
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{what} {path} cannot be written; name a file that can be")


def _near(path: str) -> str:
    """Return the end of an error about a missing file: one with a name like it, else where it was looked for."""
    folder = Path(path).parent
    is_readable = folder.is_dir() and os.access(folder, os.R_OK)
    names = [one.name for one in islice(folder.iterdir(), _MOST_NAMES)] if is_readable else []
    close = did_you_mean(Path(path).name, names)
    if not close:
        return _looked_in(path)
    name = close.removeprefix("; did you mean ").removesuffix("?")
    return f"; did you mean {name if str(folder) == '.' else folder / name}?"


def _looked_in(path: str) -> str:
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def _many(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(map(str, value or ()))
