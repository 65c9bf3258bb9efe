"""What the log says of the rows of a source that have no length."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from swift_vlpack.reasons import Reason
from swift_vlpack.rows.sizes import LengthIndex
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.urls import NUM_FAILURES, SECONDS_REMEMBERED
from swift_vlpack.words import by_reason, counted

logger = logging.getLogger(__name__)

NUM_WITH_TAGS_NAMED = 5
NUM_FAILURES_NAMED = 20
"""Failing rows that the log names; the count has them all, and so has `left_out.jsonl`."""


def log_surplus_tags(source: RowSource, sizes: LengthIndex) -> None:
    """Name the first rows with more tags than media, and count all."""
    if sizes.surplus_tags:
        first = [str(source.sample_id(index)) for index in sizes.surplus_tags[:NUM_WITH_TAGS_NAMED]]
        logger.warning(
            "source %s: %d of %d rows have more tags (<image>) in their texts than media (images): %s. ms-swift puts "
            "media in place of the first tags and trains the others as these words; so does this run. Give every tag "
            "its medium, or take it out of the text",
            source.name, len(sizes.surplus_tags), len(sizes),
            ", ".join(first) + (", ..." if len(sizes.surplus_tags) > len(first) else ""),
        )  # fmt: skip


def log_failures(source: RowSource, sizes: LengthIndex, memory_of_urls: Path) -> None:
    """Name the first rows that cannot be encoded, and count all by reason."""
    for index in sorted(sizes.failures)[:NUM_FAILURES_NAMED]:
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
            "source %s: %s left out for want of an image behind a URL. Each was asked once, and a host that failed %d "
            "times in a row no more; SWIFT_TIMEOUT gives them more seconds. They are asked again by runs that start %d "
            "minutes later, or when %s is deleted",
            source.name, counted(counts[Reason.URL_UNREACHABLE], "row"), NUM_FAILURES, SECONDS_REMEMBERED // 60,
            memory_of_urls,
        )  # fmt: skip
