"""Declare every reason why a row is trained in no pack: the word that is counted, its meaning, and the remedy.

>>> Reason.OVERSIZE == "oversize", about("oversize").kind.value
(True, 'decided by the packer')
>>> is_failure("file_missing"), is_failure("oversize")
(True, False)

Each reason is declared here and nowhere else. Lists, reports, log lines, codes in files and docs/reasons.md are derived
from the declaration. To add a reason, declare it, use it where it is found (`Reason.X`), and run `make docs-tables`;
`tests/test_reasons.py` says what an incomplete declaration lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The stage at which a row is left out."""

    PACKER = "decided by the packer"
    ENCODING = "found when the row is encoded"
    LOAD = "found when its pack is loaded"
    LOADER = "deleted by ms-swift's loader"
    CUT = "decided when a row longer than a pack is cut"
    DOCUMENT = "decided when documents become blocks"
    BATCH = "decided when windows become batches"


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The declaration of a reason."""

    kind: Kind
    meaning: str
    """What happened, for people."""
    remedy: str = ""
    """What to do if many rows have this reason; empty if the rows themselves have to be repaired or removed."""
    code: int | None = None
    """The code in files of lengths, for `Kind.ENCODING`. It never changes, because files outlive versions."""
    part_code: int | None = None
    """The code in files of parts, for the reasons that `plan/parts.py` gives. It never changes either."""
    is_failure: bool = False
    """True if the row should have been trained and could not be. Many such rows stop a run."""
    is_retried: bool = False
    """True to try at every start, because nothing on disk tells whether the cause is gone."""


def _unreadable(code: int, meaning: str, remedy: str = "", *, is_retried: bool = False) -> About:
    """Declare a reason why a row cannot be encoded."""
    return About(kind=Kind.ENCODING, meaning=meaning, remedy=remedy, code=code, is_failure=True, is_retried=is_retried)


_ALLOW = "set packing_allow_single_long to true"


class Reason(str, Enum):
    """A reason: the word that every report, list and log counts, with its declaration in `about`."""

    about: About

    def __new__(cls, word: str, about: About) -> Reason:
        """Make a member that equals its word, so that `Reason.OVERSIZE == "oversize"`."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.about = about
        return made

    # Show the word itself on every Python; 3.11 changed what an Enum with a mixed-in type shows.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # mypy objects to its positional-only argument

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
    UNPACKED_LEAVES_OUT = (
        "unpacked_leaves_out",
        About(
            kind=Kind.PACKER,
            meaning="in no step of un-packed training in this epoch, under `packing_batch=samples`",
            remedy="nothing: other epochs draw it; a number of rows that the ranks divide leaves none out",
        ),
    )
    LONGER_THAN_PLANNED = (
        "longer_than_planned",
        About(
            kind=Kind.LOAD,
            meaning="grew since it was measured, and its pack has no room",
            remedy="nothing: the next run measures a changed file again",
        ),
    )
    OVERFLOW = (
        "overflow",
        About(
            kind=Kind.CUT,
            part_code=1,
            meaning="more than `packing_length` tokens, under `packing_overflow=drop`",
            remedy="raise packing_length, or set packing_overflow to split",
        ),
    )
    TRUNCATED = (
        "truncated",
        About(
            kind=Kind.CUT,
            part_code=2,
            meaning="the rest of a row after `packing_length` tokens, under `packing_overflow=truncate`",
            remedy="raise packing_length, or set packing_overflow to split",
        ),
    )
    IMAGE_OVER_LENGTH = (
        "image_over_length",
        About(
            kind=Kind.CUT,
            part_code=3,
            meaning="a single image or video of more than `packing_length` tokens, in a row that is cut",
            remedy="raise packing_length, or lower the pixels of an image (MAX_PIXELS, max_pixels)",
        ),
    )
    CANNOT_BE_CUT = (
        "cannot_be_cut",
        About(
            kind=Kind.CUT,
            part_code=4,
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
            part_code=5,
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
    ENCODE_FAILED = ("encode_failed", _unreadable(1, "the template raised any other error; the log has it"))
    OVER_MAX_LENGTH = (
        "over_max_length",
        About(
            kind=Kind.ENCODING,
            code=2,
            meaning="longer than `max_length` under truncation_strategy `delete`",
            remedy="raise max_length, or truncate with truncation_strategy left or right",
        ),
    )
    FILE_MISSING = ("file_missing", _unreadable(3, "an image or video that is not there", is_retried=True))
    FILE_IS_FOLDER = ("file_is_folder", _unreadable(4, "the path is a folder"))
    FILE_EMPTY = ("file_empty", _unreadable(5, "the file has no bytes"))
    IMAGE_UNREADABLE = (
        "image_unreadable",
        _unreadable(6, "not an image, in a format that Pillow does not know, or broken"),
    )
    IMAGE_TOO_LARGE = ("image_too_large", _unreadable(7, "Pillow takes it for a decompression bomb"))
    ASPECT_RATIO = (
        "aspect_ratio",
        _unreadable(8, "over 200 to 1, which Qwen refuses, or so thin that nothing is left of it once it is resized"),
    )
    IMAGES_MALFORMED = (
        "images_malformed",
        _unreadable(9, "an entry of `images` is null, a number, an empty object, a list"),
    )
    NO_MESSAGES = ("no_messages", _unreadable(10, "a row without messages"))
    VIDEO_READER_MISSING = (
        "video_reader_missing",
        _unreadable(11, "nothing is installed that reads videos", "install torchcodec or decord", is_retried=True),
    )
    VIDEO_UNREADABLE = ("video_unreadable", _unreadable(12, "not a video, or broken"))
    FILE_UNREADABLE = (
        "file_unreadable",
        _unreadable(
            13,
            "a FIFO, socket or device (these are not opened), no permission, or a disk error",
            is_retried=True,
        ),
    )
    FILE_TIMEOUT = (
        "file_timeout",
        _unreadable(
            14,
            "nothing could be read for 60 seconds, in two tries, as from a network mount that is gone; "
            "each try halves the limit, down to 2 seconds, until a second one succeeds",
            is_retried=True,
        ),
    )
    URL_UNREACHABLE = (
        "url_unreachable",
        _unreadable(
            15,
            "an image whose URL refused, did not answer within 10 s (`SWIFT_TIMEOUT`), was not there within 60 s and "
            "256 MB, or does not exist",
            is_retried=True,
        ),
    )
    MEDIA_TOKENS = (
        "media_tokens",
        _unreadable(
            16,
            "a text with a token that stands for an image or video (`<|image_pad|>`), and no medium for it",
        ),
    )


def about(word: str) -> About:
    """Return the declaration of a reason, by its word. Raises `ValueError` for an unknown word."""
    return Reason(word).about  # type: ignore[call-arg]  # mypy takes the lookup for a constructor


def is_failure(word: str) -> bool:
    """Tell whether a row with this reason should have been trained and could not be, unlike one that is too long."""
    return about(word).is_failure


_BY_CODE = {reason.about.code: reason.value for reason in Reason if reason.about.code is not None}
REASONS = ("", *(_BY_CODE[code] for code in sorted(_BY_CODE)))
"""The reasons why a row cannot be encoded, by their `code`; code 0 means that nothing is wrong."""
_BY_PART_CODE = {reason.about.part_code: reason for reason in Reason if reason.about.part_code is not None}


def part_code_of(reason: Reason | None) -> int:
    """Return the code of a reason in files of parts; 0 for None, a part that is packed.

    >>> part_code_of(Reason.TRUNCATED), part_code_of(None)
    (2, 0)
    """
    if reason is None:
        return 0
    code = reason.about.part_code
    assert code is not None, f"Reason.{reason.name} is given to a part, so reasons.py must declare its part_code"
    return code


def of_part_code(code: int) -> Reason | None:
    """Return the reason for a code in files of parts; None for 0, a part that is packed."""
    return _BY_PART_CODE[code] if code else None


# -- warn if many rows are left out -----------------------------------------------------------------------------------

MAX_SHARE_LEFT_OUT = 0.01
"""Share of left-out rows above which an epoch is warned of."""
NO_REMEDY = "; repair or remove the rows that cannot be read, which the log names"


def warning_of_left_out(num_dropped: Mapping[str, int], *, num_of: int, what: str = "rows") -> str | None:
    """Return a warning with the remedy for each reason; None if at most `MAX_SHARE_LEFT_OUT` is left out.

    >>> warning_of_left_out({"too_long": 10}, num_of=2000)
    >>> warning_of_left_out({"too_short": 40}, num_of=2000)
    '40 of 2000 rows of the epoch are left out (2.0%): too_short 40 (lower min_len (packing_min_len))'
    """
    total = sum(num_dropped.values())
    if total <= MAX_SHARE_LEFT_OUT * num_of:
        return None
    remedies = {word: about(word).remedy for word in num_dropped}
    reasons = (
        f"{word} {num}" + (f" ({remedies[word]})" if remedies[word] else "")
        for word, num in sorted(num_dropped.items())
    )
    are = "is" if total == 1 else "are"
    return f"{total} of {num_of} {what} of the epoch {are} left out ({total / num_of:.1%}): {', '.join(reasons)}" + (
        "" if all(remedies.values()) else NO_REMEDY
    )


def kept_by(num_dropped: Mapping[str, int]) -> str:
    """Return a hint that names the option to keep an underfilled last pack; empty if none was left out.

    >>> kept_by({"underfilled": 2}), kept_by({"oversize": 1})
    ('; packing_drop_last=false keeps the underfilled', '')
    """
    return "; packing_drop_last=false keeps the underfilled" if Reason.UNDERFILLED.value in num_dropped else ""
