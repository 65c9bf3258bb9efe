"""What to do about rows that are left out, where they are too many to be an accident.

>>> warning_of_left_out({"underfilled": 10}, num_of=2000)
>>> warning_of_left_out({"oversize": 30, "underfilled": 10}, num_of=2000)
'40 of 2000 rows of the epoch are left out (2.0%): oversize 30 (raise packing_length, or set packing_allow_single_long \
to true), underfilled 10 (set packing_drop_last to false, or lower packing_length)'
"""

from __future__ import annotations

from collections.abc import Mapping

from swift_vlpack.reasons import Reason, about

MAX_SHARE_LEFT_OUT = 0.01
"""Above it an epoch warns."""
NO_REMEDY = "; mend or remove the rows that cannot be read, the log names them"


def warning_of_left_out(num_dropped: Mapping[str, int], *, num_of: int, what: str = "rows") -> str | None:
    """The warning with its remedies; None where next to nothing is left out."""
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
    """Name the option that keeps the remainder of an epoch, where one is left out.

    >>> kept_by({"underfilled": 2}), kept_by({"oversize": 1})
    ('; packing_drop_last=false keeps the underfilled', '')
    """
    return "; packing_drop_last=false keeps the underfilled" if Reason.UNDERFILLED.value in num_dropped else ""
