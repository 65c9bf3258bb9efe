"""Remember for which kinds of rows and images the size from headers was equal to that of the full encoding.

A kind is a property that a template may treat in a special way: the columns of a row, the number of its images and
their form (path, URL, bytes), and the format, mode, size class and aspect class of an image. There is one file for each
context (template and settings). A source whose kinds were compared in another source is not compared again.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_vlpack import json_lines
from swift_vlpack.rows.media import content_of

logger = logging.getLogger(__name__)

NUM_PER_KIND = 2
"""Matches needed before a kind is trusted; a single match may be a rounding coincidence."""
_MANY = 3  # rows with this many images or more are one kind
_AGREED, _DIFFERS = b'{"agreed": {', b'{"differs": '  # the beginnings of lines in the file


class Trust:
    """Number of rows of each kind that were found equal, in all sources of the same context."""

    def __init__(self, path: Path | None = None) -> None:
        """Load the numbers saved in the file `path`; without a file nothing is saved."""
        self.path = path
        self.is_revoked = False
        """True if headers of some source were wrong: then only comparisons of this run count."""
        self._remembered: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        try:
            self._take_over(path.read_bytes() if path is not None else b"")
        except (ValueError, RecursionError):
            self._set_aside()
        except OSError:
            pass  # no file yet; if the folder cannot be read, the length cache next to it says so
        # In every source, not only in the one that differed: a rule that was wrong once may be wrong elsewhere.
        if self.is_revoked:
            self._remembered.clear()

    def _take_over(self, content: bytes) -> None:
        """Load saved lines; raises `ValueError` at a line that this class did not write."""
        for line in content.splitlines():
            if _begins(line, _AGREED):
                # Ignore a line that a killed process left unfinished.
                with suppress(json.JSONDecodeError):
                    self._remembered.update(_checked(json.loads(line)["agreed"]))
            elif _begins(line, _DIFFERS):
                self.is_revoked = True
            else:
                raise ValueError

    def _set_aside(self) -> None:
        """Rename a damaged file and trust no kind, because the file may have said that headers are wrong."""
        assert self.path is not None
        self._remembered.clear()
        self.is_revoked = False
        aside = self.path.with_suffix(f".damaged-{os.getpid()}")
        # Several ranks may find the damage at once: one renames the file, and the rename fails on the others.
        with suppress(OSError):
            os.replace(self.path, aside)
            logger.warning(
                "%s, which says of which rows the lengths were checked, is damaged; it is set aside as %s and rows are "
                "checked again",
                self.path, aside.name,
            )  # fmt: skip

    def is_remembered(self, kinds: Iterable[str]) -> bool:
        """Return whether rows of all these kinds were compared at earlier starts or in other sources."""
        kinds = tuple(kinds)
        return bool(kinds) and all(self._remembered[kind] >= NUM_PER_KIND for kind in kinds)

    def remembered(self) -> Counter[str]:
        """Return how many rows were compared before, by kind."""
        return Counter(self._remembered)

    def add(self, kinds: Iterable[str]) -> None:
        """Count a row of these kinds that was compared and is equal."""
        self._new.update(kinds)

    def save(self) -> None:
        """Append to the file what was added since the last save."""
        if self._new:
            self._append({"agreed": dict(self._new)})
            self._new.clear()

    def revoke(self, why: str) -> None:
        """Forget all trust, for every source, because a row was compared and differs."""
        self.is_revoked = True
        self._remembered.clear()
        self._new.clear()
        self._append({"differs": why})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with suppress(OSError):  # the length cache next to it reports the error
                json_lines.append(self.path, [line])


def _begins(line: bytes, start: bytes) -> bool:
    """Return whether a line begins with `start`; a line cut off by a killed process may be shorter than `start`."""
    return line.startswith(start) or start.startswith(line)


def _checked(numbers: Any) -> dict[str, int]:
    """Check numbers of rows by kind that were read from the file; raises `ValueError`."""
    if not isinstance(numbers, dict) or not all(type(number) is int and number > 0 for number in numbers.values()):
        raise ValueError
    return numbers


def kinds_of(row: Mapping[str, Any], length: int, image_kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of a row; its size from headers is trusted if all of them are.

    >>> kinds_of({"messages": [{}], "images": ["a.jpg"], "tools": None}, 400, ["JPEG RGB 2^19 1:1"])
    ('columns images,messages', '1 images as path', 'JPEG RGB 2^19 1:1')
    >>> kinds_of({"messages": [{}], "images": []}, 400, [])
    ('columns messages', 'text 2^9')
    """
    columns = ",".join(sorted(str(name) for name, value in row.items() if _is_given(value)))
    images = row.get("images")
    listed = list(images) if isinstance(images, (list, tuple)) else []
    image_kinds = sorted(set(image_kinds))
    if not image_kinds and not listed:
        return f"columns {columns}", f"text 2^{length.bit_length()}"
    forms = ",".join(sorted({_form(image) for image in listed}))
    return f"columns {columns}", f"{min(len(listed), _MANY)} images as {forms}", *image_kinds


def _is_given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _form(image: Any) -> str:
    image = content_of(image)
    if isinstance(image, str):
        return "url" if image.startswith("http") else "data" if image.startswith("data:") else "path"
    return type(image).__name__
