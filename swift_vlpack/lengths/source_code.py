"""Find and digest the code that lengths depend on, except for code that an installed package's version identifies.

- For a class: the source files of the class and its bases, and every function as it is loaded, with patches.
- For a plugin: its file.
- For the user's own files among these: every module that they import from outside the installed packages.

Imports are read from `import` statements, and from strings in files that load code by name. No code is run, so the
result does not depend on which modules happen to be loaded. `observed.py` finds what reading code cannot find.
Comments, docstrings and line numbers of the user's own code do not change the digest.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Code(NamedTuple):
    """The files that hold the code of some objects and plugins."""

    files: frozenset[str]
    """Files of the classes, of patched functions and of plugins, and the user's own files that these import."""
    packages: frozenset[str]
    """Names of the installed packages among them. A package's version covers everything that it imports."""


def code_of(objects: Iterable[Any], plugins: Iterable[str] = ()) -> Code:
    """Find the code of the objects' classes with all bases, and of plugins."""
    named = [file for each in objects for file in source_files(type(each))]
    # Add the files of functions, because a function that was patched into a class is in another file than the class.
    named += [function.__code__.co_filename for each in objects for function in _functions(each)]
    named += [os.path.abspath(os.path.expanduser(plugin)) for plugin in plugins]
    todo, files, packages = [file for file in named if os.path.isfile(file)], set(), set()
    while todo:
        if (file := todo.pop()) in files:
            continue
        files.add(file)
        if is_installed(file):
            packages.add(Path(file).relative_to(_root(file)).parts[0].removesuffix(".py"))
        else:
            todo += _imported(file)
    return Code(frozenset(files), frozenset(packages))


def source_files(made: type) -> list[str]:
    """Return the files of a class and of its bases."""
    files = [getattr(sys.modules.get(base.__module__), "__file__", None) for base in made.__mro__ if base is not object]
    return [file for file in files if file is not None]


def digest_of_files(files: Iterable[str]) -> str:
    """Return a digest of the contents of files; their paths do not count."""
    return _digest(sorted(hashlib.blake2b(_content(file), digest_size=16).digest() for file in set(files)))


def _content(file: str) -> bytes:
    content = Path(file).read_bytes()
    if not is_installed(file):
        with suppress(SyntaxError, ValueError, RecursionError):
            return ast.dump(_without_docstrings(ast.parse(content))).encode()
    return content


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return tree


def digest_of_functions(objects: Iterable[Any]) -> str:
    """Return a digest of all functions of the objects' classes as loaded, with patches and code that has no file."""
    return _digest(repr(parts_of_function(function)).encode() for each in objects for function in _functions(each))


def parts_of_function(function: FunctionType) -> Any:
    """Return the code of a function, and for the user's own functions also constants among defaults and closure."""
    code = function.__code__
    if os.path.isfile(code.co_filename) and is_installed(code.co_filename):
        return _code_parts(code)
    # Take constants only, because other defaults and closure values may change while the program runs.
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    values = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()), *cells]
    return _instructions(code), [value for value in values if _is_constant(value)]


def _is_full(cell: CellType) -> bool:
    """Tell whether a closure variable has a value yet; reading an empty cell raises."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (str, bytes, int, float))


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    """Return instructions with their constants in place of indices, which an added docstring would shift."""
    found = ((each.opname, each.argval) for each in dis.get_instructions(code) if each.opname not in _NO_WORK)
    return [(name, _instructions(value) if isinstance(value, CodeType) else _constant(value)) for name, value in found]


_NO_WORK = ("CACHE", "RESUME", "NOP", "EXTENDED_ARG")


def functions_of_module(module: ModuleType, but: Container[str] = ()) -> Iterator[FunctionType]:
    """Yield the functions defined in a module, also in its classes and by `exec`, but not those named in `but`."""
    for value in [value for name, value in tuple(vars(module).items()) if name not in but]:
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from (function for inner in tuple(vars(value).values()) for function in _inner(inner))
        else:
            yield from (one for one in _inner(value) if one.__globals__ is vars(module))


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses, also in functions defined inside it."""
    inside = (value for value in code.co_consts if isinstance(value, CodeType))
    return set(code.co_names).union(*map(names_in, inside))


@cache
def digest_of_package(package: str) -> str | None:
    """Return a digest of a package that is used from a working copy; None if an installed version stands for it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or _has_versions(_root(spec.origin)):
        return None
    folder = Path(spec.origin).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json"))
    return _digest(part for path in files for part in (str(path.relative_to(folder)).encode(), path.read_bytes()))


COVERED = ("swift_vlpack", "swift", "transformers", "qwen_vl_utils", "torch", "torchvision", "tokenizers", "PIL")
"""Packages whose version or `digest_of_package` is in the key, so their imports are not followed."""


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _functions(thing: Any) -> Iterator[FunctionType]:
    """Yield the functions of an object: its own, and those of its class and all bases."""
    for base in type(thing).__mro__:
        for value in vars(base).values():
            yield from _inner(value)
    for value in getattr(thing, "__dict__", {}).values():
        yield from _inner(value)


def _inner(value: Any) -> Iterator[FunctionType]:
    """Yield the functions inside an attribute of a class: a method, a property, or a decorated function."""
    if isinstance(value, FunctionType):
        yield value
        yield from _inner(getattr(value, "__wrapped__", None))
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _inner(value.__func__)
    elif isinstance(value, property):
        yield from (function for part in (value.fget, value.fset) for function in _inner(part))
    elif isinstance(value, (cached_property, partial)):
        yield from _inner(value.func)


def _code_parts(code: CodeType) -> tuple[Any, ...]:
    """Return names and instructions without line numbers, which a comment would change, and without addresses."""
    return code.co_code, code.co_names, code.co_varnames, [_constant(value) for value in code.co_consts]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code_parts(value)
    # Sort, because a set has another order in every process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


@cache
def is_installed(file: str) -> bool:
    """Tell whether a file is part of Python, of an installed package, or of a package in `COVERED`.

    The version (or digest) of these is in the key, so their files need not be digested one by one.
    """
    return file.startswith(_covered_folders()) or _has_versions(_root(file))


@cache
def _covered_folders() -> tuple[str, ...]:
    specs = [importlib.util.find_spec(package) for package in COVERED]
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec is not None and spec.origin)


def _root(file: str) -> str:
    """Return the folder that a module is imported from: the one above its outermost package."""
    folder = os.path.dirname(os.path.abspath(file))
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


@cache
def _has_versions(folder: str) -> bool:
    """Tell whether a folder has installed packages, each with a record of its version, or Python's own modules."""
    if {"site-packages", "dist-packages"} & set(Path(folder).parts):
        return True
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return any(Path(folder).is_relative_to(path) for path in own) or any(Path(folder).glob("*.dist-info"))


def _imported(file: str) -> list[str]:
    """Return the files of the modules that a file imports, at its top or inside functions."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):
        return []
    found, nodes = [], list(ast.walk(tree))
    loads_by_name = any(getattr(node, "id", getattr(node, "attr", None)) in _LOADERS for node in nodes)
    for node in nodes:
        if loads_by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += _named(node.value, file)
            continue
        if isinstance(node, ast.Import):
            names, folders = [alias.name for alias in node.names], [_root(file), *sys.path]
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            folders = [_above(file, node.level)] if node.level else [_root(file), *sys.path]
        else:
            continue
        found += [path for name in names for path in _modules(name.split("."), folders)]
    return found


_LOADERS = frozenset(
    ("import_module", "__import__", "exec", "run_path", "run_module", "spec_from_file_location", "SourceFileLoader")
)
"""Functions that load code by a string. In a file that uses one, every string is tried as a module name or path."""


def _named(text: str, file: str) -> list[str]:
    """Return the files of the module, or the `.py` file, that a string in the user's file may name."""
    if text.endswith(".py"):
        folders = (os.path.dirname(file), os.getcwd())
        paths = (os.path.abspath(os.path.join(folder, os.path.expanduser(text))) for folder in folders)
        return [path for path in paths if os.path.isfile(path)][:1]
    parts = text.strip(".").split(".")
    return _modules(parts, [_root(file), *sys.path]) if all(map(str.isidentifier, parts)) else []


def _above(file: str, level: int) -> str:
    folder = file
    for _ in range(level):
        folder = os.path.dirname(folder)
    return folder


def _modules(parts: list[str], folders: Iterable[str]) -> list[str]:
    """Return the files of the modules `a`, `a.b` and `a.b.c` in the first folder that has any of them."""
    for folder in folders:
        at, found = os.path.abspath(folder), []
        for part in parts:
            at = os.path.join(at, part)
            found += [path for path in (f"{at}.py", os.path.join(at, "__init__.py")) if os.path.isfile(path)]
        if found:
            return found
    return []
