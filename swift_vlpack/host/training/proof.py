"""The isolation proof on ms-swift's trainer."""

from __future__ import annotations

from typing import Any

import torch

from swift_vlpack.data.model.proof import prove


def prove_isolation(trainer: Any) -> str:
    """Run the proof on the model as it will train; all ranks run the same forwards."""
    model = getattr(trainer, "model_wrapped", None) or trainer.model
    return prove(model, trainer.template, trainer.packs, forward_context=trainer.compute_loss_context_manager)


def dtype_of(trainer: Any) -> torch.dtype:
    """The precision that limits a comparison of losses: that of the weights, or of autocast."""
    if trainer.args.bf16 and not trainer.args.use_cpu:
        return torch.bfloat16
    if trainer.args.fp16 and torch.cuda.is_available():
        return torch.float16
    return next(parameter.dtype for parameter in trainer.model.parameters() if parameter.is_floating_point())
