"""Check what a run needs of this machine before it is started: variables, packages, whole weights, a free port.

>>> check_variables({"MAX_PIXELS": "1M"})
Traceback (most recent call last):
    ...
swift_vlpack.errors.ConfigError: the variable MAX_PIXELS must be a whole number, got '1M'
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError, DataError

_WHOLE = re.compile(r"(VIDEO_)?(MAX|MIN|TOTAL)_PIXELS|FPS_(MAX|MIN)_FRAMES|(IMAGE|VIDEO)_(MAX|MIN)_TOKEN_NUM")
"""Variables that ms-swift's templates read as whole numbers."""
_OF_TORCHRUN = (
    ("NPROC_PER_NODE", r"0*[1-9]\d*|auto|[cgnx]pu|mlu|musa", "a number of processes, at least 1, or gpu, cpu or auto"),
    ("NNODES", r"0*[1-9]\d*(:\d+)?", "a number of nodes, at least 1"),
    ("NODE_RANK", r"\d+", "the number of this node, from 0"),
    ("MASTER_PORT", r"\d{1,5}", "the number of a port"),
)
"""Variables that torchrun reads, what they may be, and that in words."""
_OTHERS_FLASH = ("kernels", "torch_npu", "torch_mlu", "torch_musa")
_PACKAGES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("attn_impl", "flash_attn", "flash-attn", ("flash_attn", *_OTHERS_FLASH)),
    ("attn_impl", "flash_attention_2", "flash-attn", ("flash_attn", *_OTHERS_FLASH)),
    ("attn_impl", "flash_attention_3", "flash-attn-3", ("flash_attn_interface", *_OTHERS_FLASH)),
    ("attn_impl", "flash_attention_4", "flash-attn-4", ("flash_attn", *_OTHERS_FLASH)),
    ("deepspeed", "", "deepspeed", ("deepspeed",)),
    ("use_liger_kernel", "True", "liger-kernel", ("liger_kernel",)),
    ("quant_method", "bnb", "bitsandbytes", ("bitsandbytes",)),
    ("quant_method", "hqq", "hqq", ("hqq",)),
    ("quant_method", "quanto", "optimum-quanto", ("optimum",)),
    ("report_to", "tensorboard", "tensorboard", ("tensorboard", "tensorboardX")),
    *(("report_to", name, name, (name,)) for name in ("wandb", "swanlab", "mlflow", "trackio", "clearml", "comet_ml")),
)
"""Options, a value of each ("" for any), the package that it needs, and the modules of which one is enough."""
_HEADER = 8
"""Bytes at the begin of a safetensors file that tell the length of its header."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a variable that ms-swift could not read as a number."""
    for name, value in environ.items():
        if value and _WHOLE.fullmatch(name) and not re.fullmatch(r"\s*\d[\d_]*\s*", value):
            raise ConfigError(f"the variable {name} must be a whole number, got {value!r}")


def check_machine(options: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise for a training run that cannot start on this machine. `options` are ms-swift's, by name."""
    for name, pattern, what in _OF_TORCHRUN:
        if name in environ and not re.fullmatch(pattern, environ[name].strip()):
            raise ConfigError(f"the variable {name} must be {what}, got {environ[name]!r}")
    for option, value, package, modules in _PACKAGES:
        if _has(options.get(option), value) and not any(map(is_installed, modules)):
            given = f"--{option} {value or options[option]}"
            raise ConfigError(f"{given}: {package} is not installed; run `pip install {package}`, or leave it out")
    _check_port(environ)


def _has(given: Any, value: str) -> bool:
    """Tell whether an option, which may be a list, has the value; "" stands for any value."""
    values = [str(one) for one in (given if isinstance(given, list) else [given]) if one]
    return value in values if value else bool(values)


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported, without importing it."""
    return find_spec(module) is not None


def _check_port(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` if another process listens on the port on which this node would be the first of the run."""
    port = environ.get("MASTER_PORT")
    if port is None or not {"NPROC_PER_NODE", "NNODES"} & set(environ) or int(environ.get("NODE_RANK", "0")):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the port MASTER_PORT={port} cannot be used ({getattr(error, 'strerror', None) or error}): is another "
                "run on this machine? Give another one, or leave MASTER_PORT out for a free one"
            ) from None


def check_weights(what: str, folder: Path) -> None:
    """Raise `DataError` for safetensors files that are missing or cut, as an interrupted download leaves them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [file for file in (whole, folder / "adapter_model.safetensors") if file.exists()]
    if not whole.exists() and index.is_file():
        names = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
        files += [folder / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise DataError(f"{what} {folder}: {file.name} is missing; download it again")
        size = file.stat().st_size
        if (wanted := _whole_size(file, size)) is None or size < wanted:
            has = f"has {size:,} of {wanted:,} bytes" if wanted else f"has no header in its {size:,} bytes"
            raise DataError(f"{what} {folder}: {file.name} is not whole, it {has}; download it again")


def _whole_size(file: Path, size: int) -> int | None:
    """Return the length that the header of a safetensors file gives it; None if there is no whole header."""
    with file.open("rb") as read:
        length = int.from_bytes(read.read(_HEADER), "little")
        try:
            header: dict[str, Any] = json.loads(read.read(length)) if length < size else {}
            return _HEADER + length + max(header[name]["data_offsets"][1] for name in {*header} - {"__metadata__"})
        except (ValueError, LookupError, TypeError):
            return None
