"""Four ways to train the same samples, in one run and in turns: `make bench-ways`.

The small Qwen2.5-VL of `make demo`, whose layers outweigh its vocabulary, on the samples of the demo and on texts with
the lengths of real data. Every way is ms-swift's own `swift sft` in this process, in float32 on one thread:

| way | what it is |
|---|---|
| padded | plain ms-swift |
| padding_free | plain ms-swift with `--padding_free true`, whose batches have no padding |
| samples | `packing_batch=samples`: the steps of the padded run, packed |
| packs | packs as they come, so that a step has more samples |

ms-swift refuses `padding_free` without flash-attn, which needs a GPU. Here its check of the name is lifted, and the
model has the attention of this package, which reads the boundaries that ms-swift's own collator hands over.

A run trains two epochs, and the second one is measured: no import, length pass or proof is in it, but loading, forward,
backward and optimizer are. Losses of the first three ways have to be equal. The processor's time counts, because other
work on the machine does not change it much; `--wall` shows the clock beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.demo import FAMILY, build_model, samples
from benchmarks.turns import cell, in_turns, quotients
from swift_vlpack.attention import attention
from swift_vlpack.config import PackingConfig
from swift_vlpack.feed.choose_attention import choose_attention
from swift_vlpack.plan.length_files import read_lengths
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import argv, epoch_report, packed_argv, train
from tests.tiny import use_ids_of_tokenizer

PADDED, PADDING_FREE, SAME, PACKS = WAYS = ("padded", "padding_free", "samples", "packs")
EXAMPLE = Path(__file__).parent.parent / "configs" / "example_lengths.json"
STEPS = ((4, 1), (4, 4))  # batch size, accumulation
CLOCK = "clock_of_ways"
HEADER = (
    "| data | samples | b x A | steps | steps of packs | tokens | padding_free | samples | packs |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
LARGEST_RELATIVE = 1e-4
"""Between the losses of steps that have the same samples."""


class Epoch(NamedTuple):
    """What the measured epoch of a run took."""

    processor: float
    wall: float
    num_steps: int
    num_tokens: int | None
    """Tokens of all samples; known of packed runs."""
    losses: tuple[float, ...]


class Data(NamedTuple):
    """Rows, and the longest sequence that is made of them."""

    name: str
    dataset: str
    num_rows: int
    capacity: int


def texts_of(lengths: Sequence[int], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Make texts of these lengths in tokens; half of the words are the answer."""
    row = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    fixed = len(tokenizer(f"{row}<|im_start|>assistant\n{{}}<|im_end|>\n".format("house", "house"))["input_ids"]) - 2
    for length in lengths:
        num_words = max(2, length - fixed)
        answer = num_words // 2
        yield text_row(" ".join(["house"] * (num_words - answer)), " ".join(["house"] * answer))


class Bench:
    """The model and the runs of one start of this script."""

    def __init__(self, folder: Path) -> None:
        from swift.callbacks import callbacks_map

        use_ids_of_tokenizer()  # because the vocabulary is a small one
        self.folder = folder
        self.model, _ = build_model(folder / "model")
        self.marks: list[tuple[float, float]] = []
        self.num_runs = 0
        attention.register()
        callbacks_map[CLOCK] = self._clock()

    def _clock(self) -> type:
        from swift.callbacks import TrainerCallback

        marks = self.marks

        class Clock(TrainerCallback):  # type: ignore[misc]
            """Notes when epochs begin and end."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                marks.clear()
                if getattr(args, "padding_free", False) and not hasattr(self.trainer, "feed"):
                    packs = SimpleNamespace(config=PackingConfig(packing_length=8192), epoch_plan=None)
                    choose_attention(self.trainer.model, self.trainer.template, packs)

            def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                marks.append((time.process_time(), time.perf_counter()))

            on_epoch_end = on_epoch_begin

        return Clock

    def train(self, way: str, data: Data, batch_size: int, accumulation: int) -> Epoch:
        """Train two epochs in one of the ways; what the second one took."""
        self.num_runs += 1
        output = self.folder / "runs" / str(self.num_runs)
        flags = {
            "dataset": data.dataset, "split_dataset_ratio": 0, "num_train_epochs": 2, "max_length": data.capacity,
            "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation,
            "gradient_checkpointing": "false", "learning_rate": 1e-5, "callbacks": CLOCK,
        }  # fmt: skip
        if way == PADDING_FREE:
            with _padding_free_without_flash_attn():
                more = {"padding_free": "true", "attn_impl": attention.NAME}
                result = train(argv(self.model, FAMILY, output, **flags, **more))
        elif way == PADDED:
            result = train(argv(self.model, FAMILY, output, **flags))
        else:
            # Nothing is dropped, so that all ways train the same samples.
            packing_options(**{SAME: {"packing_batch": SAME}, PACKS: {"packing_drop_last": "false"}}[way])
            os.environ["VLPACK_PACKING_STRATEGY"] = "exact"
            result = train(packed_argv(self.model, FAMILY, output, **flags))
        (_, _, begin, end), lines = self.marks, [line for line in result["log_history"] if "loss" in line]
        is_packed = way in (SAME, PACKS)
        return Epoch(
            *(after - before for before, after in zip(begin, end, strict=True)),
            num_steps=len(lines) // 2,
            num_tokens=epoch_report(output, 1)["num_tokens"] if is_packed else None,
            losses=tuple(line["loss"] for line in lines),
        )


@contextmanager
def _padding_free_without_flash_attn() -> Iterator[None]:
    from swift.arguments import SftArguments

    check = SftArguments._check_padding_free
    SftArguments._check_padding_free = lambda args: None
    try:
        yield
    finally:
        SftArguments._check_padding_free = check


def check(measured: Mapping[str, Sequence[Epoch]]) -> None:
    """Stop unless the ways that train the same steps have the same losses."""
    expected = measured[PADDED][0].losses
    for way in (PADDING_FREE, SAME):
        for epoch in measured[way]:
            gap = max(abs(one - other) / one for one, other in zip(expected, epoch.losses, strict=True))
            if gap > LARGEST_RELATIVE:
                raise SystemExit(f"losses of {way} differ from those of padded batches by {gap:.1e}")


def row_of(data: Data, recipe: tuple[int, int], measured: Mapping[str, Sequence[Epoch]], *, is_wall: bool) -> str:
    """Return the line of the table: tokens a second and seconds an epoch, beside padded batches of the same turn."""

    def seconds(way: str) -> list[float]:
        return [epoch.wall if is_wall else epoch.processor for epoch in measured[way]]

    padded = seconds(PADDED)
    cells = [data.name, f"{data.num_rows}", f"{recipe[0]} x {recipe[1]}", str(measured[SAME][0].num_steps),
             str(measured[PACKS][0].num_steps), str(measured[SAME][0].num_tokens)]  # fmt: skip
    for way in WAYS[1:]:
        rates, shares = quotients(padded, seconds(way)), quotients(seconds(way), padded)
        cells.append(f"{cell(rates, 2)}, {cell(shares, 2)}")
    return f"| {' | '.join(cells)} |"


def data_of(path: Path | None, folder: Path, num_rows: int, capacity: int) -> Data:
    """Write the rows of a file of lengths, of which those that fit are drawn; of the demo without a file."""
    if path is None:
        rows = samples((folder / "images").absolute())
        return Data("demo", write_jsonl(folder / "demo.jsonl", rows), len(rows), 1024)
    from transformers import AutoTokenizer

    fitting = [length for length in read_lengths(path).tokens if length <= capacity]
    drawn = random.Random(0).choices(fitting, k=num_rows)
    rows = list(texts_of(drawn, AutoTokenizer.from_pretrained(folder / "model")))
    return Data(path.stem, write_jsonl(folder / f"{path.stem}.jsonl", rows), num_rows, capacity)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=Path, default=[EXAMPLE], help="files of lengths (default: example)")
    parser.add_argument("--samples", type=int, default=128, help="rows drawn of each file")
    parser.add_argument("--capacity", type=int, default=4096, help="tokens of a pack; longer rows are not drawn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--without_demo", action="store_true")
    parser.add_argument("--wall", action="store_true", help="the clock in place of the processor's time")
    options = parser.parse_args()
    lines = [HEADER]
    with tempfile.TemporaryDirectory(prefix="vlpack-ways-") as name:
        bench = Bench(Path(name))
        paths = [*([] if options.without_demo else [None]), *options.lengths]
        for path in paths:
            data = data_of(path, bench.folder, options.samples, options.capacity)
            for recipe in STEPS:
                kinds: dict[str, Callable[[], Epoch]] = {way: partial(bench.train, way, data, *recipe) for way in WAYS}
                measured = in_turns(kinds, options.turns)
                check(measured)
                lines.append(row_of(data, recipe, measured, is_wall=options.wall))
                print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))  # at the end, because ms-swift prints between them


if __name__ == "__main__":
    main()
