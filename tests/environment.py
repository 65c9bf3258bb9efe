"""Environment variables of this process, which training in it sets and nobody else shall see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def restored_environment() -> Iterator[None]:
    """Leave the environment as it was.

    `datasets` puts a copy in the place of `os.environ` while it maps, and `monkeypatch` would then undo its variables
    in the wrong one.
    """
    environ, content = os.environ, dict(os.environ)
    try:
        yield
    finally:
        for key in set(os.environ) - set(content):
            os.unsetenv(key)
        os.environ = environ  # noqa: B003 - the very object, and below its content
        os.environ.clear()
        os.environ.update(content)


def packing_options(monkeypatch: Any, **options: str) -> None:
    """Only these options of packing as variables, for the length of a test."""
    for key in [key for key in os.environ if key.startswith("VLPACK_")]:
        monkeypatch.delenv(key)
    for name, value in options.items():
        monkeypatch.setenv(f"VLPACK_{name.upper()}", value)
