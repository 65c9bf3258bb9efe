"""A packed row against its samples alone: tiny real models of transformers, their own `eager` as reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import transformers

from swift_vlpack.attention.attention import NAME, register

VOCABULARY = 512
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LENGTHS = (23, 1, 40, 9)
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
IMAGE = 500

Sample = dict[str, torch.Tensor]


def text(**changed: Any) -> dict[str, Any]:
    """The options of a tiny language model."""
    options = {**TEXT, **changed}
    return {name: value for name, value in options.items() if value is not None}


def built(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a config with weights large enough that attention matters, its attention `eager`."""
    register()
    torch.manual_seed(seed)
    mapping = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = transformers.AutoModelForImageTextToText if type(config) in mapping else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.12)
    model.set_experts_implementation("eager")  # the others know no float64
    return model.to(dtype).eval()


def samples_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[Sample]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 480, (1, length), generator=generator)} for length in lengths]


def with_images(places: tuple[tuple[int, ...], ...], num_tokens: int, pixels: int = 28) -> list[Sample]:
    """Samples of which each has images of `num_tokens` tokens, from the places that are named."""
    generator = torch.Generator().manual_seed(2)
    samples = samples_of(tuple(30 + 7 * number for number in range(len(places))))
    for sample, starts in zip(samples, places, strict=True):
        kinds = torch.zeros_like(sample["input_ids"])
        for start in starts:
            sample["input_ids"][:, start : start + num_tokens] = IMAGE
            kinds[:, start : start + num_tokens] = 1
        sample["token_type_ids"] = sample["mm_token_type_ids"] = kinds
        if starts:
            sample["pixel_values"] = torch.randn(len(starts), 3, pixels, pixels, generator=generator)
    return samples


def packed(samples: list[Sample]) -> Sample:
    """One row with restarted positions and boundaries, as the collator makes it."""
    lengths = [sample["input_ids"].shape[1] for sample in samples]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = torch.tensor(max(lengths))
    row = {name: torch.cat([s[name] for s in samples if name in s], dim=1) for name in names_by_token(samples)}
    if any("pixel_values" in sample for sample in samples):
        row["pixel_values"] = torch.cat([s["pixel_values"] for s in samples if "pixel_values" in s])
    row["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def names_by_token(samples: list[Sample]) -> list[str]:
    """What has a value for every token."""
    return [name for name in samples[0] if name != "pixel_values"]


def run(model: Any, inputs: Sample, taken: Callable[[str], bool]) -> torch.Tensor:
    """The logits of a row, (num_tokens, vocabulary)."""
    dtype = next(model.parameters()).dtype
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items() if taken(name)
    }
    logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


def compared(
    model: Any, samples: list[Sample], taken: Callable[[str], bool] = lambda name: "token_type" not in name
) -> tuple[float, float]:
    """The largest differences of logits and of gradients, packed under `vlpack` from alone under `eager`."""
    weights = [torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) for _ in samples]

    def score(logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (logits.log_softmax(-1) * weight.to(logits)).sum(-1).mean()

    model.set_attn_implementation("eager")
    model.zero_grad()
    alone = []
    for sample, weight in zip(samples, weights, strict=True):
        mask = torch.ones_like(sample["input_ids"])
        alone.append(run(model, {**sample, "attention_mask": mask}, taken))
        score(alone[-1], weight).backward()
    expected = gradients(model)
    model.set_attn_implementation(NAME)
    model.zero_grad()
    made = run(model, packed(samples), taken).split([len(logits) for logits in alone])
    sum(score(logits, weight) for logits, weight in zip(made, weights, strict=True)).backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert max(float(logits.detach().abs().max()) for logits in alone) > 0.1, "a model that computes something"
    return gap(alone, list(made)), gap(list(expected.values()), [found[name] for name in expected])


def gap(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference of any two, in units of the largest value of them all (at least 1)."""
    largest = max(1.0, *(float(one.detach().abs().max()) for one in expected))
    pairs = zip(expected, found, strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs) / largest


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of all parameters that have one."""
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
