"""Read the flags of `swift sft` and `swift pt` from source, because importing ms-swift takes ten seconds.

ms-swift makes a flag of every field of the dataclass `SftArguments` and its bases, here and in transformers; `swift pt`
adds none.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_NUMBER = re.compile(r"(?:Optional\[)?(int|float)\]?")


class _Lost(Exception):
    """The source of ms-swift or transformers is not organized as this module expects."""


class _Place(NamedTuple):
    """A module, by its name, and its file."""

    module: str
    path: Path


class Flag(NamedTuple):
    """A flag as its class declares it."""

    annotation: ast.expr

    @property
    def takes_list(self) -> bool:
        """Tell whether the flag takes any number of values."""
        return re.search(r"\b[Ll]ist\[", ast.unparse(self.annotation)) is not None

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the only values that the flag takes, as a user types them; empty if it takes any value."""
        if not re.match(r"(?:Optional\[)?Literal\[", ast.unparse(self.annotation)):
            return ()
        return tuple(str(part.value) for part in ast.walk(self.annotation) if isinstance(part, ast.Constant))

    @property
    def number(self) -> type[int] | type[float] | None:
        """Return the type of the number that the flag takes; None if it may take something else."""
        found = _NUMBER.fullmatch(ast.unparse(self.annotation))
        return None if found is None else {"int": int, "float": float}[found[1]]


def flag_names() -> frozenset[str]:
    """Return the names of all flags; empty if the source of this ms-swift or transformers cannot be read."""
    return frozenset(flags())


@cache
def flags() -> dict[str, Flag]:
    """Read all flags with their declarations; empty if the source cannot be read."""
    try:
        return dict(_fields("swift.arguments", "SftArguments"))
    except (_Lost, OSError, SyntaxError, ValueError):
        return {}


@cache
def tuner_types() -> frozenset[str]:
    """Read the values of `--tuner_type` that need no plugin; empty if this ms-swift is organized differently."""
    try:
        built_in = _tree(_place("swift.arguments.base_args.base_args").path)
        mapped = _tree(_place("swift.tuner_plugin.mapping").path)
        (function,) = (line for line in built_in.body if getattr(line, "name", "") == "get_supported_tuners")
    except (_Lost, OSError, SyntaxError, ValueError):
        return frozenset()
    keys = [key for part in ast.walk(mapped) if isinstance(part, ast.Dict) for key in part.keys]
    parts = [*ast.walk(function), *keys]
    return frozenset(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


VALUES = {
    "report_to": ("transformers.integrations.integration_utils", "INTEGRATION_TO_CALLBACK", ("none", "all")),
    "lr_scheduler_type": ("transformers.trainer_utils", "SchedulerType", ()),
    "optim": ("transformers.training_args", "OptimizerNames", ()),
    "eval_strategy": ("transformers.trainer_utils", "IntervalStrategy", ()),
    "logging_strategy": ("transformers.trainer_utils", "IntervalStrategy", ()),
    "save_strategy": ("transformers.trainer_utils", "SaveStrategy", ()),
    "loss_scale": ("swift.loss_scale.mapping", "loss_scale_map", ("default", "last_round", "all")),
    "optimizer": ("swift.optimizers.mapping", "optimizers_map", ()),
    "callbacks": ("swift.callbacks.mapping", "callbacks_map", ()),
    "eval_metric": ("swift.metrics.mapping", "eval_metrics_map", ()),
}
"""Options that take one of a set of values: the module and name of a dict or an enumeration, and further values."""


@cache
def known_values(option: str) -> frozenset[str]:
    """Read the values of an option of `VALUES` from source, without plugins; empty if the source cannot be read."""
    module, name, more = VALUES[option]
    try:
        lines = _tree(_place(module).path).body
    except (_Lost, OSError, SyntaxError, ValueError):
        return frozenset()
    found: list[ast.expr | None] = []
    for line in lines:
        if isinstance(line, ast.ClassDef) and line.name == name:
            found += [part.value for part in line.body if isinstance(part, ast.Assign)]
        elif isinstance(line, ast.Assign) and name in map(ast.unparse, line.targets):
            found += line.value.keys if isinstance(line.value, ast.Dict) else []
    values = [part.value for part in found if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return frozenset((*values, *more)) if values else frozenset()


def registered_values(option: str) -> frozenset[str]:
    """Return the values of an option of `VALUES` with those that plugins have registered, by importing ms-swift."""
    module, name, more = VALUES[option]
    known: Any = getattr(importlib.import_module(module), name)
    return frozenset((*more, *(known if isinstance(known, dict) else (one.value for one in known))))


def _fields(module: str, name: str) -> Iterator[tuple[str, Flag]]:
    """Yield the fields of the bases before those of the class, the first base last, so that overrides win."""
    place, found = _class(module, name)
    for base in reversed(found.bases):
        if isinstance(base, ast.Name) and base.id not in ("object", "ABC"):
            yield from _fields(place.module, base.id)
    for line in found.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_field(line):
            yield line.target.id, Flag(line.annotation)


def _is_field(line: ast.AnnAssign) -> bool:
    if "ClassVar" in ast.unparse(line.annotation):
        return False
    options = line.value.keywords if isinstance(line.value, ast.Call) else []
    return not any(option.arg == "init" and ast.unparse(option.value) == "False" for option in options)


def _class(module: str, name: str) -> tuple[_Place, ast.ClassDef]:
    """Find a class that the module defines, or imports from another."""
    place = _place(module)
    tree = _tree(place.path)
    for line in tree.body:
        if isinstance(line, ast.ClassDef) and line.name == name:
            return place, line
    for node in ast.walk(tree):  # a lazy package has its imports under `if TYPE_CHECKING`
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _class(_absolute(node, place), alias.name)
    raise _Lost(f"{module}.{name}")


def _absolute(node: ast.ImportFrom, place: _Place) -> str:
    if not node.level:
        return node.module or ""
    is_package = place.path.name == "__init__.py"
    parts = place.module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _place(module: str) -> _Place:
    """Find a module's file by its name. Python's own search would import the packages above it."""
    top, *rest = module.split(".")
    return _Place(module, source_file(top, *rest))


def source_file(package: str, *names: str) -> Path:
    """Return the file of a module in an installed package, without importing either."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, *names)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise _Lost(".".join((package, *names)))
