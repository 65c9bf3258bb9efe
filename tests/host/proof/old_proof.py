"""The proof as it was in 0.1: packed against alone, through one attention, one collator, without gradients, in
evaluation mode, over the three shortest samples. Kept to show what it did not see, and that its causes said little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swift_vlpack.attention.attention import name_of
from swift_vlpack.errors import BoundaryError
from swift_vlpack.proof.perturb import replaced
from swift_vlpack.proof.proof_model import ProofModel
from swift_vlpack.proof.reference import untouched
from swift_vlpack.rows.samples import Encoded

MOVED, ALONE = 1e-5, 1e-3


def cause_by_the_old_proof(proof_model: ProofModel, samples: Sequence[Encoded]) -> str | None:
    """What it would have said; None where it would have let the run go on."""
    try:
        with untouched(proof_model.model):
            _prove(proof_model, samples)
    except (AssertionError, BoundaryError, ImportError) as error:
        return _diagnosis(error, proof_model.model.config)
    return None


def _prove(proof_model: ProofModel, samples: Sequence[Encoded]) -> None:
    def forward(pack: Sequence[Encoded]) -> list[torch.Tensor]:
        with proof_model.batches.batch(pack, packed=True) as row:
            logits = proof_model.model(**row.inputs).logits[0].float()
        return list(logits.split([sample["length"] for sample in pack]))

    packed = forward(samples)
    scale = max(1.0, *(float(logits.abs().max()) for logits in packed))
    for changed, sample in enumerate(samples):
        others = [*samples[:changed], replaced(sample, proof_model.is_ordinary), *samples[changed + 1 :]]
        for at, (before, after) in enumerate(zip(packed, forward(others), strict=True)):
            assert at == changed or float((before - after).abs().max()) <= MOVED * scale
    for logits, sample in zip(packed, samples, strict=True):
        assert float((logits - forward([sample])[0]).abs().max()) <= ALONE * scale


def _diagnosis(error: Exception, config: Any) -> str:
    layers = set(getattr(getattr(config, "text_config", config), "layer_types", None) or ())
    if isinstance(error, BoundaryError):
        return "positions are not restarted at the boundaries"
    if isinstance(error, ImportError) or any("linear" in layer or "mamba" in layer for layer in layers):
        return "the model has linear attention, whose state must restart with every sample"
    name = name_of(config)
    if name in ("sdpa", "eager", "flex_attention"):
        return f"attention {name} knows no boundaries"
    return "a mask or a cache hides the boundaries from the attention function"
