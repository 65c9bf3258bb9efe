"""What ms-swift's options say of what is trained: a resume refuses another objective, and warns of other settings.

This table and `decides` of packing options (core/config.py) are the one list; docs/resume.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_vlpack.core.envelope import differing_fields, shown_value
from swift_vlpack.host.ranks import content_of

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
"""The objective: the loss, what of a row is a target, which parameters are trained."""

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
"""How the objective is trained, and which of two values counts after a resume."""

BEFORE_IT_WAS_SAVED = {
    "mask_boundary_loss": True,
    "train_on_eos": True,
    "packing_overflow": "keep",
    "packing_stride": 0,
    "packing_min_len": 1,
    "ratio_by": "rows",
}
"""Values of a checkpoint of an earlier version, which saved them only where they were others."""


def objective_of(args: Any) -> dict[str, Any]:
    """The values of a run that a checkpoint keeps."""
    return {name: content_of(getattr(args, name, None)) for name in (*REFUSED, *WARNED)}


def refused_values(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both fingerprints without what is only warned of, and without what an earlier version did not save."""
    before = {name: value for name, value in BEFORE_IT_WAS_SAVED.items() if name in current}
    not_saved = {name for name in (*REFUSED, "packing_loss") if name not in saved}
    left_out = {*WARNED, *not_saved}
    both = ({**before, **saved}, current)
    then, now = ({name: value for name, value in one.items() if name not in left_out} for one in both)
    return then, now


def warning_of_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Name the settings that differ, with both values and which of them counts."""
    kept = [name for name in differing_fields(saved, current) if name in WARNED and name in saved and name in current]
    if not kept:
        return None
    said = (f"{name} ({shown_value(saved, name)}, now {shown_value(current, name)}: {WARNED[name]})" for name in kept)
    return f"the checkpoint was written with another {', '.join(said)}"
