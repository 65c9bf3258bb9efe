"""What may cure a row that could not be read, though neither it nor its files changed: part of the key of failures.

A format that Pillow did not know has a reader now, a limit was lifted, a codec or a library was installed. None of it
changes the length of a row that was readable before, so good rows are not measured again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image, ImageFile, PngImagePlugin, features


def digest_of_cures() -> bytes:
    """16 bytes that are equal while nothing of it changes."""
    cures = [sorted(_readers()), sorted(_limits()), sorted(_codecs()), sorted(_installed()), shutil.which("ffmpeg")]
    return hashlib.blake2b(repr(cures).encode(), digest_size=16).digest()


def _readers() -> Iterator[tuple[str, ...]]:
    """Formats registered with Pillow from outside of it; its own come when they are first needed, and go by version."""
    for name, (opener, _) in Image.OPEN.items():
        module = getattr(opener, "__module__", None) or ""
        if not module.startswith("PIL."):
            yield name, module, getattr(opener, "__qualname__", ""), _source_of(module)


def _source_of(module: str) -> str:
    with suppress(OSError, TypeError):
        return hashlib.blake2b(Path(sys.modules[module].__file__ or "").read_bytes()).hexdigest()
    return ""


def _limits() -> Iterator[tuple[str, str]]:
    """`MAX_IMAGE_PIXELS`, `LOAD_TRUNCATED_IMAGES` and the like."""
    modules: tuple[ModuleType, ...] = (Image, ImageFile, PngImagePlugin)
    for module in modules:
        values: dict[str, Any] = vars(module)
        for name, value in values.items():
            if name.isupper() and (value is None or isinstance(value, (bool, int, float))):
                yield f"{module.__name__}.{name}", repr(value)


def _codecs() -> Iterator[str]:
    """What Pillow was built with; one version comes with and without."""
    yield from (name for name in features.modules if name != "tkinter" and features.check_module(name))
    yield from (name for name in features.codecs if features.check_codec(name))


def _installed() -> Iterator[str]:
    """Every installed package with its version, by the name of its record."""
    for folder in sys.path:
        with suppress(OSError):
            yield from (name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
