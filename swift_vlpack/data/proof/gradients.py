"""Gradients of a small set of parameters, which leave no trace on them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

_CHECKPOINT = "_gradient_checkpointing_func"
"""What transformers and ms-swift run a layer by that does not keep what its backward needs."""
_PARTS = ("visual", "vision", "audio", "image")


@contextmanager
def small_set(model: torch.nn.Module) -> Iterator[dict[str, torch.nn.Parameter]]:
    """The weights of norms and the biases, which every path of the model goes through, frozen or not.

    Their gradients are taken by `torch.autograd.grad`, which fills no `.grad` and wakes no hook of DDP's. Layers that
    are run again in the backward are so here, too, by the form of checkpointing that knows that function. Empty where
    parameters are sharded: no rank has a gradient to compare.
    """
    chosen = {name: one for name, one in model.named_parameters() if one.dim() == 1 and one.is_floating_point()}
    if any(_is_sharded(parameter) for parameter in model.parameters()):
        chosen = {}
    before = [(parameter, parameter.requires_grad) for parameter in chosen.values()]
    checkpointed = [
        (module, vars(module)[_CHECKPOINT]) for module in model.modules() if vars(module).get(_CHECKPOINT) is not None
    ]
    try:
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        for module, _ in checkpointed:
            vars(module)[_CHECKPOINT] = _not_reentrant()
        yield chosen
    finally:
        for parameter, was_required in before:
            parameter.requires_grad_(was_required)
        for module, checkpoint in checkpointed:
            vars(module)[_CHECKPOINT] = checkpoint


def added(gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The gradient of all samples of a step, from those of each."""
    total: dict[str, torch.Tensor] = {}
    for gradient in gradients:
        for name, grad in gradient.items():
            total[name] = total[name] + grad.float() if name in total else grad.float()
    return total


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """How far apart two gradients are in each part of the model, as a share of the larger.

    Over a whole part, because single parameters have gradients of nothing but rounding: the bias of attention's keys.
    """
    lengths, gaps = _squares(one, other)
    whole = sum(lengths.values())
    return {part: (gaps[part] / max(length, 1e-6 * whole, 1e-30)) ** 0.5 for part, length in lengths.items()}


def _squares(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    lengths: dict[str, float] = {}
    gaps: dict[str, float] = {}
    for name in {**one, **other}:
        part = next((part for part in _PARTS if part in name), "language")
        here, there = (side[name].float() if name in side else torch.zeros(()) for side in (one, other))
        lengths[part] = lengths.get(part, 0.0) + max(float((here * here).sum()), float((there * there).sum()))
        gaps[part] = gaps.get(part, 0.0) + float((here - there).square().sum())
    return lengths, gaps


def _not_reentrant() -> Any:
    """Torch's own, below what a host has put around it to choose the form (ms-swift takes the reentrant one)."""
    return partial(inspect.unwrap(torch.utils.checkpoint.checkpoint), use_reentrant=False)


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh") or not parameter.numel()
