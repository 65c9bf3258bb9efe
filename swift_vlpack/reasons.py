"""Declare every reason why a row is trained in no pack: the word that is counted, its meaning, and the remedy.

>>> Reason.OVERSIZE == "oversize", Reason.OVERSIZE.kind.value
(True, 'decided by the packer')
>>> is_failure("file_missing"), is_failure("oversize")
(True, False)

Each reason is declared here and nowhere else. Lists, reports, log lines, codes in files and docs/reasons.md are derived
from the declaration. To add a reason, declare it, use it where it is found (`Reason.X`), and run `make docs-tables`;
`tests/test_reasons.py` says what an incomplete declaration lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class Reason(str, Enum):
    """A reason: the word that every report, list and log counts, with its declaration as attributes."""

    kind: Kind
    meaning: str
    """What happened, for people."""
    remedy: str
    """What to do if many rows have this reason; empty if the rows themselves have to be repaired or removed."""

    def __new__(cls, word: str, kind: Kind, meaning: str, remedy: str = "") -> Reason:
        """Make a member that equals its word, so that `Reason.OVERSIZE == "oversize"`."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.kind, made.meaning, made.remedy = kind, meaning, remedy
        return made

    # Show the word itself on every Python; 3.11 changed what an Enum with a mixed-in type shows.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # mypy objects to its positional-only argument

    OVERSIZE = (
        "oversize",
        Kind.PACKER,
        "at least `packing_length` tokens, and `packing_allow_single_long` is off",
        "raise packing_length, or set packing_allow_single_long to true",
    )
    OVER_CAP = (
        "over_cap",
        Kind.PACKER,
        "more images or patches than a pack may hold, and `packing_allow_single_long` is off",
        "raise packing_max_images or packing_max_patches, or set packing_allow_single_long to true",
    )
    UNDERFILLED = (
        "underfilled",
        Kind.PACKER,
        "in the last, underfilled pack of an epoch under `packing_drop_last`",
        "set packing_drop_last to false, or lower packing_length",
    )
    UNPACKED_LEAVES_OUT = (
        "unpacked_leaves_out",
        Kind.PACKER,
        "in no step of un-packed training in this epoch, under `packing_batch=samples`",
        "nothing: other epochs draw it; a number of rows that the ranks divide leaves none out",
    )
    LONGER_THAN_PLANNED = (
        "longer_than_planned",
        Kind.LOAD,
        "grew since it was measured, and its pack has no room",
        "nothing: the next run measures a changed file again",
    )
    OVERFLOW = (
        "overflow",
        Kind.CUT,
        "more than `packing_length` tokens, under `packing_overflow=drop`",
        "raise packing_length, or set packing_overflow to split",
    )
    TRUNCATED = (
        "truncated",
        Kind.CUT,
        "the rest of a row after `packing_length` tokens, under `packing_overflow=truncate`",
        "raise packing_length, or set packing_overflow to split",
    )
    IMAGE_OVER_LENGTH = (
        "image_over_length",
        Kind.CUT,
        "a single image or video of more than `packing_length` tokens, in a row that is cut",
        "raise packing_length, or lower the pixels of an image (MAX_PIXELS, max_pixels)",
    )
    CANNOT_BE_CUT = (
        "cannot_be_cut",
        Kind.CUT,
        "longer than a pack, and which of its tokens are which image is not known for its model family",
        "raise packing_length, or set packing_overflow to keep",
    )
    DELETED_BY_LOADER = (
        "deleted_by_loader",
        Kind.LOADER,
        "ms-swift's loader or a `preprocess_func` found nothing usable in the row (epoch null: no epoch has it; not "
        "known for streams)",
    )
    TOO_SHORT = (
        "too_short",
        Kind.DOCUMENT,
        "a document, or the rest of one that was cut, of fewer than `min_len` tokens; in training, a part of fewer "
        "than `packing_min_len`",
        "lower min_len (packing_min_len)",
    )
    TOO_LONG = (
        "too_long",
        Kind.DOCUMENT,
        "a document of more than `max_len` tokens",
        "raise max_len, or leave it out and have documents cut",
    )
    EMPTY_DOCUMENT = ("empty_document", Kind.DOCUMENT, "a document that is null, or of which no token is made")
    INCOMPLETE_BATCH = (
        "incomplete_batch",
        Kind.BATCH,
        "in the last windows of a stream, too few for a batch, under `drop_last`",
        "set drop_last to False",
    )
    ENCODE_FAILED = ("encode_failed", Kind.ENCODING, "the template raised any other error; the log has it")
    OVER_MAX_LENGTH = (
        "over_max_length",
        Kind.ENCODING,
        "longer than `max_length` under truncation_strategy `delete`",
        "raise max_length, or truncate with truncation_strategy left or right",
    )
    FILE_MISSING = ("file_missing", Kind.ENCODING, "an image or video that is not there")
    FILE_IS_FOLDER = ("file_is_folder", Kind.ENCODING, "the path is a folder")
    FILE_EMPTY = ("file_empty", Kind.ENCODING, "the file has no bytes")
    IMAGE_UNREADABLE = (
        "image_unreadable",
        Kind.ENCODING,
        "not an image, in a format that Pillow does not know, or broken",
    )
    IMAGE_TOO_LARGE = ("image_too_large", Kind.ENCODING, "Pillow takes it for a decompression bomb")
    ASPECT_RATIO = (
        "aspect_ratio",
        Kind.ENCODING,
        "over 200 to 1, which Qwen refuses, or so thin that nothing is left of it once it is resized",
    )
    IMAGES_MALFORMED = (
        "images_malformed",
        Kind.ENCODING,
        "an entry of `images` is null, a number, an empty object, a list",
    )
    NO_MESSAGES = ("no_messages", Kind.ENCODING, "a row without messages")
    VIDEO_READER_MISSING = (
        "video_reader_missing",
        Kind.ENCODING,
        "nothing is installed that reads videos",
        "install torchcodec or decord",
    )
    VIDEO_UNREADABLE = ("video_unreadable", Kind.ENCODING, "not a video, or broken")
    FILE_UNREADABLE = (
        "file_unreadable",
        Kind.ENCODING,
        "a FIFO, socket or device (these are not opened), no permission, or a disk error",
    )
    FILE_TIMEOUT = (
        "file_timeout",
        Kind.ENCODING,
        "nothing could be read for 60 seconds, in two tries, as from a network mount that is gone; each try halves "
        "the limit, down to 2 seconds, until a second one succeeds",
    )
    URL_UNREACHABLE = (
        "url_unreachable",
        Kind.ENCODING,
        "an image whose URL refused, did not answer within 10 s (`SWIFT_TIMEOUT`), was not there within 60 s and 256 "
        "MB, or does not exist",
    )
    MEDIA_TOKENS = (
        "media_tokens",
        Kind.ENCODING,
        "a text with a token that stands for an image or video (`<|image_pad|>`), and no medium for it",
    )


REASONS = (
    "",
    Reason.ENCODE_FAILED.value,
    Reason.OVER_MAX_LENGTH.value,
    Reason.FILE_MISSING.value,
    Reason.FILE_IS_FOLDER.value,
    Reason.FILE_EMPTY.value,
    Reason.IMAGE_UNREADABLE.value,
    Reason.IMAGE_TOO_LARGE.value,
    Reason.ASPECT_RATIO.value,
    Reason.IMAGES_MALFORMED.value,
    Reason.NO_MESSAGES.value,
    Reason.VIDEO_READER_MISSING.value,
    Reason.VIDEO_UNREADABLE.value,
    Reason.FILE_UNREADABLE.value,
    Reason.FILE_TIMEOUT.value,
    Reason.URL_UNREACHABLE.value,
    Reason.MEDIA_TOKENS.value,
)
"""The reasons why a row cannot be encoded, by their codes in files of lengths; 0 means that nothing is wrong.

A code never changes, because files outlive versions; so a new reason comes last.
"""


def about(word: str) -> Reason:
    """Return the reason of a word. Raises `ValueError` for an unknown word."""
    return Reason(word)  # type: ignore[call-arg]  # mypy takes the lookup for a constructor


def is_failure(word: str) -> bool:
    """Tell whether a row with this reason should have been trained and could not be, unlike one that is too long."""
    reason = about(word)
    return reason.kind is Kind.ENCODING and reason is not Reason.OVER_MAX_LENGTH


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
