"""Compare gradients and leave no trace on the model: use those of norms and biases only, taken by `autograd.grad`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from swift_vlpack.proof.proof_model import VISION_PARTS
from swift_vlpack.proof.reference import Float32Mode
from swift_vlpack.proof.shards import let_go, shape_of, whole

_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes that hold the function of gradient checkpointing: on a layer (transformers and ms-swift), and on torch's
wrapper around a layer (FSDP)."""
_BYTES_IN_FLOAT32 = 2**33
"""Most memory that float32 copies of the weights may take, beside the model, until the backward is done."""


@contextmanager
def small_set(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of norms and the biases, frozen or not, because every path of the model goes through some.

    Take their gradients by `torch.autograd.grad`, which fills no `.grad` and runs no hook of DDP. Gradient
    checkpointing stays on, in the non-reentrant form, because the reentrant one does not support that function.
    If parameters are sharded, these are the whole ones (`shards.whole`), and all ranks must enter and leave together.
    The mapping is empty if they cannot be found.
    """
    let_go(model)
    chosen = _norms_and_biases(model)
    of_forward = whole(model, chosen)
    before = [(chosen[name], chosen[name].requires_grad) for name in of_forward]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(True)
        with _run_again(model):
            yield of_forward
    finally:
        for parameter, was_required in before:
            parameter.requires_grad_(was_required)
        let_go(model)


@contextmanager
def small_set_in_float32(model: torch.nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]]:
    """Yield float32 copies of the small set, by name and by the `id` of the parameter.

    The mapping by name is empty if the backward would keep too many weights in float32. With gradient checkpointing
    only the weights of one layer are kept at a time; without it, those of all layers until the backward.
    """
    leaves = {name: one.detach().float().requires_grad_(True) for name, one in _norms_and_biases(model).items()}
    by_id = {id(one): leaves[name] for name, one in _norms_and_biases(model).items()}
    # Only 16-bit weights are widened; others are in float32 already.
    num_bytes = sum(4 * one.numel() for one in model.parameters() if one.element_size() == 2)
    with _run_again(
        model, lambda: (nullcontext(), Float32Mode(next(model.parameters()).device.type, by_id))
    ) as num_run_again:
        yield (leaves if num_run_again or num_bytes <= _BYTES_IN_FLOAT32 else {}), by_id


def _norms_and_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if len(shape_of(one)) == 1 and one.is_floating_point()}


@contextmanager
def _run_again(model: torch.nn.Module, contexts: Callable[[], Any] | None = None) -> Iterator[int]:
    """Switch gradient checkpointing to torch's non-reentrant form; yield how many modules are checkpointed.

    `contexts` makes two context managers: for a layer's forward, and for its second run in the backward.
    """
    # Each layer that is checkpointed keeps the function to do so, as an attribute.
    checkpointed = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in _CHECKPOINTS
        if vars(module).get(name) is not None
    ]
    try:
        for module, name, _ in checkpointed:
            vars(module)[name] = _not_reentrant(contexts)
        yield len(checkpointed)
    finally:
        for module, name, checkpoint in checkpointed:
            vars(module)[name] = checkpoint


def added(gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Add up the gradients of samples alone, to compare them with the gradient of their sequence."""
    total: dict[str, torch.Tensor] = {}
    for gradient in gradients:
        for name, grad in gradient.items():
            total[name] = total[name] + grad.float() if name in total else grad.float()
    return total


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return how far apart two gradients are in each part of the model, as a share of the larger.

    Over a whole part, because the gradient of a single parameter may be nothing but rounding errors, such as that of
    the bias of attention's keys.
    """
    lengths, gaps = _squares(one, other)
    # A part with next to no gradient is nothing but rounding, so each part counts as at least a thousandth of the whole
    # (a millionth here, because these are squares).
    whole = sum(lengths.values())
    return {part: (gaps[part] / max(length, 1e-6 * whole, 1e-30)) ** 0.5 for part, length in lengths.items()}


def _squares(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    lengths: dict[str, float] = {}
    gaps: dict[str, float] = {}
    for name in {**one, **other}:
        part = next((part for part in VISION_PARTS if part in name), "language")
        here, there = (side[name].float() if name in side else torch.zeros(()) for side in (one, other))
        lengths[part] = lengths.get(part, 0.0) + max(float((here * here).sum()), float((there * there).sum()))
        gaps[part] = gaps.get(part, 0.0) + float((here - there).square().sum())
    return lengths, gaps


def _not_reentrant(contexts: Callable[[], Any] | None) -> Any:
    """Return torch's checkpoint function in its non-reentrant form.

    Unwrapped, because a host may have wrapped it to choose the form (ms-swift chooses the reentrant one).
    """
    options = {} if contexts is None else {"context_fn": contexts}
    return partial(inspect.unwrap(torch.utils.checkpoint.checkpoint), use_reentrant=False, **options)
