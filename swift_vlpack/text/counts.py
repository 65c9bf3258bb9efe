"""What happened to the documents of one call, as numbers that survive `datasets.map` in any number of processes.

They are a column of the blocks, one record a block: what belongs to a block is with it, and what is in no block with
the first block of its call. So they add up over blocks, calls and processes, and outlive the process.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from swift_vlpack.reasons import Kind, Reason

logger = logging.getLogger(__name__)

COLUMN = "block_counts"
REASONS = tuple(reason for reason in Reason if reason.about.kind is Kind.DOCUMENT)
OF_A_BLOCK = ("max_length", "documents", "cut_documents", "repeated_tokens", "truncated_documents", "truncated_tokens")
"""`documents` begin in the block; those that go on in another one are `cut_documents` too, where they begin."""
LEFT_OUT = tuple(f"{reason.value}_{what}" for reason in REASONS for what in ("pieces", "tokens"))
NAMES = (*OF_A_BLOCK, "dropped_documents", *LEFT_OUT)


def record(counts: Counter[str]) -> dict[str, int]:
    """The numbers of one block, all names in one order: every call must have the same columns."""
    return {name: counts[name] for name in NAMES}


def left_out(counts: Counter[str], reason: Reason, num_tokens: int, *, is_whole: bool) -> None:
    """Count a document, whole or the rest of one, that is in no block."""
    counts["dropped_documents"] += is_whole
    counts[f"{reason.value}_pieces"] += 1
    counts[f"{reason.value}_tokens"] += num_tokens


def records(blocks: list[Counter[str]], lost: Counter[str]) -> list[dict[str, int]]:
    """The column: what is in no block goes with the first one; where there is none, the log is all that is left."""
    if blocks:
        return [record(blocks[0] + lost), *map(record, blocks[1:])]
    if lost:
        said: dict[str, Any] = {name: count for name, count in lost.items() if count}
        logger.warning("no block is left of these documents, so block_report cannot count them: %s", said)
    return []
