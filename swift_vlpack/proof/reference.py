"""Run the model without packing: with its own attention, without random draws, and restore everything afterwards.

The reference of the proof is each sample alone, run by the model's own attention and collated by the host.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from swift_vlpack.proof.limits import coarsest, gap_of, without_noise
from swift_vlpack.proof.proof_model import ProofModel, RunResult, length_of
from swift_vlpack.rows.contents import NO_LABEL
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
_FEW_WORDS = 200
"""Length of the sample on which `OWN` and `QUICK` are compared."""
_SCALARS = (bool, int, float, str, type(None))
_OF_16_BITS = (torch.bfloat16, torch.float16)
_CHOOSING = ("embedding", "__getitem__", "index_select")
"""Operations that select parts of a tensor. They run on the 16-bit weight, and only their result is widened, because
the whole weight may be the embeddings of a vocabulary."""


class Reference:
    """Decide which samples can be run alone: by the model's own attention, or by sdpa if it is equal on this model."""

    def __init__(self, proof_model: ProofModel, samples: Sequence[Encoded]) -> None:
        self.proof_model = proof_model
        self.limit = longest_for_own(proof_model.model)
        self.short = words_of(min(samples, key=length_of), proof_model.is_ordinary)

    def is_for(self, samples: Sequence[Encoded]) -> bool:
        """Tell whether all these samples can be run alone as a reference."""
        return all(length_of(sample) <= self.limit for sample in samples) or self._has_equal

    def known(self, samples: Sequence[Encoded]) -> Sequence[Encoded]:
        """Select the samples that can be run alone; only the two shortest if even they are too long."""
        by_length = sorted(samples, key=length_of)
        return [one for one in samples if self.is_for([one])] if self.is_for(by_length[:2]) else by_length[:2]

    @cached_property
    def _has_equal(self) -> bool:
        """Tell whether sdpa equals the model's own attention on a few words.

        sdpa can run long samples, because it needs no matrix of L x L. But it drops arguments that some models use.
        """
        logits = []
        for name in (OWN, QUICK):
            with own_attention(self.proof_model.model, name):
                logits.append(self.proof_model.run([self.short], packed=False).logits[0])
        return gap_of(*logits).most <= without_noise(coarsest([logits[0].dtype]), logits[0])


def words_of(sample: Encoded, is_ordinary: Callable[[int], bool], most: int = _FEW_WORDS) -> Encoded:
    """Make a sample from the words of another sample, with at most `most` tokens."""
    tokens = [token for token in sample["input_ids"] if is_ordinary(token)][:most]
    return {"input_ids": tokens, "labels": [NO_LABEL, *tokens[1:]], "length": len(tokens)}


def run_alone(
    proof_model: ProofModel, sample: Encoded, parameters: Mapping[str, torch.Tensor] | None = None
) -> RunResult:
    """Run one sample as the host does without packing; with `parameters` also a backward (`ProofModel.run`)."""
    with own_attention_for(proof_model.model, length_of(sample)):
        return proof_model.run([sample], packed=False, parameters=parameters)


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
def repeatable_training(model: torch.nn.Module) -> Iterator[None]:
    """Switch to training mode with all rates of random draws at 0, so that equal samples give equal logits."""
    owners = [*model.modules(), *configs_of(model)]
    settings = _settings(owners)
    try:
        model.train()
        # Rates are found by name, because models keep them in many places: modules, configs, arguments of functions.
        for owner in owners:
            rates = [name for name, value in vars(owner).items() if type(value) is float and _DRAWS.search(name)]
            for name in [*rates, *(["p"] if isinstance(owner, _DROPOUTS) else [])]:
                vars(owner)[name] = 0.0
        yield
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
def in_float32(
    forward_context: AbstractContextManager[Any], device: str, leaves: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    """Run a forward in float32: without autocast and TF32, and with 16-bit weights widened."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with forward_context, Float32Mode(device, leaves):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def longest_for_own(model: Any, *, is_trained: bool = False) -> int:
    """Return the longest sample whose attention weights fit: those of one layer, or of all layers for a backward."""
    text = text_config_of(getattr(model, "config", None))
    num_heads = getattr(text, "num_attention_heads", None) or 32
    num_layers = (getattr(text, "num_hidden_layers", None) or 32) if is_trained else 1
    most = _BYTES_OF_BACKWARD if is_trained else _BYTES_OF_FORWARD
    return int((most / (10 * num_heads * num_layers)) ** 0.5)  # 10 bytes: float32 for the softmax, and twice in 16 bits


def own_attention_for(model: Any, num_tokens: int, *, is_trained: bool = False) -> AbstractContextManager[None]:
    """Let a sample of this length run by the model's own attention; by sdpa if it is too long for that.

    `is_trained` says that a backward follows, for which all layers keep their attention weights.
    """
    return own_attention(model, OWN if num_tokens <= longest_for_own(model, is_trained=is_trained) else QUICK)


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
