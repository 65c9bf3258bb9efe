"""Tiny models of several families, samples with pictures, and collators of a few lines that are right or wrong.

Nothing of ms-swift: the models are transformers', and so is the way that a batch tells where samples start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers

from tests import tiny
from tests.family_models import FAMILIES

IGNORED = -100
Sample = dict[str, Any]
Batch = dict[str, Any]
Change = Callable[[Batch, list[Sample], Any], Batch]
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
INTERN, TEXT = "internvl", "llama"


# -- models -----------------------------------------------------------------------------------------------------------


def model_of(family: str, folder: Path, implementation: str = "sdpa") -> Any:
    """A model in training mode without a cache, as transformers' Trainer trains it."""
    if family == TEXT:
        torch.manual_seed(0)
        sizes = {"vocab_size": 480, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.2)
        model = transformers.LlamaForCausalLM(config)
    elif family == INTERN:
        FAMILIES["InternVL (HF)"].build(folder)
        model = transformers.InternVLForConditionalGeneration.from_pretrained(folder)
    else:
        model = tiny.build_model(family, is_small=True)
    model.set_attn_implementation(implementation)
    use_cache(model, yes=False)
    return model.train()


def use_cache(model: Any, *, yes: bool) -> None:
    for config in (model.config, getattr(model.config, "text_config", model.config)):
        config.use_cache = yes


# -- samples ----------------------------------------------------------------------------------------------------------


def samples_of(model: Any) -> list[Sample]:
    """Two samples with a picture of one size, one with a wider picture, and texts; of a text model, texts."""
    texts = [text_sample(length, seed) for seed, length in enumerate((13, 9, 21, 17))]
    if model.config.model_type == "llama":
        return texts
    pictures = [picture_sample(model.config, *size) for size in ((6, 1, 1), (8, 1, 2), (5, 2, 3))]
    return [pictures[0], texts[0], pictures[1], texts[1], pictures[2]]


def words(number: int, seed: int) -> list[int]:
    return torch.randint(10, 400, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def text_sample(length: int, seed: int) -> Sample:
    tokens = words(length, seed)
    return {"input_ids": tokens, "labels": [IGNORED] * (length // 2) + tokens[length // 2 :]}


def picture_sample(config: Any, num_words: int, num_tiles: int, seed: int) -> Sample:
    """A picture, then words that are learnt. `num_tiles` pieces of 4 x 4 patches, which are 4 tokens each."""
    tokens, image = words(num_words, 50 + seed), config.image_token_id
    made: Sample = {}
    noise = torch.Generator().manual_seed(seed)
    if config.model_type == INTERN:
        made["pixel_values"] = torch.randn(num_tiles, 3, 56, 56, generator=noise)
    else:
        patch, frames = config.vision_config.patch_size, config.vision_config.temporal_patch_size
        made["pixel_values"] = torch.randn(16 * num_tiles, 3 * frames * patch**2, generator=noise)
        made["image_grid_thw"] = torch.tensor([[1, 4, 4 * num_tiles]])
    ids = [7, *[image] * 4 * num_tiles, 8, *tokens]
    return {**made, "input_ids": ids, "labels": [IGNORED] * (len(ids) - num_words) + tokens}


# -- collators --------------------------------------------------------------------------------------------------------


class Flat:
    """Lays samples end to end in one row, as model and transformers' sdpa read it; `change` makes a batch wrong."""

    def __init__(self, model: Any, *changes: Change) -> None:
        self.model = model
        self.changes = changes

    def __call__(self, samples: list[Sample]) -> Batch:
        batch = {
            "input_ids": torch.tensor([[token for sample in samples for token in sample["input_ids"]]]),
            "labels": torch.tensor([[label for one in samples for label in (IGNORED, *one["labels"][1:])]]),
            "position_ids": torch.cat([self.positions([sample]) for sample in samples], dim=-1),
        } | media_of(samples)
        for change in self.changes:
            batch = change(batch, samples, self)
        return batch

    def positions(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The positions of samples as if they were one: text positions, and in front of those with three axes."""
        tokens = torch.tensor([[token for sample in samples for token in sample["input_ids"]]])
        text = torch.arange(tokens.shape[1])[None]
        if not has_axes(self.model):
            return text
        axes, _ = self.model.model.get_rope_index(
            tokens,
            mm_token_type_ids=types_of(self.model, tokens),
            image_grid_thw=media_of(samples).get("image_grid_thw"),
        )
        return torch.cat([text[None], axes])


def media_of(samples: Sequence[Sample]) -> Batch:
    names = [name for name in ("pixel_values", "image_grid_thw") if any(name in sample for sample in samples)]
    return {name: torch.cat([sample[name] for sample in samples if name in sample]) for name in names}


def has_axes(model: Any) -> bool:
    return model.config.model_type in GRIDS


def types_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return (tokens == model.config.image_token_id).int()


def padded(samples: list[Sample], model: Any, *, on_the_left: bool = False) -> Batch:
    """One row a sample, as without packing."""
    width = max(len(sample["input_ids"]) for sample in samples)
    batch: Batch = {name: [] for name in ("input_ids", "labels", "attention_mask")}
    for sample in samples:
        missing = width - len(sample["input_ids"])
        fields = (sample["input_ids"], 0), (sample["labels"], IGNORED), ([1] * len(sample["input_ids"]), 0)
        for name, (values, filler) in zip(batch, fields, strict=True):
            filled = [filler] * missing
            batch[name].append([*filled, *values] if on_the_left else [*values, *filled])
    made = {name: torch.tensor(rows) for name, rows in batch.items()} | media_of(samples)
    return made | ({"mm_token_type_ids": types_of(model, made["input_ids"])} if has_axes(model) else {})


# -- what makes a batch right in another way, or wrong ---------------------------------------------------------------


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    return [len(sample["input_ids"]) for sample in samples]


def numbers_of(samples: Sequence[Sample]) -> torch.Tensor:
    """1, 1, 1, 2, 2: the sample of each token."""
    lengths = torch.tensor(lengths_of(samples))
    return torch.arange(1, len(samples) + 1).repeat_interleave(lengths)[None]


def without(*names: str) -> Change:
    return lambda batch, samples, flat: {name: value for name, value in batch.items() if name not in names}


def running_positions(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    return {**batch, "position_ids": flat.positions(samples)}


def flat_positions(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """Those of text for every token, which begin again with every sample."""
    return {**batch, "position_ids": torch.cat([torch.arange(length) for length in lengths_of(samples)])[None]}


def axes_of_text(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """Those of text on every axis that the model has."""
    made = flat_positions(batch, samples, flat)["position_ids"]
    return {**batch, "position_ids": made.expand(4, 1, -1) if has_axes(flat.model) else made}


def with_types(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """The kinds of tokens, of which a model with three axes makes its own positions."""
    return {**batch, "mm_token_type_ids": types_of(flat.model, batch["input_ids"])} if has_axes(flat.model) else batch


def three_axes(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    return {**batch, "position_ids": batch["position_ids"][1:]}


def lost_at_the_third(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """The second and the third sample are one."""
    parts = (
        [[sample] for sample in samples]
        if len(samples) < 3
        else [samples[:1], samples[1:3], *[[s] for s in samples[3:]]]
    )
    return {**batch, "position_ids": torch.cat([flat.positions(part) for part in parts], dim=-1)}


def ones(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def index_mask(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    return {**batch, "attention_mask": numbers_of(samples)}


def mask_of_pairs(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """4-D, of yes and no: causal, and within a sample."""
    numbers = numbers_of(samples)[0]
    allowed = (numbers[:, None] == numbers).tril()
    return {**batch, "attention_mask": allowed[None, None]}


def added_mask(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """4-D, to be added to scores."""
    allowed = mask_of_pairs(batch, samples, flat)["attention_mask"]
    return {**batch, "attention_mask": torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)}


def leaking_mask(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """4-D, and one boundary too few."""
    numbers = numbers_of(samples)[0]
    numbers = torch.where(numbers == 3, 2, numbers)
    return {**batch, "attention_mask": (numbers[:, None] == numbers).tril()[None, None]}


def boundaries(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    ends = torch.tensor([0, *accumulate(lengths_of(samples))], dtype=torch.int32)
    longest = max(lengths_of(samples))
    return {**batch, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def shifted_boundaries(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    made = boundaries(batch, samples, flat)
    ends = made["cu_seq_lens_q"].clone()
    ends[1:-1] += 1
    return {**made, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def all_labels(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """The first token of each sample is a target, too."""
    return {**batch, "labels": batch["input_ids"].clone()}


def shifted_labels(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """By one token over the row, as for a model that does not shift them itself."""
    return {**batch, "labels": batch["labels"].roll(-1, dims=-1)} if len(samples) > 1 else batch


def exchanged_images(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """The other way round, pixels and grids."""
    return {**batch, **media_of(samples[::-1])}


def without_the_last_token(batch: Batch, samples: list[Sample], flat: Flat) -> Batch:
    """Cut to a length, as of a model."""
    if len(samples) == 1:
        return batch
    per_token = {"input_ids", "labels", "position_ids"}
    return {name: value[..., :-1] if name in per_token else value for name, value in batch.items()}
