"""The JSON schemas of `fusion_config` files and of streams of text, from what reads them."""

from __future__ import annotations

import re
from typing import Any

from swift_vlpack.cli.schema_training import DRAFT
from swift_vlpack.plan.mix import RATIOS_BY
from swift_vlpack.rows import fusion_config
from swift_vlpack.text.streams import stream_file

Schema = dict[str, Any]
_IN_DOCSTRING = re.compile(r"^ *(?:- )?(\w+): .*?# (.*)$", re.MULTILINE)
_LEAST = {"ratio": 0, "sample_limit": 1, "max_pixels": 1}
_OF_TYPE = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_OPTION = re.compile(r"^(\w+): .*?  # (.*)$", re.MULTILINE)
_LEAST_ONE = ("seq_len", "packing_buffer_docs", "num_ranks", "batch_size", "accumulation")
_CHOICES = {"document": ["line", "paragraph", "row"], "packing_mode": ["sequential", "bin"]}


def fusion_schema() -> Schema:
    """Sources and how they take part."""
    texts = dict(_IN_DOCSTRING.findall(fusion_config.__doc__ or ""))
    source = {
        name: {
            "description": texts[name],
            "type": "number" if float in kinds else _OF_TYPE[kinds[0]],
            **({"minimum": _LEAST[name]} if name in _LEAST else {}),
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
    texts = dict(_OPTION.findall(stream_file.__doc__ or ""))
    properties: Schema = {}
    for name, kinds in stream_file.KINDS.items():
        types = ["number"] if float in kinds else [_OF_TYPE[kind] for kind in kinds]
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
