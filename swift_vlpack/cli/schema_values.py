"""Make JSON schemas for YAML values that become flags. A schema allows what argparse accepts on the command line.

>>> import ast
>>> def schema(text):
...     return schema_of(ast.parse(text, mode="eval").body)
>>> schema("Optional[int]")
{'anyOf': [{'type': ['integer', 'string'], 'pattern': '^[-+]?[0-9]+$'}, {'type': 'null'}]}
>>> schema("Literal['peft', 'unsloth']")
{'enum': ['peft', 'unsloth']}
>>> schema("list[str]")["anyOf"][1]
{'type': 'array', 'items': {'type': ['string', 'number']}}
>>> schema("SomeClass | None")
{}
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from swift_vlpack.host.swift_flags import Flag

Schema = dict[str, Any]

TEXT: Schema = {"type": ["string", "number"]}
INT: Schema = {"type": ["integer", "string"], "pattern": "^[-+]?[0-9]+$"}
FLOAT: Schema = {"type": ["number", "string"], "pattern": "^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$"}
"""Also a text, because YAML reads `1e-4`, which has no point, as a text."""
BOOL: Schema = {"enum": [True, False, "true", "false"]}
MAPPING: Schema = {"type": ["object", "string"]}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {}
_OF_NAME = {"str": TEXT, "int": INT, "float": FLOAT, "bool": BOOL, "dict": MAPPING, "Dict": MAPPING, "Path": TEXT}


def flag_schema(flag: Flag) -> Schema:
    """Return the schema of an option of ms-swift. An annotation that is not understood allows any value."""
    schema = schema_of(flag.annotation)
    has_default, default = _default(flag.default)
    if has_default and default is None:
        schema = any_of([schema, NULL])
    return {
        **({"description": flag.text} if flag.text else {}),
        **schema,
        **({"default": default} if has_default and default is not None else {}),
    }


def _default(written: ast.expr | None) -> tuple[bool, Any]:
    """Return (whether the default is a literal in the source, the default)."""
    if isinstance(written, ast.Call):
        written = next((option.value for option in written.keywords if option.arg == "default"), None)
    try:
        return (False, None) if written is None else (True, ast.literal_eval(written))
    except ValueError:  # an expression, which only importing ms-swift would evaluate
        return False, None


def schema_of(annotation: ast.expr) -> Schema:
    """Return the schema of a type annotation in ms-swift's source."""
    if isinstance(annotation, ast.Constant):
        return NULL if annotation.value is None else ANYTHING
    if isinstance(annotation, ast.Name):
        return _OF_NAME.get(annotation.id, ANYTHING)
    if isinstance(annotation, ast.BinOp):
        return any_of([schema_of(annotation.left), schema_of(annotation.right)])
    if isinstance(annotation, ast.Subscript):
        return _of_generic(ast.unparse(annotation.value).rpartition(".")[2], annotation.slice)
    return ANYTHING


def _of_generic(name: str, inside: ast.expr) -> Schema:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Optional":
        return any_of([schema_of(inside), NULL])
    if name == "Union":
        return any_of(map(schema_of, parts))
    if name == "Literal":
        values = [part.value for part in parts if isinstance(part, ast.Constant)]
        return {"enum": values}
    if name in ("List", "list"):
        of_one = schema_of(inside)
        return any_of([of_one, {"type": "array", "items": of_one}])  # argparse turns a single value into a list
    return _OF_NAME.get(name, ANYTHING)


def any_of(schemas: Iterable[Schema]) -> Schema:
    """Return a schema that allows whatever one of these allows."""
    flat: list[Schema] = []
    for schema in schemas:
        flat += [one for one in schema.get("anyOf", [schema]) if one not in flat]
    if ANYTHING in flat:
        return ANYTHING
    return flat[0] if len(flat) == 1 else {"anyOf": flat}
