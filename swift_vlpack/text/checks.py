"""Check options that have to be whole numbers."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from swift_vlpack.errors import ConfigError


def check_whole(least: int, *needed: str, **options: Any) -> None:
    """Raise `ConfigError` unless options are whole numbers of at least `least`. None is allowed if not `needed`.

    >>> check_whole(1, max_length=8, max_len=None)
    >>> check_whole(1, max_length="8")
    Traceback (most recent call last):
        ...
    swift_vlpack.errors.ConfigError: max_length must be a whole number, got '8'
    """
    for name, value in options.items():
        if value is None and name not in needed:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
