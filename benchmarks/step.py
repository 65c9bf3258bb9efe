"""Forward and backward of one packed sequence, beside the same tokens without attention: `make bench-step`.

The small Qwen2.5-VL of `make demo` (6 layers, hidden 256) on sequences of short samples (60 to 400 tokens), of samples
with the lengths of real data (`configs/example_lengths.json`) and of few long ones, in float32 on one thread. Kinds
take turns. Every kind but "no_attention" has to come to the same loss. At 8,192 tokens only the first, `auto` and "one
by one" are trained; there one layer's attention is computed by both kernels, on several packs, to see whether `auto`
takes the quicker one.

| kind | what it is |
|---|---|
| no_attention | the bare model, every layer's attention replaced by a sum of its query, key and value |
| auto | what `packing_attention=auto` takes |
| segments, grouped | these kernels |
| one by one | the samples un-packed, each a batch of its own, by transformers' sdpa |
| dense mask | sdpa with the L x L mask |
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.attention import dense_mask, sequence_with
from benchmarks.demo import FAMILY, build_model
from benchmarks.turns import cell, in_turns, quotients
from swift_vlpack.attention import attention
from swift_vlpack.attention.choose_kernel import results
from swift_vlpack.attention.kernels import Kernel, grouped, segments
from swift_vlpack.attention.packed_sequence import PackedSequence
from swift_vlpack.attention.prepare import prepare_model
from swift_vlpack.config import PackingConfig
from swift_vlpack.feed.choose_attention import choose_attention
from swift_vlpack.feed.sequence import layout, packed_sequence, placeholder
from swift_vlpack.rows.families import text_config_of
from tests.tiny import use_ids_of_tokenizer

BARE, AUTO, ONE_BY_ONE = "no_attention", "auto", "one by one"
LENGTHS = Path(__file__).parent.parent / "configs" / "example_lengths.json"
TOKENS = (2048, 8192)
KINDS = ("short", "mixed", "few long")
PARTS = {
    "attention": ("scaled_dot_product", "flash"),
    "products of matrices": ("aten::mm", "aten::addmm", "aten::bmm"),
    "copies": ("cat", "copy_", "index", "fill_", "zero_", "split", "slice", "scatter", "gather", "contiguous"),
}
"""Names of operations by what they do, for `--profile`."""


class Took(NamedTuple):
    """Seconds of one forward and backward."""

    processor: float
    wall: float


def lengths_of(kind: str, num_tokens: int, seed: int = 0) -> list[int]:
    """Draw the lengths of a full sequence; the last sample is what is left.

    >>> lengths_of("short", 1024), sum(lengths_of("few long", 8192))
    ([257, 275, 80, 192, 220], 8192)
    """
    rng = random.Random(seed)
    known = json.loads(LENGTHS.read_text())
    draw = {
        "short": lambda: rng.randint(60, 400),
        "mixed": lambda: rng.choice(known),
        "few long": lambda: rng.randint(num_tokens // 4, num_tokens // 2),
    }[kind]
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        length = draw()
        lengths.append(length if length < left - 30 else left)
    return lengths


def samples_of(template: Any, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Texts of random tokens, encoded."""
    generator = torch.Generator().manual_seed(0)
    like = placeholder(template)
    made = []
    for length in lengths:
        ids = torch.randint(100, 4000, (length,), generator=generator).tolist()
        made.append({**like, "input_ids": ids, "labels": [-100, *ids[1:]], "length": length})
    return made


def no_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Mix no tokens, but let query, key and value all have a gradient."""
    made = query.unflatten(1, (key.shape[1], -1)) + (key + value)[:, :, None]
    return made.flatten(1, 2).transpose(1, 2), None


def dense(sequence: PackedSequence) -> torch.Tensor:
    """One call of sdpa for all samples."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    states = sequence.query, sequence.key, sequence.value
    made: torch.Tensor = sdpa_attention_forward(sequence.module, *states, cache(dense_mask)(sequence.ends))[0]
    return made


class Subject:
    """The model, and one sequence of it."""

    def __init__(self, folder: Path) -> None:
        from swift.model import get_model_processor
        from swift.template import get_template
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        use_ids_of_tokenizer()  # because the vocabulary is a small one
        built, _ = build_model(folder)
        model, processor = get_model_processor(str(built), model_type=FAMILY, torch_dtype=torch.float32, use_hf=True)
        self.template = get_template(processor, template_type=FAMILY, max_length=max(TOKENS))
        self.model = prepare_model(model, self.template).train()
        AttentionInterface.register(BARE, no_attention)
        AttentionMaskInterface.register(BARE, lambda *_, **__: None)
        self.config = PackingConfig(packing_length=max(TOKENS))
        self.line = choose_attention(self.model, self.template, SimpleNamespace(config=self.config, epoch_plan=None))
        self.auto = attention._kernels[self.model]

    def kinds(self, lengths: Sequence[int], *, with_kernels: bool) -> dict[str, Callable[[], Took]]:
        """Return what measures each kind."""
        samples = samples_of(self.template, lengths)
        packed = [(packed_sequence(self.template, samples), 1.0)]
        with layout(self.template, packed=False):
            weights = [(length - 1) / (sum(lengths) - len(lengths)) for length in lengths]
            alone = [
                (self.template.data_collator([sample]), weight) for sample, weight in zip(samples, weights, strict=True)
            ]
        kernels = {AUTO: self.auto}
        if with_kernels:
            kernels |= {"segments": segments, "grouped": grouped, "dense mask": dense}
        of_kernels = {name: partial(self.step, packed, attention.NAME, kernel) for name, kernel in kernels.items()}
        return {
            BARE: partial(self.step, packed, BARE),
            **of_kernels,
            ONE_BY_ONE: partial(self.step, alone, "sdpa"),
        }

    def step(self, batches: Sequence[tuple[Any, float]], implementation: str, kernel: Any = segments) -> Took:
        """Compute loss and gradients of the batches, each with its share of all labels."""
        text_config_of(self.model.config)._attn_implementation = implementation
        attention.use_kernel(self.model, kernel)
        processor, wall = time.process_time(), time.perf_counter()
        self.loss = 0.0
        for inputs, weight in batches:
            loss = self.model(**inputs).loss * weight
            loss.backward()
            self.loss += loss.item()
        took = Took(time.process_time() - processor, time.perf_counter() - wall)
        self.model.zero_grad()
        return took


def check(subject: Subject, kinds: dict[str, Callable[[], Took]]) -> None:
    """Run every kind once, and stop unless all come to the same loss."""
    losses = {}
    for kind, measure in kinds.items():
        measure()
        losses[kind] = subject.loss
    losses.pop(BARE)
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the kinds come to different losses: {losses}")


def chosen_beside_quicker(lengths: Sequence[int], auto: Kernel, num_turns: int) -> tuple[float, float]:
    """Return the time of what `auto` took over that of the quicker kernel, and of the other one; one layer's attention.

    Of each kernel the fastest turn counts, because on a busy machine the others say what else it did.
    """
    sequence = sequence_with(tuple(accumulate(lengths, initial=0)))
    kernels = {"auto": auto, "segments": segments, "grouped": grouped}

    def measure(kernel: Kernel) -> float:
        start = time.process_time()
        results(sequence, kernel)
        return time.process_time() - start

    took = in_turns({name: partial(measure, kernel) for name, kernel in kernels.items()}, num_turns + 1)
    fastest = {name: min(of[1:]) for name, of in took.items()}
    quicker, slower = sorted((fastest["segments"], fastest["grouped"]))
    return fastest["auto"] / quicker, slower / quicker


def parts_of(measure: Callable[[], Took]) -> dict[str, float]:
    """Return the milliseconds of the processor in each part of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        measure()
    parts = dict.fromkeys((*PARTS, "the rest"), 0.0)
    for event in profiled.key_averages():
        part = next((part for part, names in PARTS.items() if any(name in event.key for name in names)), "the rest")
        parts[part] += event.self_cpu_time_total / 1000
    return parts


def steps_table(subject: Subject, num_tokens: int, num_turns: int, *, is_profiled: bool) -> None:
    """Print what every kind takes for sequences of so many tokens."""
    is_short = num_tokens == min(TOKENS)
    for lengths_kind in KINDS if is_short else KINDS[:2]:
        lengths = lengths_of(lengths_kind, num_tokens)
        kinds = subject.kinds(lengths, with_kernels=is_short)
        if is_short:
            check(subject, kinds)
        took = in_turns(kinds, num_turns)
        processor = {kind: [one.processor for one in of] for kind, of in took.items()}
        for kind, of in took.items():
            wall = cell([one.wall for one in of], 2)
            speed = cell(quotients(processor[BARE], processor[kind]), 2)
            beside = cell(quotients(processor[kind], processor[ONE_BY_ONE]), 2)
            first = f"{num_tokens:,} | {len(lengths)} {lengths_kind}"
            print(f"| {first} | {kind} | {cell(processor[kind], 2)} | {wall} | {speed} | {beside} |", flush=True)
        for kind in (BARE, AUTO, ONE_BY_ONE) if is_profiled else ():
            parts = ", ".join(f"{part} {taken:.0f} ms" for part, taken in parts_of(kinds[kind]).items())
            print(f"  {kind}: {parts}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--packs", type=int, default=3, help="packs of each kind on which the choice is looked at")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder))
    print(subject.line)
    print("\n| tokens | samples | kind | processor, s | wall, s | speed beside no_attention | time beside one by one |")
    print("|---" * 7 + "|")
    for num_tokens in TOKENS:
        steps_table(subject, num_tokens, options.turns, is_profiled=options.profile)
    print("\n| tokens | samples | `auto` / the quicker kernel | the other kernel / the quicker |")
    print("|---" * 4 + "|")
    for num_tokens in TOKENS:
        for kind in KINDS:
            packs = [lengths_of(kind, num_tokens, seed) for seed in range(options.packs)]
            found = [chosen_beside_quicker(lengths, subject.auto, options.turns) for lengths in packs]
            cells = " | ".join(cell(column, 2) for column in zip(*found, strict=True))
            print(f"| {num_tokens:,} | {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
