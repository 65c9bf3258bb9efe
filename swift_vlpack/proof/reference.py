"""Run the model without packing: with its own attention, without random draws, and restore everything afterwards.

The reference of the proof is each sample alone, run by the model's own attention and collated by the host.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from swift_vlpack.proof.gradients import ParametersInFloat32, run_again_in
from swift_vlpack.proof.runner import Runner, length_of
from swift_vlpack.proof.shards import is_sharded
from swift_vlpack.rows.families import text_config_of
from swift_vlpack.rows.samples import Encoded

OWN = "eager"
"""The attention that defines the model. Other implementations are faster and may silently drop arguments: sdpa supports
neither sinks nor soft caps."""
QUICK = "sdpa"
"""Replaces `OWN` for samples that are too long for a matrix of L x L, if both are equal on a short sample."""
_BYTES_OF_FORWARD, _BYTES_OF_BACKWARD = 2**31, 2**33
"""Most memory that the attention weights of one sample may take: a few GB, beside a model that is to be trained."""
_DRAWS = re.compile(r"drop|jitter|neftune_noise_alpha")
"""Names of attributes that hold the rates of random draws in training."""
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
_EQUAL, _EQUAL_IN_16_BITS = 1e-4, 5e-2
"""Share of the largest hidden state by which sdpa may differ from the model's own attention, to stand in for it."""
_SCALARS = (bool, int, float, str, type(None))
_OF_16_BITS = (torch.bfloat16, torch.float16)
_BYTES_IN_FLOAT32 = 2**33
"""Most memory that float32 copies of the weights may take, beside the model, until the backward is done."""
_SPARE = 2**31
"""Memory that has to be free for a forward in float32, beside the largest weight: that of a sample's attention."""
_CHOOSING = ("embedding", "__getitem__", "index_select")
"""Operations that select parts of a tensor. They run on the 16-bit weight, and only their result is widened, because
the whole weight may be the embeddings of a vocabulary."""


def reference_for(
    runner: Runner, samples: Sequence[Encoded], *, is_trained: bool, stand_in: Sequence[Encoded] = ()
) -> Callable[[Encoded], str | None]:
    """Return the function that names the attention for a sample alone: the model's own, or sdpa if that is equal.

    Both are compared on the shortest of the samples if one of them is too long for the model's own, which needs a
    matrix of L x L; sdpa needs none, but drops arguments that some models use. `is_trained` says that a backward
    follows, for which all layers keep their attention weights. If parameters are sharded, all ranks compare, because
    they run equally many forwards; without samples, they run `stand_in`.
    """
    limit, is_equal = longest_for_own(runner.model, is_trained=is_trained), False
    if is_sharded(runner.model) or any(length_of(one) > limit for one in samples):
        shortest, found = sorted(samples, key=length_of)[:1], []
        with repeatable_training(runner.model):
            for name in (OWN, QUICK):
                with own_attention(runner.model, name):
                    found.append(runner.run(shortest or stand_in, packed=not shortest))
        own, quick = (ran.states.float() for ran in found)
        off = float((own - quick).abs().max()) / max(float(own.abs().max()), 1e-6)
        is_equal = off <= (_EQUAL_IN_16_BITS if torch.finfo(found[0].dtype).bits == 16 else _EQUAL)
    return lambda sample: OWN if length_of(sample) <= limit else QUICK if is_equal else None


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Run a check without gradients and dropout, then restore modes, settings, buffers and random states."""
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
def repeatable_training(model: torch.nn.Module) -> Iterator[bool]:
    """Switch to training mode with all rates of random draws at 0, so that equal samples give equal logits.

    Yields whether a rate was above 0: a custom kernel may draw without torch's generators.
    """
    owners = [*model.modules(), *configs_of(model)]
    settings, has_rates = _settings(owners), False
    try:
        model.train()
        # Rates are found by name, because models keep them in many places: modules, configs, arguments of functions.
        for owner in owners:
            rates = [name for name, value in vars(owner).items() if type(value) is float and _DRAWS.search(name)]
            for name in [*rates, *(["p"] if isinstance(owner, _DROPOUTS) else [])]:
                has_rates |= vars(owner)[name] != 0
                vars(owner)[name] = 0.0
        yield has_rates
    finally:
        _restore(settings)


@contextmanager
def own_attention(model: Any, name: str = OWN) -> Iterator[None]:
    """Let all parts of the model use the attention that defines it, or another one by `name`; then switch back."""
    configs = [config for config in configs_of(model) if hasattr(config, "_attn_implementation")]
    settings = _settings(configs)
    try:
        # transformers' own setter is not used: it warns each time about parts that were not loaded, such as a talker.
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        _restore(settings)


class Float32Mode(TorchFunctionMode):
    """Compute in float32, whatever the type of the weights: each 16-bit tensor is widened when an operation takes it.

    A second model may not fit into memory beside the first. Here at most one weight exists twice, or the weights of
    one layer that is run again in the backward. `leaves` are float32 copies of parameters that get a gradient.

    Autocast is off for each operation, because accelerate wraps it around the model's own forward.
    """

    def __init__(self, device: str, leaves: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.device = device
        self.leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # access to an attribute
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
def in_float32(runner: Runner) -> Iterator[tuple[Runner, ParametersInFloat32 | None]]:
    """Yield a runner of the same model that computes in float32, and copies of its norms and biases for gradients.

    None stands for the copies if the backward would keep too many weights in float32. With gradient checkpointing only
    the weights of one layer are kept at a time; without it, those of all layers until the backward.
    """
    model, parameters = runner.model, ParametersInFloat32(runner.model)
    device = next(model.parameters()).device.type
    # Only 16-bit weights are widened; others are in float32 already.
    num_bytes = sum(4 * one.numel() for one in model.parameters() if one.element_size() == 2)
    mode = partial(Float32Mode, device, parameters.by_id)

    @contextmanager
    def context() -> Iterator[None]:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        try:
            with runner.forward_context(), mode():
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]

    with run_again_in(model, lambda: (nullcontext(), mode())) as num_run_again:
        again = replace(runner, forward_context=context)
        yield again, parameters if num_run_again or num_bytes <= _BYTES_IN_FLOAT32 else None


def why_not_in_float32(model: torch.nn.Module) -> str:
    """Return the reason why a model cannot be run in float32, as far as it is known before; empty if there is none."""
    if is_sharded(model):
        return "parameters are sharded"
    if any(not one.is_floating_point() or one.element_size() == 1 for one in model.parameters()):
        return "weights are quantised"
    device = next(model.parameters()).device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        needed = _SPARE + 4 * max(one.numel() for one in model.parameters())
        if free - torch.cuda.memory_allocated(device) < needed:
            return f"it needs {needed / 2**30:.1f} GB of free memory"
    return ""


def is_coarse(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a model computes in 16 bits, or in TF32 (19 bits), CUDA's default for convolutions."""
    takes_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    is_tf32 = dtype == torch.float32 and takes_tf32 and next(model.parameters()).is_cuda
    return torch.finfo(dtype).bits == 16 or is_tf32


def longest_for_own(model: Any, *, is_trained: bool = False) -> int:
    """Return the longest sample whose attention weights fit: those of one layer, or of all layers for a backward."""
    text = text_config_of(getattr(model, "config", None))
    num_heads = getattr(text, "num_attention_heads", None) or 32
    num_layers = (getattr(text, "num_hidden_layers", None) or 32) if is_trained else 1
    most = _BYTES_OF_BACKWARD if is_trained else _BYTES_OF_FORWARD
    return int((most / (10 * num_heads * num_layers)) ** 0.5)  # 10 bytes: float32 for the softmax, and twice in 16 bits


def configs_of(model: torch.nn.Module) -> list[Any]:
    """Return all configs that the parts of a model read while they run."""
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
    """Copy all plain values of modules and configs: modes, rates, attention, lengths that RoPE remembers."""
    return [
        (owner, {name: value for name, value in vars(owner).items() if isinstance(value, _SCALARS)}) for owner in owners
    ]


def _restore(settings: list[tuple[Any, dict[str, Any]]]) -> None:
    for owner, values in settings:
        vars(owner).update(values)


def _buffers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Return all buffers and copies of them: a model may change a buffer, or replace it by another."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
