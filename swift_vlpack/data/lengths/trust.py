"""Trust in image headers: the kinds of rows and images whose sizes were found equal to those of the full encoding.

A kind is what a template may treat in a way of its own: the columns of a row, how many images it has and in what form,
and of an image its format, mode, size class and aspect class. Trust is kept in one file for each context (template and
settings), so that a source whose kinds were compared in another one is not compared again.
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

from swift_vlpack.core import json_lines
from swift_vlpack.data.rows.media import content_of

logger = logging.getLogger(__name__)

NUM_PER_KIND = 2
"""Rows of a kind that have to agree: one may be right by luck, of a size that a wrong rule rounds as the right one."""
_MANY = 3  # images of a row: so many or more are one kind
_AGREED, _DIFFERS = b'{"agreed": {', b'{"differs": '  # how lines begin


class Trust:
    """How many rows of each kind were found equal, here and in other sources of the same context."""

    def __init__(self, path: Path | None = None) -> None:
        """`path` is the file that remembers it; without one it ends with this object."""
        self.path = path
        self.is_revoked = False
        """Whether a source was found to differ: then nothing but what this run compares is believed."""
        self._remembered: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        try:
            self._take_over(path.read_bytes() if path is not None else b"")
        except (ValueError, RecursionError):
            self._set_aside()
        except OSError:
            pass  # there is none, or the cache of lengths, which is beside it, says why
        # Not only of the source that differs: a rule that was wrong once is doubted everywhere.
        if self.is_revoked:
            self._remembered.clear()

    def _take_over(self, content: bytes) -> None:
        """Read what is remembered; raises `ValueError` where a line is none of ours."""
        for line in content.splitlines():
            if _begins(line, _AGREED):
                # A line that a killed process left unfinished says nothing.
                with suppress(json.JSONDecodeError):
                    self._remembered.update(_checked(json.loads(line)["agreed"]))
            elif _begins(line, _DIFFERS):
                self.is_revoked = True
            else:
                raise ValueError

    def _set_aside(self) -> None:
        """Begin anew without the file, which may have said that headers are wrong."""
        assert self.path is not None
        self._remembered.clear()
        self.is_revoked = False
        aside = self.path.with_suffix(f".damaged-{os.getpid()}")
        # Of ranks that find the damage at once one sets it aside.
        with suppress(OSError):
            os.replace(self.path, aside)
            logger.warning(
                "%s, which says of which rows the lengths were checked, is damaged; it is set aside as %s and rows are "
                "checked again",
                self.path, aside.name,
            )  # fmt: skip

    def is_remembered(self, kinds: Iterable[str]) -> bool:
        """Whether rows of all these kinds were compared at earlier starts or in other sources."""
        kinds = tuple(kinds)
        return bool(kinds) and all(self._remembered[kind] >= NUM_PER_KIND for kind in kinds)

    def remembered(self) -> Counter[str]:
        """Rows compared before, by kind."""
        return Counter(self._remembered)

    def add(self, kinds: Iterable[str]) -> None:
        """A row of these kinds was compared and is equal."""
        self._new.update(kinds)

    def save(self) -> None:
        """Write down what was added."""
        if self._new:
            self._append({"agreed": dict(self._new)})
            self._new.clear()

    def revoke(self, why: str) -> None:
        """A row was compared and differs: forget all, for every source."""
        self.is_revoked = True
        self._remembered.clear()
        self._new.clear()
        self._append({"differs": why})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with suppress(OSError):  # the cache of lengths, which is beside it, says so
                json_lines.append(self.path, [line])


def _begins(line: bytes, start: bytes) -> bool:
    """Whether a line, or what a killed process left of it, begins so."""
    return line.startswith(start) or start.startswith(line)


def _checked(numbers: Any) -> dict[str, int]:
    """Numbers of rows by kind, as they were written."""
    if not isinstance(numbers, dict) or not all(type(number) is int and number > 0 for number in numbers.values()):
        raise ValueError
    return numbers


def kinds_of(row: Mapping[str, Any], length: int, image_kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds of a row, each of which has to be trusted.

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
