"""Models and rows for the proof: Qwen's by ms-swift's template, text models by a collator of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from swift_vlpack.attention.attention import NAME
from swift_vlpack.feed.sequence import boundary_tensors
from swift_vlpack.proof.branches import boundaries_of, marked, shared_of
from swift_vlpack.proof.prove import is_ordinary_token
from swift_vlpack.proof.runner import Batches, Collated, Runner, TemplateBatches
from swift_vlpack.rows.samples import Encoded
from tests.attention.one_by_one import built

IGNORED = -100


def template_model(loaded: Any) -> Runner:
    """A model with ms-swift's template."""
    return Runner(loaded.model, TemplateBatches(loaded.template), is_ordinary_token(loaded.template.tokenizer))


def text_model(config: Any) -> Runner:
    """A text model of a config, with our attention."""
    model = built(config)
    model.set_attn_implementation(NAME)
    return Runner(model, TextBatches(), lambda token: 3 <= token < 480)


def text_samples(*lengths: int, seed: int = 1) -> list[Encoded]:
    """Random tokens, of which the second half is to be learnt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(3, 480, (length,), generator=generator).tolist()
        labels = [IGNORED] * (length // 2) + tokens[length // 2 :]
        made.append({"input_ids": tokens, "labels": labels, "length": length, "sample_id": f"text:{number}"})
    return made


def text_units(num_prefix: int, *own_lengths: Sequence[int], seed: int = 1) -> list[Encoded]:
    """Units of random tokens: a prefix of so many tokens, then branches of these lengths; no target near the fork."""
    made = []
    for number, own in enumerate(own_lengths):
        prefix, *branches = text_samples(num_prefix, *own, seed=seed + number)
        rows = [
            {
                "input_ids": prefix["input_ids"] + branch["input_ids"],
                "labels": [IGNORED] * num_prefix + branch["labels"],
                "length": num_prefix + branch["length"],
                "sample_id": f"unit {number}:{at}",
            }
            for at, branch in enumerate(branches)
        ]
        made += marked(rows, [0, *[num_prefix] * (len(rows) - 1)])
    return made


class TextBatches:
    """Rows of token ids, packed with boundaries or padded on the right."""

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        ids, labels = ([torch.tensor(s[name]) for s in samples] for name in ("input_ids", "labels"))
        if packed:
            labels = [torch.cat([torch.tensor([IGNORED]), one[1:]]) for one in labels]
            boundaries = boundaries_of(samples)
            shared = shared_of(samples)  # a branch brings its own tokens only
            inputs = {
                "input_ids": torch.cat([one[num:] for one, num in zip(ids, shared, strict=True)])[None],
                "position_ids": torch.tensor(boundaries.position_ids)[None],
                **boundary_tensors(boundaries),
            }
            labels = [one[num:] for one, num in zip(labels, shared, strict=True)]
            yield Collated.of(inputs | {"use_cache": False, "labels": torch.cat(labels)[None]})
            return
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
        inputs = {"input_ids": pad(ids, batch_first=True), "attention_mask": mask, "use_cache": False}
        yield Collated.of(inputs | {"labels": pad(labels, batch_first=True, padding_value=IGNORED)})


class ChangedBatches:
    """Rows of which the packed ones are changed."""

    def __init__(self, batches: Batches, change: Callable[[Collated, Sequence[Encoded]], Collated]) -> None:
        self.batches = batches
        self.change = change

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        with self.batches.batch(samples, packed=packed) as made:
            yield self.change(made, samples) if packed else made


def with_inputs(row: Collated, **inputs: Any) -> Collated:
    """The same row with other inputs; None takes one away."""
    changed = {**row.inputs, **inputs}
    return replace(row, inputs={name: value for name, value in changed.items() if value is not None})
