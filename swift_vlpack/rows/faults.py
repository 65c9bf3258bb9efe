"""Find out why a row cannot be used: the reason that is counted, a sentence for people, and the files at fault.

>>> row = {"messages": [{"role": "user", "content": "<image>"}], "images": ["/nowhere/a.jpg"]}
>>> fault_of(ValueError("cannot identify image"), row)[:2]
(<Reason.FILE_MISSING: 'file_missing'>, 'no such file: /nowhere/a.jpg')
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import traceback
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from io import BytesIO
from typing import Any, NamedTuple

from PIL import Image

from swift_vlpack.reasons import Reason
from swift_vlpack.rows.media import (
    Medium,
    RealFile,
    content_of,
    expected_file,
    is_encoded,
    is_name,
    looks_like_path,
    media,
    real_file,
)

_BY_ERROR = {
    "MaxLengthError": Reason.OVER_MAX_LENGTH,
    "FileNotFoundError": Reason.FILE_MISSING,
    "IsADirectoryError": Reason.FILE_IS_FOLDER,
    "UnidentifiedImageError": Reason.IMAGE_UNREADABLE,
    "DecompressionBombError": Reason.IMAGE_TOO_LARGE,
    "ReadTimeout": Reason.FILE_TIMEOUT,
    "UrlUnreachable": Reason.URL_UNREACHABLE,
    "NoPatch": Reason.ASPECT_RATIO,
    "UnfilledToken": Reason.MEDIA_TOKENS,
}
RETRIED = {
    Reason.FILE_MISSING,
    Reason.VIDEO_READER_MISSING,
    Reason.FILE_UNREADABLE,
    Reason.FILE_TIMEOUT,
    Reason.URL_UNREACHABLE,
}
"""Reasons that are tried at every start, because nothing on disk tells whether the cause is gone."""
_SAID_OF_NO_PATCH = "height and width must be > 0"  # by Pillow, of an image that is resized to nothing
_VIDEO_READERS = ("torchcodec", "decord")  # if both fail, qwen_vl_utils asks torchvision, which reads no videos
_LONGEST_SHOWN = 200  # characters
_LONGEST_ERROR = 2000  # characters
_DATA_URL = re.compile(r"data:(.+?);base64,(.+)", re.DOTALL)
_IN_MEMORY = re.compile(r"<_io\.BytesIO object at 0x[0-9a-f]+>")


class Fault(NamedTuple):
    """Why a row cannot be used."""

    reason: str
    """A reason of `reasons.py`, which is counted."""
    error: str
    """The failure in words, and the way out if it is known."""
    files: tuple[str, ...] = ()
    """Full paths of the files at fault; all files of the row if it is unknown which one failed."""


class ReadTimeout(OSError):
    """Reading a file took too long and was given up (`watch.py`)."""


class NotAFile(OSError):
    """A row names a FIFO, socket or device. Opening it would wait forever."""


def check_openable(row: Mapping[str, Any]) -> None:
    """Raise `NotAFile` if a row names a FIFO, a socket or a device. Call it before the row is encoded."""
    names = (medium.value for medium in media(row) if medium.kind != "tag" and isinstance(medium.value, str))
    for found in filter(None, map(real_file, names)):
        if stat.S_IFMT(found.state.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise NotAFile(f"{found.path} is no regular file")


def fault_of(error: Exception, row: Mapping[str, Any]) -> Fault:
    """Find out why a row failed, from the error and from the row's files.

    The files are checked before the error is believed, because a missing file leads to many different errors. For
    example, one path in four has a length that base64 text can have, and ms-swift decodes such a path itself.
    """
    said = _said(error)
    # Look up the name of the error's class, so that no library has to be imported for its error classes.
    known = _BY_ERROR.get(type(error).__name__)
    # A row that is too long, or whose media were read and do not fit its text, needs no check of its files.
    if known in (Reason.OVER_MAX_LENGTH, Reason.MEDIA_TOKENS):
        return Fault(known, said)
    # Return before the files are checked: that would wait for the same disk again.
    if known == Reason.FILE_TIMEOUT:
        return timeout_of(str(error), row)
    if is_encoded(row):
        return Fault(known or Reason.ENCODE_FAILED, said)
    if not row.get("messages"):
        return Fault(Reason.NO_MESSAGES, said)
    found = list(media(row))
    is_video = any(medium.kind == "video" for medium in found) and _is_missing_reader(error)
    if is_video and not any(map(find_spec, _VIDEO_READERS)):
        said = f"{said}; to read videos, install torchcodec or decord"
        return _with_files(Reason.VIDEO_READER_MISSING, said, _videos(found))
    if malformed := [item for item in _as_list(row.get("images")) if not _is_image(item)]:
        entries = f"not a path, a URL or the content of an image: {malformed!r:.{_LONGEST_SHOWN}}"
        return Fault(Reason.IMAGES_MALFORMED, f"{said}; {entries}")
    if fault := _fault_of_files(found):
        return fault
    texts = (message.get("content") for message in row["messages"] if isinstance(message, Mapping))
    if numbers := [text for text in texts if isinstance(text, (int, float))]:  # as of a column of a .csv file
        said = f"{said}; a message is the number {numbers[0]!r}, not a text: write a .jsonl file, with it in quotes"
        return Fault(Reason.ENCODE_FAILED, said)
    if is_video:
        return _with_files(Reason.VIDEO_UNREADABLE, said, _videos(found))
    return _fault_of_content(error, known, found)


def fault_of_reading(error: Exception) -> Fault:
    """Find out why a data set of one's own could not give a row, of which nothing else is known."""
    return Fault(_BY_ERROR.get(type(error).__name__, Reason.ENCODE_FAILED), _said(error))


def timeout_of(said: str, row: Mapping[str, Any]) -> Fault:
    """Return the fault of a row whose reads were abandoned. Does not touch its files, because that might wait again."""
    values = [medium.value for medium in media(row) if isinstance(medium.value, str)]
    files = [expected_file(value) for value in values if is_name(value)]
    return _with_files(Reason.FILE_TIMEOUT, said, tuple(dict.fromkeys(files)))


def is_lasting(error: Exception, reason: str, row: Mapping[str, Any]) -> bool:
    """Tell whether an unchanged row will fail again, so that the failure may be cached."""
    if reason == Reason.OVER_MAX_LENGTH:
        return True
    if reason in RETRIED or isinstance(error, MemoryError):
        return False
    # A network that failed once may answer the next time.
    if any(isinstance(medium.value, str) and medium.value.startswith("http") for medium in media(row)):
        return False
    if not isinstance(error, OSError) or type(error).__name__ in _BY_ERROR:
        return True
    # An OSError of Pillow's about the content has no errno; an error of the disk has one, and may pass.
    return reason == Reason.IMAGE_UNREADABLE and error.errno is None


def _fault_of_files(found: Iterable[Medium]) -> Fault | None:
    """Check whether files are missing, folders, not regular files, or empty. Returns None if all are fine.

    Otherwise returns the fault of the first such file, with all files that have the same fault.
    """
    faults = [(medium, fault) for medium in found if (fault := _fault_of_file(medium)) is not None]
    if not faults:
        return None
    first = faults[0][1]
    paths = [path for _, fault in faults for path in fault.files if fault.reason == first.reason]
    return first._replace(files=tuple(dict.fromkeys(paths)))


def _fault_of_file(medium: Medium) -> Fault | None:
    if medium.kind == "tag" or not looks_like_path(medium.value):
        return None
    found = real_file(medium.value)
    if found is None:
        path = expected_file(medium.value)
        given = "" if path == medium.value else f" ({medium.place} is {medium.value!r}{_root()})"
        return Fault(Reason.FILE_MISSING, f"no such file: {path}{given}", (path,))
    path = os.path.abspath(found.path)
    if (mode := stat.S_IFMT(found.state.st_mode)) == stat.S_IFDIR:
        return Fault(Reason.FILE_IS_FOLDER, f"{path} is a folder", (path,))
    if mode != stat.S_IFREG:
        return Fault(Reason.FILE_UNREADABLE, f"{path} is no regular file, and is not opened", (path,))
    return Fault(Reason.FILE_EMPTY, f"{path} is empty", (path,)) if found.state.st_size == 0 else None


def _root() -> str:
    folder = os.environ.get("ROOT_IMAGE_DIR")
    return f", ROOT_IMAGE_DIR {folder}" if folder else ""


def _fault_of_content(error: Exception, known: str | None, found: list[Medium]) -> Fault:
    """Return the fault of an image that cannot be read, or, if there is none, a fault made of the error."""
    reason, files, said = known or Reason.ENCODE_FAILED, _paths(found), _said(error)
    if known is None and ("aspect ratio" in str(error) or _SAID_OF_NO_PATCH in str(error)):
        reason = Reason.ASPECT_RATIO
    elif known is None and _is_of_disk(error):
        reason = Reason.FILE_UNREADABLE
    elif known is None and (_is_from_pillow(error) or isinstance(error, binascii.Error)):
        reason = Reason.IMAGE_UNREADABLE
    if reason in (Reason.IMAGE_UNREADABLE, Reason.IMAGE_TOO_LARGE, Reason.FILE_UNREADABLE):
        # The error does not tell which of several images failed, so read each of them again.
        bad = [(medium, cause) for medium in found if (cause := _error_of_image(medium)) is not None]
        if bad:
            medium, cause = bad[0]
            return Fault(reason, _named(cause, medium), _paths(medium for medium, _ in bad))
    return _with_files(reason, said, files)


def _with_files(reason: str, said: str, files: tuple[str, ...]) -> Fault:
    unsaid = [file for file in files if file not in said]
    return Fault(reason, f"{said} (files: {', '.join(unsaid)})" if unsaid else said, files)


def _error_of_image(medium: Medium) -> Exception | None:
    """Read an image as ms-swift does. Returns the error; None if the image can be read."""
    if medium.kind not in ("image", "tag") or str(medium.value).startswith("http"):
        return None
    try:
        content = _content(medium.value)
        if content is not None:
            with Image.open(BytesIO(content)) as image:
                image.load()
    except Exception as error:
        return error
    return None


def _content(value: Any) -> bytes | None:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        return None
    if (found := real_file(value)) is not None:
        with open(found.path, "rb") as file:
            return file.read()
    match = _DATA_URL.match(value.strip())
    return base64.b64decode(match.group(2) if match else value)


def _named(error: Exception, medium: Medium) -> str:
    """Return the error in words, with the image's path in place of the buffer that Pillow names."""
    paths = _paths([medium])
    name = paths[0] if paths else f"the content of {medium.place}"
    # Replace the address of the buffer: it says nothing to a reader, and would make equal messages differ.
    said = _IN_MEMORY.sub(name, _said(error))
    return said if name in said else f"{said} ({name})"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def _paths(found: Iterable[Medium]) -> tuple[str, ...]:
    """Return the full paths of the files that exist or were looked for, each once."""

    def paths() -> Iterator[str]:
        for medium in found:
            if looks_like_path(medium.value):
                there: RealFile | None = real_file(medium.value)
                yield expected_file(medium.value) if there is None else os.path.abspath(there.path)

    return tuple(dict.fromkeys(paths()))


def _videos(found: Iterable[Medium]) -> tuple[str, ...]:
    return _paths(medium for medium in found if medium.kind == "video")


def _is_missing_reader(error: Exception) -> bool:
    return isinstance(error, ImportError) or (isinstance(error, AttributeError) and "read_video" in str(error))


def _is_of_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno is not None


def _is_from_pillow(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("PIL.") for frame, _ in frames)


def _is_image(item: Any) -> bool:
    """Tell whether an entry of `images` can be an image: a path, URL, bytes, or one of Pillow's images."""
    item = content_of(item)
    return (isinstance(item, (str, bytes)) and bool(item)) or hasattr(item, "getbbox")


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]
