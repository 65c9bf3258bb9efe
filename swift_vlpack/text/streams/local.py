"""Text files as documents, one a line or one a paragraph; the place in a file is a byte, so nothing is read twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from swift_vlpack.core.errors import ConfigError, DataError
from swift_vlpack.text.streams.sources import Document

LINE, PARAGRAPH = "line", "paragraph"
_BOM = b"\xef\xbb\xbf"
_NUM_HEAD_BYTES = 1 << 16  # enough to know a file again, and read in no time

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class LocalText:
    """UTF-8 files, one after the other. Blank lines are no documents; a paragraph ends with one."""

    can_fetch = True

    def __init__(self, paths: Paths, document: str = LINE) -> None:
        self._paths = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
        if document not in (LINE, PARAGRAPH):
            raise ConfigError(f"document must be {LINE!r} or {PARAGRAPH!r}, got {document!r}")
        for path in self._paths:
            if not path.is_file():
                raise DataError(f"{path}: there is no such text file")
        if not self._paths:
            raise DataError("there is no text file to read; give a path")
        self.name = ", ".join(map(str, self._paths))
        self._document = document
        self._place = [0, 0]  # file, byte
        self._file: BinaryIO | None = None

    def start(self, epoch: int) -> None:
        """All epochs are the same."""
        self.load([0, 0])

    def read(self) -> Document | None:
        """The document at the cursor, or the first one behind it."""
        while self._place[0] < len(self._paths):
            if self._file is None:
                self._file = self._paths[self._place[0]].open("rb")
                self._file.seek(self._place[1])
            start, lines = _next_document(self._file, self._document)
            if lines:
                address = [self._place[0], start]
                text = self._decoded(lines, address)
                self._place[1] = self._file.tell()
                return Document(text, address)
            self.load([self._place[0] + 1, 0])
        return None

    def state(self) -> Any:
        """File and byte."""
        return list(self._place)

    def load(self, state: Any) -> None:
        """Go there; the file is opened when it is read."""
        self._close()
        self._place = [int(number) for number in state]

    def fetch(self, address: Any) -> str | None:
        """The document that begins there."""
        with self._paths[address[0]].open("rb") as file:
            file.seek(address[1])
            return self._decoded(_next_document(file, self._document)[1], address)

    def fingerprint(self) -> Any:
        """Length and beginning of every file."""
        return [self._document, [[path.stat().st_size, _digest_of_head(path)] for path in self._paths]]

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            file.close()

    def _decoded(self, lines: list[bytes], address: list[int]) -> str:
        content = b"".join(lines)
        content = content.removeprefix(_BOM) if address[1] == 0 else content
        try:
            return content.decode("utf-8").replace("\r\n", "\n").rstrip("\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._paths[address[0]]}: the document at byte {address[1]} is no UTF-8 ({error.reason}); convert it"
            ) from None


def local_text(paths: Paths, document: str = LINE) -> LocalText:
    """Text files for `TextStream`; `document` says whether one is a `line` or a `paragraph` between blank lines."""
    return LocalText(paths, document)


def _next_document(file: BinaryIO, document: str) -> tuple[int, list[bytes]]:
    """Where the next document starts, and its lines; none at the end of the file."""
    start = file.tell()
    while (line := file.readline()) and not line.removeprefix(_BOM).strip():
        start = file.tell()
    lines = [line] if line else []
    while document == PARAGRAPH and line and (line := file.readline()).strip():
        lines.append(line)
    return start, lines


def _digest_of_head(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(_NUM_HEAD_BYTES)).hexdigest()[:16]
