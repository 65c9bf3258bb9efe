"""Log the rows that cannot be encoded, and those with more tags than media."""

from __future__ import annotations

import logging
from collections import Counter

from swift_vlpack.reasons import Reason
from swift_vlpack.rows.sizes import LengthIndex
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.urls import BYTES_FOR_ALL, NUM_FAILURES, SECONDS_FOR_ALL
from swift_vlpack.words import by_reason, counted

logger = logging.getLogger(__name__)

NUM_FAILURES_NAMED = 20
"""Most failed rows of a source that the log names. The log counts all of them, and `left_out.jsonl` lists all."""
NUM_WITH_TAGS_NAMED = 5
"""Most rows with surplus tags that the log names."""


# -- log --------------------------------------------------------------------------------------------------------------


def log_failures(source: RowSource, sizes: LengthIndex) -> None:
    """Log the first rows that cannot be encoded, and the number of all by reason."""
    for index in sorted(sizes.failures, key=source.row_number)[:NUM_FAILURES_NAMED]:
        fault = sizes.fault(index)
        logger.warning("%s: left out: %s: %s", source.sample_id(index), fault.reason, fault.error)
    counts = Counter(sizes.failures.values())
    if counts:
        logger.warning(
            "source %s: %d of %d rows cannot be encoded: %s",
            source.name, counts.total(), len(sizes), by_reason(counts),
        )  # fmt: skip
    if counts[Reason.URL_UNREACHABLE]:
        logger.warning(
            "source %s: %s left out, because an image behind a URL could not be fetched. Each URL was tried once, for "
            "%d seconds and %d MB at most, and no URL of a host after it failed %d times in a row; SWIFT_TIMEOUT sets "
            "how many seconds to wait for an answer. The next start tries them again",
            source.name, counted(counts[Reason.URL_UNREACHABLE], "row"), SECONDS_FOR_ALL, BYTES_FOR_ALL >> 20,
            NUM_FAILURES,
        )  # fmt: skip


def log_surplus_tags(source: RowSource, sizes: LengthIndex) -> None:
    """Log the first rows with more tags than media, and the number of all."""
    if sizes.surplus_tags:
        first = [str(source.sample_id(index)) for index in sizes.surplus_tags[:NUM_WITH_TAGS_NAMED]]
        logger.warning(
            "source %s: %d of %d rows have more tags (<image>) in their texts than media (images): %s. ms-swift puts "
            "media in place of the first tags and trains the other tags as plain words; so does this run. Give every "
            "tag its medium, or remove it from the text",
            source.name, len(sizes.surplus_tags), len(sizes),
            ", ".join(first) + (", ..." if len(sizes.surplus_tags) > len(first) else ""),
        )  # fmt: skip
