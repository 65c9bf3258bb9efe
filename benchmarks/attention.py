"""Attention of one packed sequence, forward and backward: the kernels that run here against sdpa with a dense mask.

OMP_NUM_THREADS=1 python benchmarks/attention.py

Seconds of the processor, which others that share the machine change less than those of the clock.
"""

from __future__ import annotations

import random
from dataclasses import replace
from time import process_time

import torch

from swift_vlpack.attention.choose_kernel import largest_gap, results
from swift_vlpack.attention.kernels import KERNELS, CannotDo, Kernel
from swift_vlpack.attention.masks import sequence_mask
from swift_vlpack.attention.packed_sequence import AttentionArgs, PackedSequence

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
ROWS = ((2048, 6), (2048, 60), (4096, 8), (4096, 60), (8192, 40))  # tokens, samples


class Layer(torch.nn.Module):
    """What an attention layer tells of itself."""

    num_key_value_groups = NUM_HEADS // NUM_KV_HEADS
    is_causal = True


def sequence_of(num_tokens: int, num_samples: int) -> PackedSequence:
    """Random boundaries of a full sequence, no sample shorter than 8 tokens."""
    cuts = random.Random(0).sample(range(1, num_tokens // 8), num_samples - 1)
    return sequence_with((0, *sorted(8 * cut for cut in cuts), num_tokens))


def sequence_with(ends: tuple[int, ...]) -> PackedSequence:
    """Random numbers for samples with these boundaries."""
    num_tokens = ends[-1]
    query, key, value = (
        torch.randn(1, heads, num_tokens, HEAD_DIM, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    return PackedSequence(
        Layer(), query, key, value, sequence_mask(1, num_tokens, num_tokens), None, AttentionArgs(), ends
    )


def dense(sequence: PackedSequence) -> torch.Tensor:
    """One call of sdpa with the L x L mask that keeps samples apart."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    made: torch.Tensor = sdpa_attention_forward(
        sequence.module, sequence.query, sequence.key, sequence.value, dense_mask(sequence.ends)
    )[0]
    return made


def dense_mask(ends: tuple[int, ...]) -> torch.Tensor:
    """The same sample, and not behind."""
    place = torch.arange(ends[-1])
    number = torch.bucketize(place, torch.tensor(ends[1:]), right=True)
    return ((number[:, None] == number[None, :]) & (place[:, None] >= place[None, :]))[None, None]


def shown(sequence: PackedSequence, name: str, seconds_of_dense: float) -> str:
    """Milliseconds, and how many times as fast as the dense mask."""
    try:
        assert largest_gap(results(sequence, dense), results(sequence, KERNELS[name])) < 1e-5, name
        taken = fastest_run(sequence, KERNELS[name])
    except CannotDo as reason:
        return str(reason)
    return f"{1000 * taken:.0f} ms, {seconds_of_dense / taken:.1f}x"


def fastest_run(sequence: PackedSequence, kernel: Kernel) -> float:
    """Seconds of the fastest of three runs, forward and backward, after one that warms up."""
    taken = []
    for _ in range(4):
        start = process_time()
        results(sequence, kernel)
        taken.append(process_time() - start)
    return min(taken[1:])


def main() -> None:
    """Print one line a sequence, without and with sinks, which need all scores of a sample in memory."""
    print(f"| tokens | samples | dense mask | {' | '.join(f'`{name}`' for name in KERNELS)} | mask that is not made |")
    print("|---" * (len(KERNELS) + 4) + "|")
    for num_tokens, num_samples in ROWS:
        sequence = sequence_of(num_tokens, num_samples)
        of_dense = fastest_run(sequence, dense)
        cells = [shown(sequence, name, of_dense) for name in KERNELS]
        megabytes = num_tokens * num_tokens / 1e6
        print(f"| {num_tokens} | {num_samples} | {1000 * of_dense:.0f} ms | {' | '.join(cells)} | {megabytes:.0f} MB |")
    print("\nThe same with sinks (as gpt-oss), without the dense mask:\n")
    for num_tokens, num_samples in ((4096, 8), (4096, 60)):
        sequence = replace(
            sequence_of(num_tokens, num_samples), args=AttentionArgs(sinks=torch.zeros(NUM_HEADS, requires_grad=True))
        )
        taken = {name: fastest_run(sequence, KERNELS[name]) for name in ("segments", "grouped")}
        ratio = taken["segments"] / taken["grouped"]
        told = ", ".join(f"{name} {1000 * one:.0f} ms" for name, one in taken.items())
        print(f"- {num_tokens} tokens, {num_samples} samples: {told}, {ratio:.1f}x")


if __name__ == "__main__":
    main()
