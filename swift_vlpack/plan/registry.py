"""Find strategies by name: built-in ones, registered ones, and `module:function`. Check what user strategies return.

>>> @register_strategy("alone")
... def alone(lengths, capacity):
...     return [[index] for index in range(len(lengths))]
>>> strategy_named("alone")([5, 3], 10)
[[0], [1]]

A strategy must be a pure function, because every rank calls it by itself, and all ranks must get the same groups.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, invalidate_caches
from operator import index as as_index
from typing import Any

from swift_vlpack.errors import ConfigError, StrategyError
from swift_vlpack.plan.strategies import STRATEGIES, Caps, Groups, Strategy
from swift_vlpack.words import did_you_mean

ALIASES = {"sequential": "greedy"}  # ms-swift's name
SIGNATURE = "(lengths, capacity) -> groups of indices"

Grouping = Callable[..., Iterable[Iterable[int]]]
"""Function of `(lengths, capacity)` or `(lengths, capacity, caps)` that returns groups of indices."""
_registered: dict[str, Grouping] = {}


def register_strategy(name: str, function: Grouping | None = None) -> Any:
    """Register `function` as `packing_strategy=name`, as a decorator or in a call. Returns the function.

    The same function may be registered again, because plugin files are loaded twice. Raises `ConfigError` for another
    function under the same name.
    """
    if function is None:
        return lambda given: register_strategy(name, given)
    if not isinstance(name, str) or not name.strip() or ":" in name:
        raise ConfigError(f"a strategy cannot be called {name!r}; give it a name without a colon")
    if name in STRATEGIES or name in ALIASES:
        raise ConfigError(f"{name} is a strategy of this package; register yours under another name")
    known = _registered.get(name)
    if known is not None and _origin(known) != _origin(function):
        raise ConfigError(
            f"{name} is registered already, as {_said(known)}; register {_said(function)} by another name"
        )
    _check_signature(name, function)
    _registered[name] = function
    return function


def strategy_named(name: str) -> Strategy:
    """Return the strategy of this name. The groups of a user's strategy are checked at every call."""
    name = ALIASES.get(name, name)
    if name in STRATEGIES:
        return STRATEGIES[name]
    if name in _registered:
        return Checked(name, _registered[name])
    if ":" in name:
        return Checked(name, _imported(name))
    raise ConfigError(
        f"packing_strategy must be one of {', '.join(known_names())}, or module:function for one of your own, "
        f"got {name!r}{did_you_mean(name, known_names())}"
    )


def known_names() -> tuple[str, ...]:
    """Return all names of strategies that need no import."""
    return (*STRATEGIES, *ALIASES, *_registered)


@dataclass(frozen=True, slots=True)
class Checked:
    """A user's strategy. It gets a copy of the lengths, and its groups are checked."""

    name: str
    function: Grouping

    def __call__(self, lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> Groups:
        """Return the groups, with ascending indices. Raises `StrategyError` if the strategy fails or breaks a rule."""
        if not len(lengths):
            return []
        options = {"caps": caps} if caps is not None and "caps" in _parameters(self.function) else {}
        try:
            # Pass a copy: a strategy may sort or empty its list, which must not change the packer's own.
            groups = [sorted(map(as_index, group)) for group in self.function(list(lengths), capacity, **options)]
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise StrategyError(f"packing_strategy {self.name} failed ({said}); it must be {SIGNATURE}") from error
        broken = broken_rule(groups, lengths, capacity, caps)
        if broken is not None:
            raise StrategyError(f"packing_strategy {self.name}: {broken}")
        return groups


def broken_rule(groups: Groups, lengths: Sequence[int], capacity: int, caps: Caps | None = None) -> str | None:
    """Return what is wrong with the groups, or None.

    Every index must be in exactly one group, no group may be empty, and none may exceed the capacity or a cap.
    """
    owner: dict[int, int] = {}
    for number, group in enumerate(groups):
        if not group:
            return f"group {number} is empty; leave it out"
        for index in group:
            if not 0 <= index < len(lengths):
                return f"group {number} has index {index}, but indices go from 0 to {len(lengths) - 1}"
            if index in owner:
                return (
                    f"index {index} is in groups {owner[index]} and {number}; every index must be in exactly one group"
                )
            owner[index] = number
        num_tokens = sum(lengths[index] for index in group)
        if num_tokens > capacity:
            return f"group {number} has {num_tokens} tokens; the capacity is {capacity}"
        if caps is not None and not caps.fit(group):
            return f"group {number} exceeds a cap (packing_max_samples, packing_max_images or packing_max_patches)"
    if len(owner) < len(lengths):
        missing = next(index for index in range(len(lengths)) if index not in owner)
        return f"index {missing} is in no group; every index must be in exactly one group"
    return None


@cache
def _imported(path: str) -> Grouping:
    """Import the function that `module:function` names."""
    module_name, _, attribute = path.partition(":")
    found: Any = _module(module_name, path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"packing_strategy {path}: {module_name} has no {attribute or 'name after the colon'}")
        found = getattr(found, part)
    _check_signature(path, found)
    function: Grouping = found
    return function


def _module(name: str, path: str) -> Any:
    """Import a module, also from the current directory, which is not on the path of a console script."""
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.append(here)  # last, so that no file there takes the place of a package
        # Python caches the content of each folder, and would miss a file that was just written.
        invalidate_caches()
    try:
        return import_module(name)
    except Exception as error:
        raise ConfigError(
            f"packing_strategy {path}: cannot import {name!r} ({type(error).__name__}: {error}); "
            "it must be in the current directory, on PYTHONPATH or installed"
        ) from error


def _check_signature(name: str, function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"packing_strategy {name} is {function!r}; it must be a function {SIGNATURE}")
    try:
        inspect.signature(function).bind([1], 1)
    except TypeError as error:
        raise ConfigError(f"packing_strategy {name}: {_said(function)} must take {SIGNATURE} ({error})") from None
    except ValueError:
        pass  # built-in functions may have no signature


def _parameters(function: Grouping) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return ()


def _origin(function: Grouping) -> tuple[str, str]:
    """Return (file, name) of a function. They stay equal if the file is loaded again as another module."""
    code = getattr(function, "__code__", None)
    return getattr(code, "co_filename", ""), getattr(function, "__qualname__", repr(function))


def _said(function: Grouping) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
