"""Switch the model of a packed run to attention that stops at the boundaries of samples."""

from __future__ import annotations

from typing import Any

from transformers.utils.import_utils import is_flash_linear_attention_available

from swift_vlpack.attention import attention
from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.feed.choose_attention import choose_attention
from swift_vlpack.host.args import OWN_ATTENTION
from swift_vlpack.host.proof import model_of
from swift_vlpack.host.ranks import results_of_all
from swift_vlpack.rows.families import GIVEN_BOUNDARIES_BY_SWIFT


def use_attention(model: Any, asked_for: str | None) -> None:
    """Switch the model to the attention `vlpack`, unless flash-attn was asked for.

    Switch the model and not the arguments, so that the saved config can be loaded without this package.
    """
    if asked_for in OWN_ATTENTION:
        model.set_attn_implementation(attention.NAME)
    restart_at_boundaries(model, leave=GIVEN_BOUNDARIES_BY_SWIFT if is_flash_linear_attention_available() else ())


def choose_for(trainer: Any) -> str:
    """Choose the kernel on the model as it will train, the same on all ranks. Returns a log line with the reason."""
    context = trainer.compute_loss_context_manager
    return choose_attention(
        model_of(trainer), trainer.template, trainer.feed.packs, results_of_all=results_of_all, forward_context=context
    )
