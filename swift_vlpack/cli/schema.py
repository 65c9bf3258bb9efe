"""`vlpack schema`: write JSON schemas, with which editors complete and check training files.

There are three: for a training file, for its `fusion_config`, and for a stream of text. They are generated from the
fields, docstrings and sources of the code that reads these files, so no schema can fall behind.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from swift_vlpack.cli import schema_values as values
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.environment import version_of
from swift_vlpack.cli.schema_values import Schema, flag_schema
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
from swift_vlpack.errors import ConfigError
from swift_vlpack.files import write_whole
from swift_vlpack.host.swift_flags import flags
from swift_vlpack.plan.mix import RATIOS_BY
from swift_vlpack.rows import fusion_config
from swift_vlpack.text import stream_file
from swift_vlpack.text.local import DOCUMENTS
from swift_vlpack.text.stream import MODES

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft that editors support best."""
_SCHEMAS: dict[Any, Schema] = {
    str: values.TEXT, int: values.INT, float: values.FLOAT, bool: values.BOOL, type(None): values.NULL
}  # fmt: skip
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
_IN_FUSION = re.compile(r"^ *(?:- )?(\w+): .*?# (.*)$", re.MULTILINE)
_MINIMUM = {"ratio": 0, "sample_limit": 1, "max_pixels": 1}
_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_IN_STREAM = re.compile(r"^(\w+): .*?  # (.*)$", re.MULTILINE)
_LEAST_ONE = ("seq_len", "packing_buffer_docs", "num_ranks", "batch_size", "accumulation")
_CHOICES = {"document": list(DOCUMENTS), "packing_mode": list(MODES)}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--fusion", action="store_true", help="the schema of a fusion_config file instead")
    form.add_argument("--stream", action="store_true", help="the schema of a stream of text instead")


def _run(args: argparse.Namespace) -> int:
    text = schema_text("fusion" if args.fusion else "stream" if args.stream else "training")
    if args.output is None:
        print(text, end="")
        return 0
    try:
        write_whole(args.output, text.encode())
    except OSError as error:
        raise ConfigError(f"--output {args.output}: cannot be written ({error.strerror})") from None
    return 0


def schema_text(form: str = "training") -> str:
    """Return the text of the schema file for `training`, `fusion` or `stream` files."""
    schema = {"training": training_schema, "fusion": fusion_schema, "stream": stream_schema}[form]()
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def training_schema() -> Schema:
    """Describe the file that `vlpack sft`, `vlpack pt` and the commands about a run take."""
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
        # Refuse unknown keys, unless ms-swift is not installed: then its options are not known.
        "additionalProperties": not of_swift,
    }


def versions_comment() -> str:
    """Name the versions whose options are in the schema."""
    return ", ".join(f"{name} {version_of(name) or 'missing'}" for name in ("ms-swift", "transformers"))


def option_schema(spec: Any) -> Schema:
    """Return the schema of a packing option: what it takes, its default, its help."""
    schema = values.any_of(_SCHEMAS[kind] for kind in _kinds(spec.name))
    choices = [choice for choice in spec.metadata["choices"] if choice not in ("none", "INT")]
    if choices:
        known: Schema = {"enum": choices}
        schema = values.any_of([known, schema]) if spec.metadata["takes_others"] else known
    default = {} if spec.default is MISSING else {"default": spec.default}
    return {"description": spec.metadata["help"], **schema, **default}


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


def fusion_schema() -> Schema:
    """Describe a `fusion_config`: sources and how they take part."""
    texts = dict(_IN_FUSION.findall(fusion_config.__doc__ or ""))
    source = {
        name: {
            "description": texts[name],
            "type": "number" if float in kinds else _TYPES[kinds[0]],
            **({"minimum": _MINIMUM[name]} if name in _MINIMUM else {}),
        }
        for name, kinds in fusion_config.KINDS.items()
    }
    mapping = {"type": "object", "properties": source, "required": ["dataset"], "additionalProperties": False}
    return {
        "$schema": DRAFT,
        "$comment": "written by `vlpack schema --fusion`",
        "title": "Sources of data and how they take part: the fusion_config of swift_vlpack",
        "type": "object",
        "properties": {
            "sources": {"type": "array", "items": {"anyOf": [{"type": "string"}, mapping]}},
            "ratio_by": {"description": texts["ratio_by"], "enum": list(RATIOS_BY), "default": "rows"},
        },
        "required": ["sources"],
        "additionalProperties": False,
    }


def stream_schema() -> Schema:
    """Describe a file for `swift_vlpack.text.load_stream`."""
    texts = dict(_IN_STREAM.findall(stream_file.__doc__ or ""))
    properties: Schema = {}
    for name, kinds in stream_file.KINDS.items():
        types = ["number"] if float in kinds else [_TYPES[kind] for kind in kinds]
        properties[name] = {
            "description": texts[name],
            "type": types[0] if len(types) == 1 else types,
            **({"minimum": int(name in _LEAST_ONE)} if {int, float} & set(kinds) and name != "seed" else {}),
            **({"enum": _CHOICES[name]} if name in _CHOICES else {}),
        }
    return {
        "$schema": DRAFT,
        "$comment": "written by `vlpack schema --stream`",
        "title": "A stream of text and its batches: swift_vlpack.text.load_stream",
        "type": "object",
        "properties": properties,
        "required": list(stream_file.NEEDED),
        "additionalProperties": False,
    }


SCHEMA = Command(
    name="schema",
    text="print the JSON schema of training files, for editors",
    usage="vlpack schema [--fusion | --stream] [--output FILE]",
    description=(
        "Print the JSON schema of a training file: packing options, the options of the installed ms-swift, and the ENV "
        "block. An editor with a YAML language server completes and checks files that begin with "
        "`# yaml-language-server: $schema=FILE`; the one in configs/ is made by this command."
    ),
    add_flags=_add_flags,
    run=_run,
)
