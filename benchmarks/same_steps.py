"""What it costs to keep the samples of each step, simulated: `python -m benchmarks.same_steps [LENGTHS.json ...]`.

Steps of so many samples on so many ranks: the sequences of a step, the work of its slowest rank over equal shares under
the cost model of `packing_balance`, and the share of the tokens of padded batches that packs do not compute.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.length_files import read_lengths
from swift_vlpack.plan.same_steps import UnpackedStep, kept_steps, pack_steps

EXAMPLE = Path(__file__).parent.parent / "configs" / "example_lengths.json"
STEPS = ((8, 8), (8, 16), (8, 64), (64, 1), (64, 2), (64, 8), (1024, 1), (1024, 4))  # ranks, samples a rank
LEAST_STEPS = 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=Path, default=[EXAMPLE])
    parser.add_argument("--capacities", nargs="+", type=int, default=[8192, 32768])
    options = parser.parse_args()
    print("| lengths | capacity | ranks | samples a step | sequences a step | slowest rank | padding saved | us |")
    print("|---|---|---|---|---|---|---|---|")
    for path in options.lengths:
        known = np.asarray(read_lengths(path).tokens, dtype=np.int64)
        for capacity in options.capacities:
            config = PackingConfig(packing_length=capacity, packing_strategy="exact", packing_batch="samples")
            for num_ranks, per_rank in STEPS:
                size = UnpackedStep(per_rank, 1, num_ranks)
                num = max(len(known), LEAST_STEPS * size.num_samples) // size.num_samples * size.num_samples
                lengths = np.random.default_rng(0).choice(known[known <= capacity], num)
                batch = (np.arange(num) // per_rank).astype(np.int32)
                start = time.process_time()
                packs = pack_steps(lengths, batch, size, config=config, num_ranks=num_ranks)
                microseconds = 1e6 * (time.process_time() - start) / num
                kept = kept_steps(packs, batch, size)
                print(
                    f"| {path.stem} | {capacity} | {num_ranks} | {size.num_samples} | {kept.num_sequences:.1f} | "
                    f"{packs.balance.slowest_to_mean:.3f} | {kept.padding_saved:.1%} | {microseconds:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
