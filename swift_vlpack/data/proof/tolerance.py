"""How far two right ways to compute the same may differ: as rounding moves this very model, which is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

TIMES_NOISE = 8
"""Another kernel differs by about as much as the noise does, on 23 families by 0.3 to 1.4 times; leaks by 100 times."""
TIMES_NOISE_BESIDE_SINGLE = 16
"""The same for a model that was also compared in float32, where it is right: what is left to find in 16 bits is a
kernel of its own, and it is far off."""
TIMES_PADDED = 4
"""And so many times what a padded batch, un-packed and by the model's own attention, differs from its samples."""
TOKEN_TO_SAMPLE = 2
"""A single token may differ by so many times what its sample may, which is 15 times what was seen. So a token that is
wrong at a boundary of a long sample is not lost in the mean. One that another expert is asked of differs by more."""
MOST_OF_LOGITS, MOST_OF_GRADIENT = 0.5, 0.5
"""Shares of the largest logit and of the gradient that are a difference however much noise there is."""


class Floor(NamedTuple):
    """What rounding may do where no noise was measured: in shares of the largest logit, of the gradient's length."""

    moved: float
    """To a neighbour, which the same kernels compute from the same numbers."""
    logits: float
    gradient: float


FLOORS = {
    torch.float64: Floor(1e-9, 1e-5, 1e-4),  # some models take the softmax of their own attention in single precision
    torch.float32: Floor(1e-5, 1e-5, 1e-4),
    torch.float16: Floor(5e-3, 5e-3, 1e-2),
    torch.bfloat16: Floor(2e-2, 2e-2, 3e-2),
}


SHARP = Floor(1e-4, 1e-3, 1e-2)
"""What is no difference in float32, with any rounding that a model does there; ten times as much would be noticed."""
NOTICED = Floor(0.0, 1e-2, 3e-2)
"""Limits up to these would notice what is wrong. Wider ones, of 16 bits, are those of leaks and gross mistakes."""


class Noise(NamedTuple):
    """What one unit of rounding in every layer does to logits, and to the gradient as a share of its length."""

    logits: float
    gradient: float

    def times(self, factor: float) -> Noise:
        """So many times as much."""
        return Noise(factor * self.logits, factor * self.gradient)

    def at_least(self, other: Noise) -> Noise:
        """The larger of both."""
        return Noise(worst([self.logits, other.logits]), worst([self.gradient, other.gradient]))


class Limits(NamedTuple):
    """What is no difference on this model."""

    moved: float
    alone: float
    gradient: float
    relative: float
    """Of hidden states, in shares of the largest."""
    token: float = math.inf
    """Of a single token's logits, packed and alone."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, largest_logit: float, noise: Noise, repeated: float, *, has_experts: bool = False
    ) -> Limits:
        """From what the noise may do, between what the data type always does and what no rounding does."""
        floor, scale = FLOORS[dtype], max(1.0, largest_logit)
        alone = min(MOST_OF_LOGITS * scale, max(floor.logits * scale, noise.logits))
        return cls(
            max(floor.moved * scale, 4 * repeated),
            alone,
            min(MOST_OF_GRADIENT, max(floor.gradient, noise.gradient)),
            4 * floor.logits,
            math.inf if has_experts else TOKEN_TO_SAMPLE * alone,
        )

    @classmethod
    def sharp(cls, largest_logit: float, *, has_experts: bool = False) -> Limits:
        """Of float32, whatever the noise."""
        scale = max(1.0, largest_logit)
        alone = SHARP.logits * scale
        token = math.inf if has_experts else TOKEN_TO_SAMPLE * alone
        return cls(SHARP.moved * scale, alone, SHARP.gradient, 4 * SHARP.logits, token)

    def would_notice(self, largest_logit: float) -> bool:
        """Whether they are narrow enough for what lies within them to be equal."""
        return self.alone <= NOTICED.logits * max(1.0, largest_logit) and self.gradient <= NOTICED.gradient

    def allow(self, gap: Gap) -> bool:
        """Whether two logits of a sample are the same; not a number is not."""
        return gap.over_tokens <= self.alone and gap.most <= self.token


class Gap(NamedTuple):
    """How far the logits of a sample differ: at most, and over its tokens, as the root of the mean square.

    The latter decides where there are experts: in 16 bits one unit of rounding sends a token to another one, and it
    differs a lot.
    """

    most: float
    over_tokens: float


def gap_of(one: torch.Tensor, other: torch.Tensor) -> Gap:
    """Of one sample."""
    by_token = gap_by_token(one, other)
    return Gap(float(by_token.max()), float(by_token.square().mean().sqrt()))


def gap_by_token(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far the logits of each token differ."""
    return (one.float() - other.float()).abs().amax(dim=-1)


def worst(sizes: Sequence[float]) -> float:
    """The largest; NaN stays NaN, which Python's max may lose."""
    return float(np.max([0.0, *sizes]))


@contextmanager
def rounded_otherwise(model: torch.nn.Module, dtype: torch.dtype, seed: int = 0) -> Iterator[None]:
    """Every layer's output is off by half a unit of rounding, up or down at random, as another kernel's might be."""
    unit = torch.finfo(dtype).eps / 2
    if dtype == torch.float32 and rounds_coarsely(model, dtype):
        unit = 2.0**-11
    generator = torch.Generator().manual_seed(seed)

    def off(value: Any) -> Any:
        if isinstance(value, tuple):
            return off(value[0]), *value[1:]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
        return (value.float() * (1 + signs * unit)).to(value.dtype)

    layers = [layer for module in model.modules() if isinstance(module, torch.nn.ModuleList) for layer in module]
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    modules = [*layers, *([embeddings] if embeddings is not None else [])]
    handles = [module.register_forward_hook(lambda module, args, made: off(made)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rounds_coarsely(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether a model computes in 16 bits, or in 19: PyTorch's convolutions do so on CUDA by default."""
    takes_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    return torch.finfo(dtype).bits == 16 or (dtype == torch.float32 and takes_tf32 and next(model.parameters()).is_cuda)


def precision_of(model: Any, forward: Callable[[], Any]) -> torch.dtype:
    """The precision that limits the proof: that of the weights, or what autocast makes of it before the logits."""
    seen = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()][:1]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        forward()
        return coarsest(seen)
    handle = head.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    try:
        forward()
    finally:
        handle.remove()
    return coarsest(seen)


def coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The one of them that rounds most."""
    known = (dtype for dtype in dtypes if dtype in FLOORS)
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
