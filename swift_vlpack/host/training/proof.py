"""The isolation proof on ms-swift's trainer."""

from __future__ import annotations

from typing import Any

from swift_vlpack.data.proof.prove import prove


def prove_isolation(trainer: Any) -> str:
    """Run the proof on the model as it will train; all ranks run the same forwards."""
    model = getattr(trainer, "model_wrapped", None) or trainer.model
    return prove(model, trainer.template, trainer.feed, forward_context=trainer.compute_loss_context_manager)
