"""Rows that share an image, computed once: `make bench-branches`, half an hour on two quiet cores.

Rows that ask about generated photographs are trained packed, once with `packing_share=none` and once with `media`, by a
plain loop over `PackingDataset` and `Collator`: real images, ms-swift's own template, the loader and the optimizer
included. The model is the small Qwen2.5-VL of `make demo`, whose layers outweigh its vocabulary. Both kinds take turns
in processes of their own, and train the same rows; it stops unless their losses and gradients, summed over all targets,
are equal up to rounding.

The bound counts what must be computed: each distinct token and patch once, and the pairs of tokens that attention
needs. It knows nothing of the loader, which decodes an image once, too.

The last lines have as many questions an image as the training set of VQAv2 has: at least 3, and 443,757 for 82,783
images (published), 5.4 in the mean. How they spread is an assumption here: 3 and a geometric rest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.demo import FAMILY, build_model
from benchmarks.turns import cell, in_turns, quotients
from tests.data_rows import image_row, sentence
from tests.images import photo
from tests.tiny import use_ids_of_tokenizer

SIZES = ((320, 240), (640, 480), (1280, 960))
ROWS_PER_IMAGE = (1, 2, 5, 10, 20)
VQA = "VQAv2-like"
MEAN_OF_VQA = 443_757 / 82_783
FEWEST_OF_VQA = 3
NONE, MEDIA = KINDS = ("none", "media")
CAPACITY = 4096
MOST_GAP = 1e-4
"""Of loss and gradients, because sums over thousands of tokens round."""
MOST_ROWS = 20
"""Of a unit, so that twenty rows an image are one."""


class Trained(NamedTuple):
    """What an epoch took, and what it trained."""

    wall: float
    processor: float
    """Seconds of the processor, which are steadier where others use the machine."""
    peak_mb: float
    """Most memory above that of the loaded model."""
    num_tokens: int
    num_patches: int
    loss: float
    """The sum over all targets."""
    gradients: dict[str, NDArray[np.float32]]
    """Those of that sum."""


class Work(NamedTuple):
    """What has to be computed for some rows, in floating-point operations."""

    layers: float
    """Products of weights and tokens, in the language model and the tower."""
    attention: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.layers + self.attention


# -- rows -------------------------------------------------------------------------------------------------------------


def num_rows_of_images(rows_per_image: int | str, num_rows: int, seed: int = 0) -> Iterator[int]:
    """Yield how many rows ask about each image, until there are `num_rows`.

    >>> list(num_rows_of_images(5, 12)), sum(num_rows_of_images(VQA, 40))
    ([5, 5, 2], 40)
    """
    rng, num_left = random.Random(seed), num_rows
    # The mean of a geometric number from 0 on is (1 - p) / p.
    p = 1 / (1 + MEAN_OF_VQA - FEWEST_OF_VQA)
    while num_left > 0:
        wanted = rows_per_image
        if isinstance(wanted, str):
            wanted = FEWEST_OF_VQA
            while rng.random() > p:
                wanted += 1
        num = min(wanted, num_left)
        num_left -= num
        yield num


def rows_about(folder: Path, size: tuple[int, int], rows_per_image: int | str, num_rows: int) -> list[dict[str, Any]]:
    """Make rows with a question of 4 to 12 words and an answer of 1 to 3, as VQAv2 has them."""
    rng, rows = random.Random(1), []
    for number, num in enumerate(num_rows_of_images(rows_per_image, num_rows)):
        image = photo(folder, f"{size[0]}x{size[1]}_{number}", *size, seed=number)
        rows += [image_row([image], f"{sentence(rng, 4, 12)}?", sentence(rng, 1, 3)) for _ in range(num)]
    rng.shuffle(rows)
    return rows


# -- one epoch --------------------------------------------------------------------------------------------------------


class Subject:
    """The model with its template, and the packs of some rows."""

    def __init__(self, folder: Path) -> None:
        from swift.model import get_model_processor
        from swift.template import get_template

        from swift_vlpack.attention.prepare import prepare_model

        use_ids_of_tokenizer()  # because the vocabulary is a small one
        built, self.layers_to_vocabulary = build_model(folder)
        model, processor = get_model_processor(str(built), model_type=FAMILY, torch_dtype=torch.float32, use_hf=True)
        self.template = get_template(processor, template_type=FAMILY, max_length=CAPACITY)
        self.model = prepare_model(model, self.template).train()

    def packs(self, rows: Sequence[Mapping[str, Any]], share: str) -> Any:
        """Pack rows; finding out which share is part of the length pass, and not timed."""
        from swift_vlpack import PackingConfig, PackingDataset, choose_attention

        options: dict[str, Any] = {"packing_share": share}
        if share == MEDIA:
            options["packing_share_max"] = MOST_ROWS
        config = PackingConfig(packing_length=CAPACITY, packing_strategy="exact", packing_drop_last=False, **options)
        packs = PackingDataset(list(rows), self.template, config)
        choose_attention(self.model, self.template, packs)
        return packs

    def epoch(self, packs: Any) -> Trained:
        """Train the packs once, by a learning rate so small that all losses are those of the first weights."""
        from torch.utils.data import DataLoader

        from swift_vlpack import Collator

        loader = DataLoader(packs, batch_size=1, collate_fn=Collator(self.template))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-12)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, processor = time.perf_counter(), time.process_time()
        num_tokens = num_patches = 0
        total = 0.0
        for batch in loader:
            # Collected before the model takes the batch.
            num_targets = int((batch["labels"][:, 1:] != -100).sum())
            num_tokens += batch["input_ids"].numel()
            num_patches += len(batch["pixel_values"])
            loss = self.model(**batch).loss * num_targets
            loss.backward()
            optimizer.step()  # and keep the gradients, to compare their sum over all packs
            total += float(loss.detach())
        took = time.perf_counter() - wall, time.process_time() - processor
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        gradients = {name: one.grad.numpy() for name, one in self.model.named_parameters() if one.grad is not None}
        return Trained(*took, peak, num_tokens, num_patches, total, gradients)

    def bound(self, packs: Any) -> dict[str, Work]:
        """Count the work of all rows alone, and with each distinct token and patch once."""
        text, vision = self.model.config.text_config, self.model.config.vision_config
        language = self.model.model.language_model
        of_layers = sum(parameter.numel() for parameter in language.layers.parameters())
        of_vocabulary = self.model.lm_head.weight.numel()
        of_tower = sum(parameter.numel() for parameter in self.model.model.visual.blocks.parameters())
        work = {}
        for share in KINDS:
            num_tokens = num_targets = num_pairs = num_patches = num_pairs_of_tower = 0
            for number in range(len(packs)):
                address = packs.address(number)
                shared = address.shared or (0,) * len(address.samples)
                for (length, _, patches, targets), from_before in zip(address.sizes, shared, strict=True):
                    once = from_before if share == MEDIA else 0
                    num_tokens += length - once
                    num_targets += targets
                    num_pairs += (length * (length + 1) - once * (once + 1)) // 2
                    num_patches += 0 if once else patches
                    num_pairs_of_tower += 0 if once else patches**2
            # Forward and backward: three times two operations for each weight and token; and for each pair of tokens
            # twice as many over the hidden size, for two products.
            layers = 6 * (num_tokens * of_layers + num_targets * of_vocabulary + num_patches * of_tower)
            attention = 12 * text.num_hidden_layers * text.hidden_size * num_pairs
            attention += 12 * len(vision.fullatt_block_indexes) * vision.hidden_size * num_pairs_of_tower
            work[share] = Work(layers, attention)
        return work


def in_a_child(measure: Callable[[], Trained]) -> Trained:
    """Run it in a forked process, whose peak of memory is its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, measure))
    child.start()
    sender.close()
    try:
        taken: Trained = receiver.recv()
    except EOFError:
        raise SystemExit("a turn has failed; its error is above") from None
    finally:
        child.join()
    return taken


def _send(sender: Any, measure: Callable[[], Trained]) -> None:
    torch.set_num_threads(1)
    sender.send(measure())


# -- tables -----------------------------------------------------------------------------------------------------------


def lines(
    subject: Subject, folder: Path, size: tuple[int, int], rows_per_image: int | str, options: argparse.Namespace
) -> str:
    """Measure one kind of rows, and return its line of the table."""
    rows = rows_about(folder, size, rows_per_image, options.rows)
    packs = {share: subject.packs(rows, share) for share in KINDS}
    took = in_turns(
        {share: partial(in_a_child, partial(subject.epoch, packs[share])) for share in KINDS}, options.turns
    )
    none, media = (took[share][0] for share in KINDS)
    gap = gap_of(none, media)
    work = subject.bound(packs[MEDIA])
    wall, processor = (
        quotients(*([getattr(one, name) for one in took[share]] for share in KINDS)) for name in ("wall", "processor")
    )
    rates = " | ".join(cell([len(rows) / one.wall for one in took[share]]) for share in KINDS)
    peaks = " | ".join(cell([one.peak_mb for one in took[share]], 0) for share in KINDS)
    return (
        f"| {size[0]}x{size[1]} | {rows_per_image} | {rates} | {cell(wall, 2)} | {cell(processor, 2)} | "
        f"{work[NONE].total / work[MEDIA].total:.2f} | {none.num_tokens / media.num_tokens:.2f} | "
        f"{none.num_patches / media.num_patches:.2f} | {peaks} | {gap:.0e} |"
    )


def gap_of(none: Trained, media: Trained) -> float:
    """Return the largest gap of loss and gradients, each over the largest number there. Stops above rounding."""
    gap = abs(none.loss - media.loss) / abs(none.loss)
    for name, gradient in none.gradients.items():
        largest = float(np.abs(gradient).max())
        gap = max(gap, float(np.abs(gradient - media.gradients[name]).max()) / largest if largest else 0.0)
    if gap > MOST_GAP:
        raise SystemExit(f"the kinds come to other losses or gradients: {gap:.1e} apart")
    return gap


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=40, help="rows of each kind (default: 40)")
    parser.add_argument("--sizes", nargs="*", default=[f"{width}x{height}" for width, height in SIZES])
    parser.add_argument("--per-image", nargs="*", type=int, default=list(ROWS_PER_IMAGE))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subject = Subject(folder / "model")
        print(f"a token meets {subject.layers_to_vocabulary:.1f} weights of layers for one of the vocabulary")
        print("| image | rows an image | rows a second: none | media | media / none | of processor time | bound | "
              "tokens fewer | patches fewer | peak MB: none | media | gap of loss and gradients |")  # fmt: skip
        print("|---" * 12 + "|")
        for given in options.sizes:
            width, height = map(int, given.split("x"))
            for rows_per_image in (*options.per_image, VQA):
                print(lines(subject, folder, (width, height), rows_per_image, options), flush=True)


if __name__ == "__main__":
    main()
