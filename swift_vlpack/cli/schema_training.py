"""The JSON schema of a training file: packing options, those of ms-swift, and the block of variables."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from swift_vlpack.cli import schema_values as values
from swift_vlpack.cli.packages import version_of
from swift_vlpack.cli.schema_values import Schema
from swift_vlpack.config import (
    ENV_PREFIX,
    NO_OPTIONS,
    RECORD_PACKS,
    REPLACED,
    RESTART,
    RESUME_DATA,
    RESUME_FILES,
    PackingConfig,
)
from swift_vlpack.host.swift_flags import Flag, flags

DRAFT = "http://json-schema.org/draft-07/schema#"
"""What editors know."""
_OF_TYPE: dict[Any, Schema] = {
    str: values.TEXT, int: values.INT, float: values.FLOAT, bool: values.BOOL, type(None): values.NULL
}  # fmt: skip
_OPEN = ("packing_strategy", "packing_pad_to")
"""Options that take more than their choices: a strategy of one's own, a number."""
_VARIABLES = {
    "NPROC_PER_NODE": "ranks on this machine; ms-swift starts torchrun for them",
    "NNODES": "machines of the run",
    "NODE_RANK": "number of this machine, from 0",
    "MASTER_ADDR": "address of the first machine",
    "MASTER_PORT": "port of the first machine",
    "CUDA_VISIBLE_DEVICES": "GPUs that the run may use",
    "MAX_PIXELS": "pixel limit of an image, of many families",
    "IMAGE_MAX_TOKEN_NUM": "most tokens of an image, of Qwen3-VL and others",
    "VIDEO_MAX_PIXELS": "pixel limit of a frame of a video",
    "FPS_MAX_FRAMES": "most frames of a video",
    "HF_ENDPOINT": "another address of the Hugging Face hub",
    "MODELSCOPE_CACHE": "where ms-swift keeps models and data sets",
    RESUME_DATA: "let a resumed run begin its data anew",
    RESUME_FILES: "let a resumed run take files of its checkpoint that were replaced on purpose",
    RECORD_PACKS: "true: list every trained pack in vlpack/packs_rankN.jsonl; false: not those of streams either",
}


def training_schema() -> Schema:
    """Of the file that `vlpack sft`, `vlpack pt` and the commands about a run take."""
    of_swift = {name: flag_schema(flag) for name, flag in sorted(flags().items())}
    packing = {spec.name: option_schema(spec) for spec in fields(PackingConfig)}
    return {
        "$schema": DRAFT,
        "$comment": f"{versions_comment()}; written by `vlpack schema`",
        "title": "A training run of ms-swift, packed by swift_vlpack",
        "type": "object",
        "properties": {
            "ENV": {
                "description": "environment variables of the run; what is set outside wins",
                "type": "object",
                "properties": _variables(),
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
            **packing,
            **{name: schema for name, schema in of_swift.items() if name not in packing},
        },
        # Without ms-swift its options are not known; where they are, another key is a mistake.
        "additionalProperties": not of_swift,
    }


def versions_comment() -> str:
    """What the options of others are of."""
    return ", ".join(f"{name} {version_of(name) or 'missing'}" for name in ("ms-swift", "transformers"))


def option_schema(spec: Any) -> Schema:
    """A packing option: what it takes, its default, its help."""
    schema = values.any_of(_OF_TYPE[kind] for kind in _kinds(spec.name))
    choices = [choice for choice in spec.metadata["choices"] if choice not in ("none", "INT")]
    if choices:
        known: Schema = {"enum": choices}
        schema = values.any_of([known, schema]) if spec.name in _OPEN else known
    default = {} if spec.default is MISSING else {"default": spec.default}
    return {"description": spec.metadata["help"], **schema, **default}


def flag_schema(flag: Flag) -> Schema:
    """An option of ms-swift, as far as its source says."""
    schema = values.schema_of(flag.annotation)
    has_default, default = _default(flag.default)
    if has_default and default is None:
        schema = values.any_of([schema, values.NULL])
    return {
        **({"description": flag.text} if flag.text else {}),
        **schema,
        **({"default": default} if has_default and default is not None else {}),
    }


def _default(written: ast.expr | None) -> tuple[bool, Any]:
    """Whether the source says a plain default, and which."""
    if isinstance(written, ast.Call):
        written = next((option.value for option in written.keywords if option.arg == "default"), None)
    try:
        return (False, None) if written is None else (True, ast.literal_eval(written))
    except ValueError:  # worked out when ms-swift is imported
        return False, None


def _variables() -> dict[str, Schema]:
    packing = {ENV_PREFIX + spec.name.upper(): option_schema(spec) for spec in fields(PackingConfig)}
    for schema in packing.values():
        schema.pop("default", None)
    others: dict[str, Schema] = {name: {"description": text} for name, text in _VARIABLES.items()}
    others[RESUME_DATA]["enum"] = [RESTART]
    others[RESUME_FILES]["enum"] = [REPLACED]
    assert set(NO_OPTIONS) <= set(others)
    return {**packing, **others}


def _kinds(name: str) -> tuple[Any, ...]:
    kind = get_type_hints(PackingConfig)[name]
    return get_args(kind) or (kind,)
