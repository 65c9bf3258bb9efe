"""`vlpack schema`: write JSON schemas, with which editors complete and check training files.

There are two: for a training file, and for its `fusion_config`. They are generated from the fields and docstrings of
the code that reads these files, so no schema can fall behind. The schema of a training file has the packing options and
`ENV`; it allows any other key, because ms-swift's own are checked at the start of a run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from swift_vlpack.cli.command import Command
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
from swift_vlpack.plan.mix import RATIOS_BY
from swift_vlpack.rows import fusion_config

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft that editors support best."""
_SCHEMAS: dict[Any, Schema] = {
    str: {"type": ["string", "number"]},
    int: {"type": ["integer", "string"], "pattern": "^[-+]?[0-9]+$"},
    # Also a text, because YAML reads `1e-4`, which has no point, as a text.
    float: {"type": ["number", "string"], "pattern": "^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$"},
    bool: {"enum": [True, False, "true", "false"]},
    type(None): {"type": "null"},
}
"""What a value of a YAML file may be that becomes a flag of this type: all that the command line accepts."""
_VARIABLES = {
    RESUME_DATA: "let a resumed run begin its data anew",
    RESUME_FILES: "let a resumed run take files of its checkpoint that were replaced on purpose",
    RECORD_PACKS: "true: keep every trained pack in vlpack/packs_rankN.jsonl, not the latest alone; false: keep none",
}
_IN_FUSION = re.compile(r"^ *(?:- )?(\w+): .*?# (.*)$", re.MULTILINE)
_MINIMUM = {"ratio": 0, "sample_limit": 1, "max_pixels": 1}
_TYPES = {str: "string", int: "integer"}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fusion", action="store_true", help="the schema of a fusion_config file instead")


def _run(args: argparse.Namespace) -> int:
    print(schema_text("fusion" if args.fusion else "training"), end="")
    return 0


def schema_text(form: str = "training") -> str:
    """Return the text of the schema file for `training` or `fusion` files."""
    schema = {"training": training_schema, "fusion": fusion_schema}[form]()
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def training_schema() -> Schema:
    """Describe the file that `vlpack sft`, `vlpack pt` and the commands about a run take."""
    return {
        "$schema": DRAFT,
        "$comment": "written by `vlpack schema`",
        "title": "A training run of ms-swift, packed by swift_vlpack",
        "type": "object",
        "properties": {
            "ENV": {
                "description": "environment variables of the run; what is set outside wins",
                "type": "object",
                "properties": _variables(),
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
            **{spec.name: option_schema(spec) for spec in fields(PackingConfig)},
        },
        "additionalProperties": True,  # the options of ms-swift
    }


def option_schema(spec: Any) -> Schema:
    """Return the schema of a packing option: what it takes, its default, its help."""
    schema = any_of(_SCHEMAS[kind] for kind in _kinds(spec.name))
    choices = [choice for choice in spec.metadata["choices"] if choice not in ("none", "INT")]
    if choices:
        known: Schema = {"enum": choices}
        schema = any_of([known, schema]) if spec.metadata["takes_others"] else known
    default = {} if spec.default is MISSING else {"default": spec.default}
    return {"description": spec.metadata["help"], **schema, **default}


def any_of(schemas: Iterable[Schema]) -> Schema:
    """Return a schema that allows whatever one of these allows."""
    flat: list[Schema] = []
    for schema in schemas:
        flat += schema.get("anyOf", [schema])
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _variables() -> dict[str, Schema]:
    packing = {ENV_PREFIX + spec.name.upper(): option_schema(spec) for spec in fields(PackingConfig)}
    for schema in packing.values():
        schema.pop("default", None)
    others: dict[str, Schema] = {name: {"description": _VARIABLES[name]} for name in NO_OPTIONS}
    others[RESUME_DATA]["enum"] = [RESTART]
    others[RESUME_FILES]["enum"] = [REPLACED]
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


SCHEMA = Command(
    name="schema",
    text="print the JSON schema of training files, for editors",
    usage="vlpack schema [--fusion]",
    description=(
        "Print the JSON schema of a training file: packing options and the ENV block; the options of ms-swift pass. An "
        "editor with a YAML language server completes and checks files that begin with "
        "`# yaml-language-server: $schema=FILE`; the one in configs/ is made by this command."
    ),
    add_flags=_add_flags,
    run=_run,
)
