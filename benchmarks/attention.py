"""The attention `vlpack` against sdpa with a dense mask, on one packed row: seconds of forward and backward.

python benchmarks/attention.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import torch

from swift_vlpack.data.model.attention import segmented_attention

NUM_HEADS, HEAD_DIM = 8, 64
ROWS = ((2048, 6), (4096, 8), (8192, 14), (8192, 40))  # tokens, samples


def segments(num_tokens: int, num_samples: int) -> torch.Tensor:
    """Random boundaries of a full row."""
    cuts = sorted(random.Random(0).sample(range(64, num_tokens - 64), num_samples - 1))
    return torch.tensor([0, *cuts, num_tokens], dtype=torch.int32)


def dense_mask(ends: torch.Tensor) -> torch.Tensor:
    """The L x L mask that keeps samples apart."""
    num_tokens = int(ends[-1])
    number = torch.bucketize(torch.arange(num_tokens), ends[1:], right=True)
    return ((number[:, None] == number[None, :]) & torch.ones(num_tokens, num_tokens).tril().bool())[None, None]


def seconds(work: Callable[[], tuple[torch.Tensor, None]], num_runs: int = 3) -> float:
    """The fastest of a few runs, forward and backward."""
    fastest = float("inf")
    for _ in range(num_runs):
        start = time.perf_counter()
        work()[0].sum().backward()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def main() -> None:
    """Print one line a row."""
    module = torch.nn.Module()
    module.is_causal = True
    print("| tokens | samples | dense mask | `vlpack` | times as fast | mask that is not made |")
    print("|---|---|---|---|---|---|")
    for num_tokens, num_samples in ROWS:
        ends = segments(num_tokens, num_samples)
        shape = (1, NUM_HEADS, num_tokens, HEAD_DIM)
        query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
        mask = dense_mask(ends)
        by_mask = partial(segmented_attention, module, query, key, value, mask)
        by_segment = partial(segmented_attention, module, query, key, value, None, cu_seq_lens_q=ends)
        assert torch.allclose(by_mask()[0], by_segment()[0], atol=1e-4)
        dense, ours = seconds(by_mask), seconds(by_segment)
        megabytes = mask.numel() / 1e6
        print(
            f"| {num_tokens} | {num_samples} | {dense:.2f} s | {ours:.2f} s | {dense / ours:.1f} | {megabytes:.0f} MB |"
        )


if __name__ == "__main__":
    main()
