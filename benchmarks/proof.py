"""The proof before step 1, with the default budget: `python -m benchmarks.proof`.

A tiny Qwen2.5-VL with the real vocabulary and with a small one, on photos and texts in packs of 2,048 tokens, in
float32 on one thread. Seconds are of the processor; each is the median of `--runs` proofs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from swift_vlpack import PackingConfig, PackingDataset, prepare_model, prove
from tests.data_rows import mixed_rows
from tests.tiny import save_model, use_ids_of_tokenizer

FAMILY = "qwen2_5_vl"
CAPACITY = 2048


def subject(folder: Path, num_rows: int, *, is_small: bool) -> tuple[Any, Any, PackingDataset]:
    """A model ready to train packed, its template and its packs."""
    from swift.model import get_model_processor
    from swift.template import get_template

    model, processor = get_model_processor(
        str(save_model(folder / "model", FAMILY, is_small=is_small)),
        model_type=FAMILY, torch_dtype=torch.float32, use_hf=True,
    )  # fmt: skip
    template = get_template(processor, template_type=FAMILY, max_length=CAPACITY)
    prepare_model(model, template).train()
    config = PackingConfig(packing_length=CAPACITY, packing_strategy="exact", packing_cache_dir=str(folder / "lengths"))
    return model, template, PackingDataset(mixed_rows(folder / "images", num_rows, largest=280), template, config)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    use_ids_of_tokenizer()  # whose vocabulary may be the small one
    print("| vocabulary | seconds | what it says |")
    print("|---|---|---|")
    for is_small in (True, False):
        with tempfile.TemporaryDirectory() as temporary:
            model, template, packs = subject(Path(temporary), options.rows, is_small=is_small)
            seconds = []
            for _ in range(options.runs):
                start = time.process_time()
                said = prove(model, template, packs)
                seconds.append(time.process_time() - start)
            size = model.config.text_config.vocab_size
            print(f"| {size:,} | {statistics.median(seconds):.2f} | {said.partition('(')[2].rstrip(')')} |", flush=True)


if __name__ == "__main__":
    main()
