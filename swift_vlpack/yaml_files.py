"""Read a YAML file, or say in one line why that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift_vlpack.core.errors import ConfigError


def read_yaml(path: Path, what: str) -> Any:
    """The content of the file; `what` is what an error calls it."""
    import yaml  # only when a file is read: the package imports in milliseconds

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: not YAML: {' '.join(str(error).split())}") from None
