"""The JSON schema of a `fusion_config` file, from what reads it."""

from __future__ import annotations

import re
from typing import Any

from swift_vlpack.commands.schema.training import DRAFT
from swift_vlpack.core.epoch.mix import RATIOS_BY
from swift_vlpack.data.rows import fusion_config

Schema = dict[str, Any]
_IN_DOCSTRING = re.compile(r"^ *(?:- )?(\w+): .*?# (.*)$", re.MULTILINE)
_LEAST = {"ratio": 0, "sample_limit": 1, "max_pixels": 1}
_OF_TYPE = {str: "string", int: "integer", float: "number"}


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
