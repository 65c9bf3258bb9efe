"""The model without us: its own attention, nothing drawn at random, and everything given back afterwards."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from swift_vlpack.rows.families import text_config_of

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
_OF_16_BITS = (torch.bfloat16, torch.float16)
_CHOOSING = ("embedding", "__getitem__", "index_select")
"""Operations that take some rows of a tensor: these are widened, not the whole, which may be a vocabulary."""


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


class InSingle(TorchFunctionMode):
    """Compute in float32 whatever the weights are in: each 16-bit tensor is widened as an operation takes it.

    A second model may not fit into memory beside the first. Here at most one weight is there twice, or those of a layer
    that is run again in the backward. `leaves` are float32 copies of parameters whose gradients are asked for.

    Autocast is off for each operation, because accelerate wraps it around the model's own forward.
    """

    def __init__(self, device: str, leaves: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.device = device
        self.leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # of an attribute
            made = func(*args, **kwargs)
            return self._widened(made) if isinstance(made, torch.dtype) else made
        if name in ("bfloat16", "half"):
            return self._widened(args[0])
        widened = self._leaf if name in _CHOOSING else self._widened
        args, kwargs = _each(widened, args), _each(widened, kwargs)
        with torch.autocast(self.device, enabled=False):
            return _each(self._widened, func(*args, **kwargs))

    def _leaf(self, value: Any) -> Any:
        return self.leaves.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = self._leaf(value)
            return value.float() if value.dtype in _OF_16_BITS else value
        return torch.float32 if isinstance(value, torch.dtype) and value in _OF_16_BITS else value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Change a value, or each value in lists, tuples and mappings of values."""
    if isinstance(value, dict):
        return {key: _each(change, one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(change, one) for one in value))
    if type(value) in (list, tuple):
        return type(value)(_each(change, one) for one in value)
    return change(value)


@contextmanager
def in_single(
    forward_context: AbstractContextManager[Any], device: str, leaves: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    """Run a forward in float32: without autocast and TF32, and with 16-bit weights widened."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with forward_context, InSingle(device, leaves):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


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
