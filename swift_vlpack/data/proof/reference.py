"""The model without us: its own attention, nothing drawn at random, and everything given back afterwards."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from swift_vlpack.data.seam.configs import text_config_of

OWN = "eager"
"""The model's definition. What else it can run with is quicker, and may drop what attention it asks for: sdpa knows
neither sinks nor soft caps."""
QUICK = "sdpa"
"""What stands in for it where a sample is too long for a matrix of all its tokens by all its tokens, if it is equal."""
_BYTES_OF_FORWARD, _BYTES_OF_BACKWARD = 2**31, 2**33
"""That the attention weights of one sample alone may take; a few GB beside a model that is to be trained."""
_DRAWS = re.compile(r"drop|jitter|neftune_noise_alpha")
"""Rates of what a model draws at random while it trains, by the names that models give them."""
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
_SCALARS = (bool, int, float, str, type(None))


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Run a check without gradients and dropout, then give back modes, settings, buffers and random states."""
    settings, buffers = _settings([*model.modules(), *configs_of(model)]), _buffers(model)
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        _restore(settings)
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
                setattr(module, name, buffer)


@contextmanager
def repeatable_training(model: torch.nn.Module) -> Iterator[None]:
    """Training mode, as the model will train, in which the same samples give the same logits: all rates are 0."""
    owners = [*model.modules(), *configs_of(model)]
    settings = _settings(owners)
    try:
        model.train()
        for owner in owners:
            rates = [name for name, value in vars(owner).items() if type(value) is float and _DRAWS.search(name)]
            for name in [*rates, *(["p"] if isinstance(owner, _DROPOUTS) else [])]:
                vars(owner)[name] = 0.0
        yield
    finally:
        _restore(settings)


@contextmanager
def own_attention(model: Any, name: str = OWN) -> Iterator[None]:
    """The attention that defines the model, in all its parts; for a while, and on the very model that trains."""
    configs = [config for config in configs_of(model) if hasattr(config, "_attn_implementation")]
    settings = _settings(configs)
    try:
        for config in configs:  # transformers' own setter warns every time of parts that were not loaded (a talker)
            config._attn_implementation = name
        yield
    finally:
        _restore(settings)


def longest_for_own(model: Any, *, is_trained: bool = False) -> int:
    """Tokens of the longest sample whose attention weights are small enough: of one layer, or of all in a backward."""
    text = text_config_of(getattr(model, "config", None))
    num_heads = getattr(text, "num_attention_heads", None) or 32
    num_layers = (getattr(text, "num_hidden_layers", None) or 32) if is_trained else 1
    most = _BYTES_OF_BACKWARD if is_trained else _BYTES_OF_FORWARD
    return int((most / (10 * num_heads * num_layers)) ** 0.5)  # 10: in float for softmax, and twice in the data type


def fitting(model: Any, num_tokens: int) -> str:
    """The attention to ask what a sample of so many tokens gives."""
    return OWN if num_tokens <= longest_for_own(model) else QUICK


def configs_of(model: torch.nn.Module) -> list[Any]:
    """The configs that the parts of a model read while they run."""
    found: dict[int, Any] = {}
    for module in model.modules():
        waiting = [getattr(module, "config", None)]
        while waiting:
            config = waiting.pop()
            if config is None or id(config) in found or not hasattr(config, "__dict__"):
                continue
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())


def _settings(owners: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """All plain values of modules and configs: modes, rates, attention, lengths that RoPE remembers."""
    return [
        (owner, {name: value for name, value in vars(owner).items() if isinstance(value, _SCALARS)}) for owner in owners
    ]


def _restore(settings: list[tuple[Any, dict[str, Any]]]) -> None:
    for owner, values in settings:
        vars(owner).update(values)


def _buffers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Buffers as they are, and copies: a model may change one, or put another in its place."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
