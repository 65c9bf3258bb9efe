"""The proof that samples of a pack do not see each other, on the model as it will train.

(a) The tokens of one sample are replaced: the logits of its neighbours must not move.
(b) Every sample is run alone: packed must equal alone, up to the rounding of the data type.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swift_vlpack.core.errors import BoundaryError, VLPackError
from swift_vlpack.data.rows.samples import Encoded

Forward = Callable[[Sequence[Encoded]], torch.Tensor]
"""Samples in, logits of their packed row out: (num_tokens, vocabulary), without gradients."""

_MOVED = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_ALONE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class IsolationError(VLPackError):
    """Samples of a pack see each other, or the proof cannot be made; names the cause."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured, in units of the logits."""

    num_samples: int
    moved: float
    """Most that a logit moved when another sample of the pack changed."""
    alone: float
    """Most that a logit differs between packed and alone."""
    largest_logit: float

    def line(self, attention: str) -> str:
        """The line that the log shows."""
        return (
            f"isolation verified: max difference {self.moved} over {self.num_samples} samples, attention {attention} "
            f"(packed equals alone within {self.alone:.1e} of logits up to {self.largest_logit:.1f})"
        )


def proof_of(
    forward: Forward, samples: Sequence[Encoded], is_ordinary: Callable[[int], bool], dtype: torch.dtype
) -> Proof:
    """Measure both, and raise `IsolationError` where either is too large. Runs `1 + 2 * len(samples)` forwards."""
    packed = _split(forward(samples), samples)
    scale = max(float(logits.abs().max()) for logits in packed)
    moves = [0.0]
    for changed, sample in enumerate(samples):
        others = [*samples[:changed], replaced(sample, is_ordinary), *samples[changed + 1 :]]
        again = _split(forward(others), samples)
        moves += [_gap(a, b) for n, (a, b) in enumerate(zip(packed, again, strict=True)) if n != changed]
    gaps = [_gap(logits, forward([sample])) for logits, sample in zip(packed, samples, strict=True)]
    moved, alone = float(np.max(moves)), float(np.max(gaps))  # NaN stays NaN, which Python's max may lose
    proof = Proof(len(samples), moved, alone, scale)
    if not moved <= _MOVED[dtype] * max(1.0, scale):
        raise IsolationError(
            f"samples of a pack see each other: replacing the tokens of one moved the logits of another by {moved:.3g} "
            f"(largest logit {scale:.3g}, {dtype})"
        )
    if not alone <= _ALONE[dtype] * max(1.0, scale):
        raise IsolationError(
            f"a packed sample does not give what it gives alone: logits differ by {alone:.3g} "
            f"(largest logit {scale:.3g}, {dtype})"
        )
    return proof


def coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The one of them that rounds most."""
    return max((dtype for dtype in dtypes if dtype in _ALONE), key=_ALONE.__getitem__, default=torch.float32)


def replaced(sample: Encoded, is_ordinary: Callable[[int], bool]) -> Encoded:
    """The same sample with every ordinary token another one; media and control tokens stay, so positions do."""
    ordinary = sorted({token for token in sample["input_ids"] if is_ordinary(token)})
    following = dict(zip(ordinary, [*ordinary[1:], *ordinary[:1]], strict=True))
    if len(ordinary) < 2:
        raise IsolationError("a sample of the proof has no two different ordinary tokens to exchange")
    return {**sample, "input_ids": [following.get(token, token) for token in sample["input_ids"]]}


def diagnosis(error: Exception, config: Any, attention: str) -> str:
    """The most likely cause of a failed proof, from what is known of the model."""
    text = getattr(config, "text_config", config)
    layers = set(getattr(text, "layer_types", None) or ())
    if isinstance(error, BoundaryError):
        return "positions are not restarted at the boundaries"
    if isinstance(error, ImportError) or any("linear" in layer or "mamba" in layer for layer in layers):
        return (
            "the model has linear attention, whose state must restart with every sample; install the kernels that do "
            "it (flash-linear-attention, causal-conv1d), or train without packing"
        )
    if attention in ("sdpa", "eager", "flex_attention"):
        return f"attention {attention} knows no boundaries; leave attn_impl unset, so that packing chooses its own"
    return (
        "a mask or a cache hides the boundaries from the attention function (a hook that replaces the model's inputs, "
        "or a model that does not hand cu_seq_lens on); train without packing, or report the model"
    )


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Run the proof without gradients and dropout, then give back modes, buffers and random states as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, was_training in modes:
            module.training = was_training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _split(logits: torch.Tensor, samples: Sequence[Encoded]) -> tuple[torch.Tensor, ...]:
    return logits.split([int(sample["length"]) for sample in samples])


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())
