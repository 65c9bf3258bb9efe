"""Let a rank whose pack has no image train together with ranks whose packs have images.

DDP            waits for the gradient of every parameter, unless it finds out which of them were used FSDP, ZeRO-3
gather the parameters of a layer when a rank enters it; if one rank does not enter, the others wait forever

So for a pack without images, ms-swift passes an empty image through the vision tower, and multiplies its features by 0.
Some of its templates always do that, others only under DeepSpeed. FSDP needs it as well. If no template does it, the
run is stopped before its ranks would wait.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from swift.utils import deep_getattr

from swift_vlpack.comm import Comm
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.collate import on_device
from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.feed.waiting import waiting
from swift_vlpack.host.ranks import num_ranks
from swift_vlpack.proof.perturb import kinds_of_media
from swift_vlpack.rows.randomness import RandomStream

_ASKED = "is_deepspeed_enabled"
"""The function that modules of ms-swift call to decide whether to pass an empty image through the tower."""
_MODULES = ("swift.template.", "swift.model.")
_FSDP = "ACCELERATE_USE_FSDP"
"""The variable by which ms-swift, accelerate and transformers recognize FSDP."""
_empty_image_shown = threading.Event()
"""Set while a step has passed an empty image through the tower that ms-swift passes under DeepSpeed alone."""


def tolerate_packs_without_images(model: Any, training_args: Any) -> None:
    """Let packs without images train under DDP and FSDP. Under DeepSpeed, ms-swift takes care of them.

    With gradient checkpointing, transformers keeps DDP from finding out which parameters were used, because the
    reentrant kind does not allow it. ms-swift uses the other kind under DDP, so it is switched on here.
    """
    checkpointing = training_args.gradient_checkpointing_kwargs or {}
    if (
        num_ranks() > 1
        and training_args.ddp_find_unused_parameters is None
        and not checkpointing.get("use_reentrant")
        and _trained_of_vision(model)
    ):
        training_args.ddp_find_unused_parameters = True
    if training_args.fsdp:
        _enter_tower_under_fsdp()


def _trained_of_vision(model: Any) -> list[torch.nn.Parameter]:
    arch = model.model_meta.model_arch
    parts = [*getattr(arch, "vision_tower", ()), *getattr(arch, "aligner", ())]
    named = model.named_parameters()
    return [one for name, one in named if one.requires_grad and any(part in name for part in parts)]


def _enter_tower_under_fsdp() -> None:
    """Let ms-swift's templates and models do under FSDP what they do under DeepSpeed. Idempotent.

    The function is replaced in the modules of templates and models only, not in `swift.utils`, which trainers use.
    """
    for name, module in list(sys.modules.items()):
        asked = getattr(module, _ASKED, None) if name.startswith(_MODULES) else None
        if asked is not None and not hasattr(asked, "__wrapped__"):
            setattr(module, _ASKED, _or_fsdp(asked))


def _or_fsdp(is_deepspeed_enabled: Any) -> Any:
    @functools.wraps(is_deepspeed_enabled)
    def is_sharded() -> bool:
        if is_deepspeed_enabled() or os.environ.get(_FSDP, "false").lower() != "true":
            return bool(is_deepspeed_enabled())
        _empty_image_shown.set()
        return True

    return is_sharded


def drop_gradients_of_empty_images(model: Any) -> None:
    """Give the tower no gradient in a step of nothing but empty images for FSDP, as un-packed and under DDP.

    Their gradients are zeros, with which an optimizer would move the tower by its momentum.
    """
    if not _empty_image_shown.is_set():
        return
    _empty_image_shown.clear()
    trained = _trained_of_vision(model)
    gradients = [one.grad for one in trained if one.grad is not None]
    # Look at this rank's part of a sharded gradient: an image on any rank changes the parts of all ranks.
    if not gradients or not torch.stack([getattr(one, "_local_tensor", one).any() for one in gradients]).any():
        for one in trained:
            one.grad = None


# -- towers that only packs with media enter -------------------------------------------------------------------------


def towers_skipped(trainer: Any) -> list[str]:
    """Return the vision towers that a sequence without media does not enter; none unless parameters are sharded.

    All ranks must call it, because it runs such a sequence through the model as it trains. It changes nothing.
    """
    names = getattr(trainer.model_meta.model_arch, "vision_tower", ())
    if num_ranks() == 1 or not names or not _is_sharded(trainer):
        return []
    model = trainer.template.get_base_model(trainer.accelerator.unwrap_model(trainer.model))
    with torch.no_grad(), RandomStream("tower"), waiting("a sequence without media"):
        return towers_not_entered(model, names, lambda: _run_without_media(trainer))


def towers_not_entered(model: Any, names: Iterable[str], run: Callable[[], None]) -> list[str]:
    """Call `run`, and return the names of those modules of the model that it did not enter."""
    entered: set[str] = set()
    # A model may lack a tower of its family, such as Gemma 4 without sounds.
    towers = {name: tower for name in names if (tower := deep_getattr(model, name)) is not None}
    handles = [
        tower.register_forward_pre_hook(lambda *_, name=name: entered.add(name)) for name, tower in towers.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return sorted(set(towers) - entered)


def _is_sharded(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return bool(trainer.is_fsdp_enabled) or (plugin is not None and plugin.zero_stage == 3)


def _run_without_media(trainer: Any) -> None:
    sequence = on_device(packed_sequence(trainer.template, []), trainer.args.device)
    with layout(trainer.template, packed=True), trainer.compute_loss_context_manager():
        trainer.compute_loss(trainer.model_wrapped, trainer._prepare_inputs(sequence))


def refuse_unlike_media(batches: Sequence[Mapping[str, Any]], towers: Sequence[str], comm: Comm, verb: str) -> None:
    """Stop on every rank if, in one step, batches that ranks train at the same time have media of other kinds.

    Otherwise the ranks would wait for each other forever, some in the tower and some after it.
    """
    kinds = [sorted(kinds_of_media(dict(batch))) for batch in batches]
    for other, theirs in enumerate(everyone := comm.results_of_all(lambda: kinds)):
        if theirs != everyone[0]:
            raise ConfigError(
                f"ranks 0 and {other} {verb} batches of other media at the same time, and parameters are sharded: "
                f"ms-swift enters {', '.join(towers)} of this family for media alone, so the ranks would wait for each "
                "other. Train with --deepspeed zero2 or without an engine, or give every "
                f"{'validation row' if verb == 'evaluate' else 'row'} an image"
            )
