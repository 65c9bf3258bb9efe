"""What the proof may take: 2 % of an epoch, or 30 seconds on the slowest rank, whichever is more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swift_vlpack.data.proof.subject import Subject, length_of
from swift_vlpack.data.rows.samples import Encoded

SECONDS_ALLOWED, SHARE_OF_EPOCH = 30.0, 0.02


def affordable(
    subject: Subject, rows: Sequence[Sequence[Encoded]], num_tokens: int, seconds: float, tokens_of_epoch: int
) -> list[Sequence[Encoded]]:
    """The rows of the plan that fit what the proof may take: 2 % of an epoch, or 30 seconds on the slowest rank.

    Up to here it took as much as ten forwards of the pack; a row of the plan takes two and its samples' own attention.
    """
    device = next(subject.model.parameters()).device
    per_token = _slowest(seconds, device) / (10 * num_tokens)
    allowed = max(SECONDS_ALLOWED, SHARE_OF_EPOCH * 3 * per_token * tokens_of_epoch) - 10 * per_token * num_tokens
    kept = []
    for row in rows:
        allowed -= 3 * per_token * sum(map(length_of, row))
        if allowed >= 0:
            kept.append(row)
    return kept


def _slowest(seconds: float, device: torch.device) -> float:
    """On any rank: all have to decide alike."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seconds
    agreed = torch.tensor([seconds], device=device)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
    return float(agreed)
