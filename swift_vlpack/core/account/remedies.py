"""What to do about rows that are left out, where they are too many to be an accident.

>>> warning_of_left_out({"underfilled": 10}, num_rows=2000)
>>> warning_of_left_out({"oversize": 30, "underfilled": 10}, num_rows=2000)
'40 of 2000 rows of the epoch are left out (2.0%): oversize 30 (raise packing_length, or set packing_allow_single_long \
to true), underfilled 10 (set packing_drop_last to false, or lower packing_length)'
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_SHARE_LEFT_OUT = 0.01
"""Above it an epoch warns."""
REMEDIES = {
    "oversize": "raise packing_length, or set packing_allow_single_long to true",
    "over_cap": "raise packing_max_images or packing_max_patches, or set packing_allow_single_long to true",
    "over_max_length": "raise max_length, or cut them off with truncation_strategy left or right",
    "underfilled": "set packing_drop_last to false, or lower packing_length",
}
UNREADABLE = "; mend or remove the rows that cannot be read, the log names them"


def warning_of_left_out(num_dropped: Mapping[str, int], *, num_rows: int) -> str | None:
    """The warning with its remedies; None where next to nothing is left out."""
    total = sum(num_dropped.values())
    if total <= MAX_SHARE_LEFT_OUT * num_rows:
        return None
    reasons = (
        f"{reason} {num}" + (f" ({REMEDIES[reason]})" if reason in REMEDIES else "")
        for reason, num in sorted(num_dropped.items())
    )
    are = "is" if total == 1 else "are"
    return f"{total} of {num_rows} rows of the epoch {are} left out ({total / num_rows:.1%}): {', '.join(reasons)}" + (
        "" if set(num_dropped) <= set(REMEDIES) else UNREADABLE
    )
