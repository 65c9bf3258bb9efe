"""Decide how far two correct computations may differ: by about as much as rounding moves this model.

The effect of rounding is measured on the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

TIMES_NOISE = 8
"""Factor from measured noise to the limit: another kernel differs by 0.3 to 1.4 times the noise on 23 families, a leak
by 100 times."""
TIMES_NOISE_BESIDE_FLOAT32 = 16
"""The factor for a model that was also compared in float32. All that is left to find in 16 bits is a mistake in a
kernel that runs only there, and such a mistake is large."""
TIMES_PADDED = 4
"""Factor to the limit from the difference between an un-packed, padded batch and its samples, by the model's own
attention."""
TOKEN_TO_SAMPLE = 2
"""Factor from the limit of a sample to the limit of a single token, which is then 15 times the largest difference that
was seen in a correct run. Without a limit for tokens, one wrong token at a boundary of a long sample would be lost in
the mean. Models with experts have no such limit, because a token that rounding sends to another expert differs by
more."""
MOST_OF_LOGITS, MOST_OF_GRADIENT = 0.5, 0.5
"""Upper bounds of the limits, however much noise there is: shares of the largest logit and of the gradient."""


class Floor(NamedTuple):
    """Limits as shares: of the largest logit, and of the length of the gradient.

    `FLOORS` holds them for each data type as lower bounds of the limits, however little noise there is.
    """

    moved: float
    """For a sample whose neighbours changed. The smallest limit: the same kernels compute it from the same numbers."""
    logits: float
    gradient: float


FLOORS = {
    torch.float64: Floor(1e-9, 1e-5, 1e-4),  # some models take the softmax of their own attention in single precision
    torch.float32: Floor(1e-5, 1e-5, 1e-4),
    torch.float16: Floor(5e-3, 5e-3, 1e-2),
    torch.bfloat16: Floor(2e-2, 2e-2, 3e-2),
}


SHARP = Floor(1e-4, 1e-3, 1e-2)
"""Fixed limits for float32, wide enough for any model's rounding there; a mistake of ten times as much is noticed."""
TIMES_FLOOR = 4
"""Factor from the floor of the data type to the limit of a comparison for which no noise was measured."""
NOTICED = Floor(0.0, 1e-2, 3e-2)
"""Widest limits under which a proof may say "verified". Wider limits, as in 16 bits, show only gross mistakes."""


class Noise(NamedTuple):
    """Effect of one unit of rounding in every layer on logits, and on the gradient as a share of its length."""

    logits: float
    gradient: float

    def times(self, factor: float) -> Noise:
        """Return the noise multiplied by `factor`."""
        return Noise(factor * self.logits, factor * self.gradient)

    def at_least(self, other: Noise) -> Noise:
        """Return the larger of both, field by field."""
        return Noise(worst([self.logits, other.logits]), worst([self.gradient, other.gradient]))


class Limits(NamedTuple):
    """Largest differences that count as equal on this model."""

    moved: float
    alone: float
    gradient: float
    relative: float
    """For hidden states, as a share of the largest."""
    token: float = math.inf
    """For the logits of a single token, packed against alone."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, largest_logit: float, noise: Noise, repeated: float, *, has_experts: bool = False
    ) -> Limits:
        """Derive limits from the noise, between the floor of the data type and the upper bounds for any rounding."""
        floor, scale = FLOORS[dtype], max(1.0, largest_logit)
        alone = min(MOST_OF_LOGITS * scale, max(floor.logits * scale, noise.logits))
        return cls(
            max(floor.moved * scale, 4 * repeated),
            alone,
            min(MOST_OF_GRADIENT, max(floor.gradient, noise.gradient)),
            TIMES_FLOOR * floor.logits,
            math.inf if has_experts else TOKEN_TO_SAMPLE * alone,
        )

    @classmethod
    def sharp(cls, largest_logit: float, *, has_experts: bool = False) -> Limits:
        """Return the limits for float32, which depend on no measured noise."""
        scale = max(1.0, largest_logit)
        alone = SHARP.logits * scale
        token = math.inf if has_experts else TOKEN_TO_SAMPLE * alone
        return cls(SHARP.moved * scale, alone, SHARP.gradient, TIMES_FLOOR * SHARP.logits, token)

    def would_notice(self, largest_logit: float) -> bool:
        """Return whether the limits are narrow enough that a mistake would exceed them."""
        return self.alone <= NOTICED.logits * max(1.0, largest_logit) and self.gradient <= NOTICED.gradient

    def allow(self, gap: Gap) -> bool:
        """Return whether the gap of a sample is within the limits; NaN is not."""
        return gap.over_tokens <= self.alone and gap.most <= self.token


class Gap(NamedTuple):
    """Difference between the logits of a sample: the largest one, and the root mean square over its tokens.

    With experts only the root mean square has a limit: in 16 bits, one unit of rounding may send a token to another
    expert, and its logits differ a lot.
    """

    most: float
    over_tokens: float


def without_noise(dtype: torch.dtype, expected: torch.Tensor) -> float:
    """Return how far another kernel may be from `expected` if no noise was measured, as between sdpa and eager."""
    return TIMES_FLOOR * FLOORS[dtype].logits * max(1.0, float(expected.abs().max()))


def has_experts(model: torch.nn.Module) -> bool:
    """Tell whether a model routes tokens to experts; rounding may then send a token to another expert."""
    return any("expert" in name for name, _ in model.named_modules())


def gap_of(one: torch.Tensor, other: torch.Tensor) -> Gap:
    """Compare two computations of the logits of one sample."""
    by_token = gap_by_token(one, other)
    return Gap(float(by_token.max()), float(by_token.square().mean().sqrt()))


def gap_by_token(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the largest difference between logits, for each token."""
    return (one.float() - other.float()).abs().amax(dim=-1)


def worst(sizes: Sequence[float]) -> float:
    """Return the largest size, or NaN if any size is NaN; Python's `max` may lose a NaN."""
    return float(np.max([0.0, *sizes]))


@contextmanager
def rounded_otherwise(model: torch.nn.Module, dtype: torch.dtype, seed: int = 0) -> Iterator[None]:
    """Change every layer's output by half a unit of rounding, up or down at random, as another kernel might."""
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

    # Embeddings are rounded, too: the error passes through all layers, as an error of the first layer's kernel does.
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
    """Tell whether a model computes in 16 bits, or in TF32 (19 bits), CUDA's default for convolutions."""
    takes_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    return torch.finfo(dtype).bits == 16 or (dtype == torch.float32 and takes_tf32 and next(model.parameters()).is_cuda)


def precision_of(model: Any, forward: Callable[[], Any]) -> torch.dtype:
    """Run `forward` and return the coarsest data type: of the weights, or of the head's input and output.

    The head shows what autocast makes of the weights' type. This precision limits how sharp the proof can be.
    """
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
    """Return the data type with the fewest bits of precision."""
    known = (dtype for dtype in dtypes if dtype in FLOORS)
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
