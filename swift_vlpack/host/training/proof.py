"""The isolation proof on ms-swift's trainer."""

from __future__ import annotations

from typing import Any

from swift_vlpack.data.model import attention
from swift_vlpack.data.model.prepare import unwrapped
from swift_vlpack.data.proof.isolation import Proof
from swift_vlpack.data.proof.prove import proof_of
from swift_vlpack.data.waiting import waiting


def prove_isolation(trainer: Any) -> Proof:
    """Run the proof on the model as it will train; all ranks run the same forwards."""
    context = trainer.compute_loss_context_manager
    with waiting("the isolation proof"):  # in which wrapped models talk to each other
        return proof_of(model_of(trainer), trainer.template, trainer.feed, forward_context=context)


def attention_of(trainer: Any) -> str:
    """The name of the attention that the model has."""
    return attention.name_of(unwrapped(model_of(trainer)).config)


def model_of(trainer: Any) -> Any:
    """The model as it will train, in its wrappers."""
    return getattr(trainer, "model_wrapped", None) or trainer.model
