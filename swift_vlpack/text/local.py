"""Read text files as documents: each is a line, a paragraph or a JSON row. A position is a byte, so resuming seeks."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.text.sources import Document, text_of

DOCUMENTS = LINE, PARAGRAPH, ROW = "line", "paragraph", "row"
_OTHER_FORMATS = {".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_OTHER_FORMATS |= {".gz": "text", ".zst": "text"}
_LIKE_A_FILE = re.compile(r"[^\s<>|]+\.(txt|text|md|jsonl|json|csv|tsv|parquet|arrow|gz|zst)", re.IGNORECASE)
_BOM = b"\xef\xbb\xbf"
_NUM_HEAD_BYTES = 1 << 16
"""Bytes at the beginning of a file that its digest covers: enough to recognize a file, and quick to read."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class LocalText:
    """Read UTF-8 files, one after the other. A blank line is no document, and ends a paragraph.

    Without `document`, each row of a `.jsonl` file is a document, with its text under `text_key`; in any other file,
    each line is.
    """

    can_fetch = True

    def __init__(self, paths: Paths, document: str | None = None, text_key: str = "text") -> None:
        self._paths = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
        if document not in (None, *DOCUMENTS):
            raise ConfigError(f"document must be {LINE!r}, {PARAGRAPH!r} or {ROW!r}, got {document!r}")
        for path in self._paths:
            _check_file(path, document)
        if not self._paths:
            raise DataError("there is no text file to read; give a path")
        self.name = ", ".join(map(str, self._paths))
        if not any(path.stat().st_size for path in self._paths):
            raise DataError(f"there is no document in {self.name}: the file is empty")
        self._documents = [document or (ROW if path.suffix.lower() == ".jsonl" else LINE) for path in self._paths]
        self._text_key = text_key
        self._place = [0, 0]  # file, byte
        self._file: BinaryIO | None = None

    def start(self, epoch: int) -> None:
        """Move to the first document. All epochs are the same."""
        self.load([0, 0])

    def read(self) -> Document | None:
        """Return the next document; None after the last file."""
        while self._place[0] < len(self._paths):
            if self._file is None:
                self._file = self._paths[self._place[0]].open("rb")
                self._file.seek(self._place[1])
            start, lines = _next_document(self._file, self._documents[self._place[0]])
            if lines:
                address = [self._place[0], start]
                text = self._decoded(lines, address)
                self._place[1] = self._file.tell()
                return Document(text, address)
            self.load([self._place[0] + 1, 0])
        return None

    def state(self) -> Any:
        """Return the position: the number of the file, and the byte in it."""
        return list(self._place)

    def load(self, state: Any) -> None:
        """Move to a position returned by `state()`. The next `read` opens the file."""
        self._close()
        self._place = [int(number) for number in state]

    def fetch(self, address: Any) -> str | None:
        """Return the document that begins at an address."""
        with self._paths[address[0]].open("rb") as file:
            file.seek(address[1])
            return self._decoded(_next_document(file, self._documents[address[0]])[1], address)

    def fingerprint(self) -> Any:
        """Return how documents are read, and for every file its size and a digest of its beginning."""
        return [self._documents, self._text_key, [[path.stat().st_size, _digest_of_head(path)] for path in self._paths]]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: each worker of a loader opens the file for itself."""
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            file.close()

    def _decoded(self, lines: list[bytes], address: list[int]) -> str | None:
        # Avoid a second copy of a single line, which may be large.
        content = b"".join(lines) if len(lines) > 1 else lines.pop()
        content = content.removeprefix(_BOM) if address[1] == 0 else content
        where = f"{self._paths[address[0]]}: the document at byte {address[1]}"
        is_row = self._documents[address[0]] == ROW
        try:
            text = content.decode("utf-8")
            row = json.loads(text) if is_row else None
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 ({error.reason}); convert the file") from None
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where} is not JSON ({error.msg}); repair the row, or read lines as they are: local_text(..., "
                f"document={LINE!r})"
            ) from None
        return text_of(row, self._text_key, where) if is_row else text.replace("\r\n", "\n").rstrip("\n")


def _check_file(path: Path, document: str | None) -> None:
    if not path.is_file():
        raise DataError(f"{path}: there is no such text file")
    form = _OTHER_FORMATS.get(path.suffix.lower())
    if form is not None and document is None:
        raise DataError(
            f"{path} is not plain text: give datasets.load_dataset({form!r}, data_files={str(path)!r}, "
            f"split='train'), or its lines as they are: local_text(..., document={LINE!r})"
        )


def paths_in(given: Any) -> list[Any] | None:
    """Return the paths of a source that is one path or a list of paths; None for any other source.

    Texts and file names are both strings. A list whose first string looks like a file name, or names a file, is a list
    of paths. Raises `DataError` if one of them does not exist, because otherwise the file name itself would be trained.
    """
    if isinstance(given, (str, os.PathLike)):
        return [given]
    if type(given) not in (list, tuple) or not given or not _is_path(given[0]):
        return None
    for number, one in enumerate(given, start=1):
        if not _is_path(one):
            raise DataError(f"the list of paths has something else as number {number}: {str(one)[:80]!r}; {_OR_TEXTS}")
        if not Path(one).is_file():
            raise DataError(f"{one}: there is no such text file; {_OR_TEXTS}")
    return list(given)


_OR_TEXTS = "give texts that look like file names as rows: [{'text': ...}]"


def _is_path(one: Any) -> bool:
    if isinstance(one, os.PathLike):
        return True
    return isinstance(one, str) and (_LIKE_A_FILE.fullmatch(one) is not None or os.path.isfile(one))


def local_text(paths: Paths, document: str | None = None, text_key: str = "text") -> LocalText:
    """Return a source of text files for `TextStream`.

    `document` says what a document is: a `line`, a `paragraph` (up to a blank line), or a `row` of JSON. The default is
    `row` for `.jsonl` files, whose text is under `text_key`, and `line` for all others.
    """
    return LocalText(paths, document, text_key)


def _next_document(file: BinaryIO, document: str) -> tuple[int, list[bytes]]:
    """Return (start of the next document, its lines); no lines at the end of the file."""
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
