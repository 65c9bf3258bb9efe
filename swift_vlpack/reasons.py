"""Every reason for which a row is trained in no pack: the words that are counted, and what is to be known of each.

>>> Reason.OVERSIZE == "oversize", about("oversize").kind.value
(True, 'decided by the packer')
>>> is_failure("file_missing"), is_failure("oversize")
(True, False)

docs/reasons.md shows them all, and a test keeps it equal to this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """When a row is left out."""

    PACKER = "decided by the packer"
    ENCODING = "found when the row is encoded"
    LOAD = "found when its pack is loaded"
    LOADER = "deleted by ms-swift's loader"
    CUT = "decided when a row longer than a pack is cut"
    DOCUMENT = "decided when documents become blocks"
    BATCH = "decided when windows become batches"


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What is to be known of a reason."""

    kind: Kind
    meaning: str
    remedy: str = ""
    """What to do about many of them; empty where the rows themselves have to be mended or removed."""
    again: str = ""
    """When a row that could not be encoded is tried again; empty for other kinds."""
    code: int | None = None
    """The number in files of lengths, for what an encoding finds. Files outlive versions: it never changes."""
    is_failure: bool = False
    """Whether the row was to be trained and could not be; many of them stop a run."""
    is_passing: bool = False
    """Whether it is asked again at every start, because what it depends on leaves no trace that could be compared."""
    is_of_pixels: bool = False
    """Whether a row can fail for it although its headers are good."""
    is_of_row: bool = False
    """Whether it neither comes nor goes with a file, so that the row or the options must have changed."""
    is_of_content: bool = False
    """Whether it depends on nothing but the row, its files and the template, so that nothing else can cure it."""


def _unreadable(code: int, meaning: str, again: str, remedy: str = "", **flags: bool) -> About:
    flags = {"is_failure": True, "is_of_pixels": True, **flags}
    return About(kind=Kind.ENCODING, code=code, meaning=meaning, again=again, remedy=remedy, **flags)


_ALLOW = "set packing_allow_single_long to true"
_WHEN_READ = "when what can be read changes"
_WHEN_CHANGED = f"when it changes, or {_WHEN_READ.removeprefix('when ').removesuffix(' changes')}"


class Reason(str, Enum):
    """A word that is counted; the same one in every report, list and log."""

    about: About

    def __new__(cls, word: str, about: About) -> Reason:
        """A text with what is to be known of it."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.about = about
        return made

    # As the word itself on every Python; 3.11 changed what a mixed-in Enum shows.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # positional there, and nobody calls it by name

    OVERSIZE = (
        "oversize",
        About(
            kind=Kind.PACKER,
            meaning="at least `packing_length` tokens, and `packing_allow_single_long` is off",
            remedy=f"raise packing_length, or {_ALLOW}",
        ),
    )
    OVER_CAP = (
        "over_cap",
        About(
            kind=Kind.PACKER,
            meaning="more images or patches than a pack may hold, and `packing_allow_single_long` is off",
            remedy=f"raise packing_max_images or packing_max_patches, or {_ALLOW}",
        ),
    )
    UNDERFILLED = (
        "underfilled",
        About(
            kind=Kind.PACKER,
            meaning="in the last, underfilled pack of an epoch under `packing_drop_last`",
            remedy="set packing_drop_last to false, or lower packing_length",
        ),
    )
    LONGER_THAN_PLANNED = (
        "longer_than_planned",
        About(
            kind=Kind.LOAD,
            meaning="grew since it was measured, and its pack has no room",
            remedy="nothing: the next run plans with its true length",
        ),
    )
    OVERFLOW = (
        "overflow",
        About(
            kind=Kind.CUT,
            meaning="more than `packing_length` tokens, under `packing_overflow=drop`",
            remedy="raise packing_length, or set packing_overflow to split",
        ),
    )
    TRUNCATED = (
        "truncated",
        About(
            kind=Kind.CUT,
            meaning="the rest of a row behind `packing_length` tokens, under `packing_overflow=truncate`",
            remedy="raise packing_length, or set packing_overflow to split",
        ),
    )
    IMAGE_OVER_LENGTH = (
        "image_over_length",
        About(
            kind=Kind.CUT,
            meaning="a single image or video of more than `packing_length` tokens, in a row that is cut",
            remedy="raise packing_length, or lower the pixels of an image (MAX_PIXELS, max_pixels)",
        ),
    )
    CANNOT_BE_CUT = (
        "cannot_be_cut",
        About(
            kind=Kind.CUT,
            meaning="longer than a pack, and which of its tokens are which image is not known for its model family",
            remedy="raise packing_length, or set packing_overflow to keep",
        ),
    )
    DELETED_BY_LOADER = (
        "deleted_by_loader",
        About(
            kind=Kind.LOADER,
            meaning="ms-swift's loader or a `preprocess_func` found nothing usable in the row "
            "(epoch null: no epoch has it; not known for streams)",
        ),
    )
    TOO_SHORT = (
        "too_short",
        About(
            kind=Kind.DOCUMENT,
            meaning="a document, or the rest of one that was cut, of fewer than `min_len` tokens; "
            "in training, a part of fewer than `packing_min_len`",
            remedy="lower min_len (packing_min_len)",
        ),
    )
    TOO_LONG = (
        "too_long",
        About(
            kind=Kind.DOCUMENT,
            meaning="a document of more than `max_len` tokens",
            remedy="raise max_len, or leave it out and have documents cut",
        ),
    )
    EMPTY_DOCUMENT = (
        "empty_document",
        About(kind=Kind.DOCUMENT, meaning="a document that is null, or of which no token is made"),
    )
    INCOMPLETE_BATCH = (
        "incomplete_batch",
        About(
            kind=Kind.BATCH,
            meaning="in the last windows of a stream, too few for a batch, under `drop_last`",
            remedy="set drop_last to False",
        ),
    )
    ENCODE_FAILED = (
        "encode_failed",
        _unreadable(
            1,
            "anything else that the template raised; the log has it",
            f"{_WHEN_READ}; at every start after an error of memory",
        ),
    )
    OVER_MAX_LENGTH = (
        "over_max_length",
        _unreadable(
            2,
            "longer than `max_length` under truncation_strategy `delete`",
            "no",
            "raise max_length, or cut them off with truncation_strategy left or right",
            is_failure=False,
            is_of_pixels=False,
            is_of_row=True,
            is_of_content=True,
        ),
    )
    FILE_MISSING = (
        "file_missing",
        _unreadable(3, "an image or video that is not there", "at every start", is_passing=True),
    )
    FILE_IS_FOLDER = ("file_is_folder", _unreadable(4, "the path is a folder", "when it changes"))
    FILE_EMPTY = ("file_empty", _unreadable(5, "the file has no bytes", "when it changes"))
    IMAGE_UNREADABLE = (
        "image_unreadable",
        _unreadable(6, "no image, a format that Pillow does not know, or broken", _WHEN_CHANGED),
    )
    IMAGE_TOO_LARGE = (
        "image_too_large",
        _unreadable(7, "Pillow takes it for a decompression bomb", "when it changes, or the limit"),
    )
    ASPECT_RATIO = (
        "aspect_ratio",
        _unreadable(8, "over 200 to 1, which Qwen refuses", _WHEN_CHANGED, is_of_pixels=False),
    )
    IMAGES_MALFORMED = (
        "images_malformed",
        _unreadable(9, "an entry of `images` is null, a number, an empty object, a list", _WHEN_READ, is_of_row=True),
    )
    NO_MESSAGES = ("no_messages", _unreadable(10, "a row without messages", _WHEN_READ, is_of_row=True))
    VIDEO_READER_MISSING = (
        "video_reader_missing",
        _unreadable(
            11,
            "nothing is installed that reads videos",
            "at every start",
            "install torchcodec or decord",
            is_passing=True,
        ),
    )
    VIDEO_UNREADABLE = ("video_unreadable", _unreadable(12, "no video, or broken", _WHEN_CHANGED))
    FILE_UNREADABLE = (
        "file_unreadable",
        _unreadable(
            13,
            "a FIFO, a socket, a device (they are not opened), no permission, an error of the disk",
            "at every start",
            is_passing=True,
        ),
    )
    FILE_TIMEOUT = (
        "file_timeout",
        _unreadable(
            14,
            "nothing could be read for 60 seconds, as from a network mount that is gone; "
            "half of it after each such row, at least 2",
            "at every start",
            is_passing=True,
        ),
    )
    URL_UNREACHABLE = (
        "url_unreachable",
        _unreadable(
            15,
            "an image behind a URL that was refused, did not answer within 10 s (`SWIFT_TIMEOUT`), or is not there",
            "60 minutes later",
            is_passing=True,
        ),
    )


def about(word: str) -> About:
    """What is to be known of a reason, by its word."""
    return Reason(word).about  # type: ignore[call-arg]  # mypy takes this for the making of a member


_BY_CODE = {reason.about.code: reason.value for reason in Reason if reason.about.code is not None}
REASONS = ("", *(_BY_CODE[code] for code in sorted(_BY_CODE)))
"""What an encoding finds, each at the place of its code; at 0 that nothing is wrong."""


def is_failure(word: str) -> bool:
    """Whether a row was to be trained and could not be, other than one that is left out for its length."""
    return about(word).is_failure
