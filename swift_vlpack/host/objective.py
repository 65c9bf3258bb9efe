"""List ms-swift's options that define the objective. A resume refuses a change of these, and warns of other settings.

These tables, and `decides` of packing options (config.py), are the only list; docs/resume.md repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_vlpack.envelope import differing_fields, shown_value
from swift_vlpack.host.same_on_ranks import content_of

OF_LOSS = ("loss_scale", "is_binary_loss_scale", "loss_type", "label_smoothing_factor", "enable_dft_loss")
OF_EXPERTS = ("router_aux_loss_coef",)
OF_TEMPLATE = (
    *(
        "template",
        "template_backend",
        "truncation_strategy",
        "system",
        "agent_template",
        "response_prefix",
        "norm_bbox",
        "use_chat_template",
    ),
    *("enable_thinking", "preserve_thinking", "add_non_thinking_prefix", "disable_ignore_empty_think"),
)
OF_PARAMETERS = (
    *("tuner_type", "freeze_llm", "freeze_vit", "freeze_aligner", "freeze_parameters", "freeze_parameters_regex"),
    *("freeze_parameters_ratio", "trainable_parameters", "trainable_parameters_regex"),
)
REFUSED = (*OF_LOSS, *OF_EXPERTS, *OF_TEMPLATE, *OF_PARAMETERS)
"""Options that define the objective: the loss, the tokens that are targets, the parameters that are trained."""

_OF_ADAPTER = "the adapter of the checkpoint keeps the saved value"
_OF_OPTIMIZER = "the optimizer of the checkpoint keeps the saved value"
_GIVEN = "the new value counts"
WARNED = {
    "neftune_noise_alpha": _GIVEN,
    "max_grad_norm": _GIVEN,
    **dict.fromkeys(
        ("optim", "optimizer", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"), _GIVEN
    ),
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_dropout", "lora_bias", "use_rslora", "use_dora"), _OF_ADAPTER),
    **dict.fromkeys(("target_modules", "target_regex", "target_parameters", "modules_to_save"), _OF_ADAPTER),
    **dict.fromkeys(("learning_rate", "vit_lr", "aligner_lr", "lorap_lr_ratio"), _OF_OPTIMIZER),
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), _OF_OPTIMIZER),
}
"""Options that change how the objective is trained, each with what counts after a resume: the old or the new value."""


def objective_of(args: Any) -> dict[str, Any]:
    """Return the values of all options in these tables, as a checkpoint keeps them."""
    return {name: content_of(getattr(args, name, None)) for name in (*REFUSED, *WARNED)}


def refused_values(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both fingerprints without the options of `WARNED`."""
    then, now = ({name: value for name, value in one.items() if name not in WARNED} for one in (saved, current))
    return then, now


def warning_of_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return a warning that names each differing setting, both values and the one that counts; None if all agree."""
    kept = [name for name in differing_fields(saved, current) if name in WARNED and name in saved and name in current]
    if not kept:
        return None
    said = (f"{name} ({shown_value(saved, name)}, now {shown_value(current, name)}: {WARNED[name]})" for name in kept)
    return f"the checkpoint was written with another {', '.join(said)}"
