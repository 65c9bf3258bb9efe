"""Where this package keeps what it remembers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lengths_folder(given: str | None, environ: Mapping[str, str]) -> Path:
    """The folder of remembered lengths: the option `packing_cache_dir`, or one in ms-swift's own cache of models."""
    if given:
        return Path(given).expanduser()
    of_models = environ.get("MODELSCOPE_CACHE", str(Path.home() / ".cache" / "modelscope" / "hub"))
    return (Path(of_models) / "vlpack" / "lengths").expanduser()
