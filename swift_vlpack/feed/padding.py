"""What fills a row up, or stands in one of which no sample could be read: a segment of its own without loss."""

from __future__ import annotations

from typing import Any

import torch

from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.samples import Encoded

_PLACEHOLDER_ROW = {"messages": [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]}


def placeholder(template: Template) -> Encoded:
    """A sample of a few tokens, none of them with a label."""
    sample: Encoded = template.encode(_PLACEHOLDER_ROW, return_length=True)
    sample["labels"] = [NO_LABEL] * len(sample["input_ids"])
    return sample


def padded(template: Template, samples: list[Encoded], multiple: int) -> list[Encoded]:
    """The samples, and behind them one of padding where their row would be no multiple of so many tokens."""
    missing = -sum(int(sample["length"]) for sample in samples) % multiple
    if not missing:
        return samples
    segment = padding(template, missing)
    if "channel" in samples[0]:  # one that is measured already: ranks have to measure the same ones
        segment["channel"] = samples[0]["channel"]
    return [*samples, segment]


def padding(template: Template, num_tokens: int) -> Encoded:
    """A sample of pad tokens alone, with all that the template gives a text."""
    like = placeholder(template)
    num_there = len(like["input_ids"])
    sample = {name: _of_length(value, num_there, num_tokens) for name, value in like.items()}
    token = template.tokenizer.pad_token_id  # which ms-swift's templates cannot be without
    return {**sample, "input_ids": [token] * num_tokens, "labels": [NO_LABEL] * num_tokens, "length": num_tokens}


def _of_length(value: Any, num_there: int, num_tokens: int) -> Any:
    """What there is one of for every token, for so many; anything else as it is."""
    if isinstance(value, list) and len(value) == num_there:
        return value[:1] * num_tokens
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[-1] == num_there:
        return value[..., :1].expand(*value.shape[:-1], num_tokens).clone()
    return value
