"""Log the rows that cannot be encoded, and decide when to retry them.

The `retry_key` is part of the key of a saved failure. So a failed row is retried when Pillow knows another format, a
limit is lifted, or a codec or package is installed. It is not part of the keys of good rows, whose lengths depend on
none of these.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image, ImageFile, PngImagePlugin, features

from swift_vlpack.reasons import Reason
from swift_vlpack.rows.sizes import LengthIndex
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.urls import NUM_FAILURES, SECONDS_REMEMBERED
from swift_vlpack.words import by_reason, counted

logger = logging.getLogger(__name__)

NUM_FAILURES_NAMED = 20
"""Most failed rows of a source that the log names. The log counts all of them, and `left_out.jsonl` lists all."""
NUM_WITH_TAGS_NAMED = 5
"""Most rows with surplus tags that the log names."""


def retry_key() -> bytes:
    """Return a digest of everything whose change may let a failed row pass, other than the row and its files."""
    state = [
        sorted(_readers()),
        sorted(_limits()),
        sorted(_codecs()),
        sorted(_installed()),
        shutil.which("ffmpeg"),
    ]
    return hashlib.blake2b(repr(state).encode(), digest_size=16).digest()


def _readers() -> Iterator[tuple[str, ...]]:
    """Yield the image formats that other packages registered with Pillow.

    Pillow's own formats are skipped: it registers them only when they are first needed, and its version covers them.
    """
    for name, (opener, _) in Image.OPEN.items():
        module = getattr(opener, "__module__", None) or ""
        if not module.startswith("PIL."):
            yield name, module, getattr(opener, "__qualname__", ""), _source_of(module)


def _source_of(module: str) -> str:
    with suppress(OSError, TypeError):
        return hashlib.blake2b(Path(sys.modules[module].__file__ or "").read_bytes()).hexdigest()
    return ""


def _limits() -> Iterator[tuple[str, str]]:
    """Yield Pillow's settings: `MAX_IMAGE_PIXELS`, `LOAD_TRUNCATED_IMAGES` and the like."""
    modules: tuple[ModuleType, ...] = (Image, ImageFile, PngImagePlugin)
    for module in modules:
        values: dict[str, Any] = vars(module)
        for name, value in values.items():
            if name.isupper() and (value is None or isinstance(value, (bool, int, float))):
                yield f"{module.__name__}.{name}", repr(value)


def _codecs() -> Iterator[str]:
    """Yield the libraries that Pillow was built with, because its version does not say."""
    yield from (name for name in features.modules if name != "tkinter" and features.check_module(name))
    yield from (name for name in features.codecs if features.check_codec(name))


def _installed() -> Iterator[str]:
    """Yield the name of every package's installation record, which has the version: `pillow-11.0.0.dist-info`."""
    for folder in sys.path:
        with suppress(OSError):
            yield from (name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))


# -- log --------------------------------------------------------------------------------------------------------------


def log_failures(source: RowSource, sizes: LengthIndex, unreachable_urls: Path) -> None:
    """Log the first rows that cannot be encoded, and the number of all by reason.

    `unreachable_urls` is the file that remembers which URLs failed.
    """
    for index in sorted(sizes.failures)[:NUM_FAILURES_NAMED]:
        fault = sizes.fault(index)
        logger.warning("%s: left out: %s: %s", source.sample_id(index), fault.reason, fault.error)
    counts = Counter(sizes.failures.values())
    if counts:
        logger.warning(
            "source %s: %d of %d rows cannot be encoded: %s",
            source.name, counts.total(), len(sizes), by_reason(counts),
        )  # fmt: skip
    if counts[Reason.URL_UNREACHABLE]:
        logger.warning(
            "source %s: %s left out, because an image behind a URL could not be fetched. Each URL was tried once, and "
            "no URL of a host after it failed %d times in a row; SWIFT_TIMEOUT sets how many seconds to wait. Runs "
            "that start %d minutes later retry, and so does the next run if %s is deleted",
            source.name, counted(counts[Reason.URL_UNREACHABLE], "row"), NUM_FAILURES, SECONDS_REMEMBERED // 60,
            unreachable_urls,
        )  # fmt: skip


def log_surplus_tags(source: RowSource, sizes: LengthIndex) -> None:
    """Log the first rows with more tags than media, and the number of all."""
    if sizes.surplus_tags:
        first = [str(source.sample_id(index)) for index in sizes.surplus_tags[:NUM_WITH_TAGS_NAMED]]
        logger.warning(
            "source %s: %d of %d rows have more tags (<image>) in their texts than media (images): %s. ms-swift puts "
            "media in place of the first tags and trains the other tags as plain words; so does this run. Give every "
            "tag its medium, or remove it from the text",
            source.name, len(sizes.surplus_tags), len(sizes),
            ", ".join(first) + (", ..." if len(sizes.surplus_tags) > len(first) else ""),
        )  # fmt: skip
