"""Environment variables of this process, which training in it sets and nobody else shall see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def restored_environment() -> Iterator[None]:
    """Leave the environment as it was.

    Where a fixture of a module trains, plans or encodes: `datasets` puts a copy in the place of `os.environ` while it
    maps, and `monkeypatch` undoes its variables in the wrong one.
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


def packing_options(**options: Any) -> None:
    """Set these packing options as variables, and no others. Whoever calls restores the environment, as tests do."""
    packing_variables({f"VLPACK_{name.upper()}": str(value) for name, value in options.items()})


def packing_variables(variables: Mapping[str, str]) -> None:
    """Set these `VLPACK_*` variables, and no others. Not by `monkeypatch`: `datasets` replaces `os.environ`."""
    for key in [key for key in os.environ if key.startswith("VLPACK_")]:
        del os.environ[key]
    os.environ.update(variables)
