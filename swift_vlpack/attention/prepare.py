"""Prepare a model and its template for packs in a trainer of your own, as ms-swift's own training does."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from swift_vlpack.attention import attention
from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.attention.packed_sequence import KnownOfTensors
from swift_vlpack.errors import ConfigError
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.families import let_through
from swift_vlpack.rows.sequences import OF_SEVERAL

Model = TypeVar("Model", bound=torch.nn.Module)

TRAINING = "train"
"""The mode in which a template makes labels; in its default mode it makes none."""
WAY_IN = "call swift_vlpack.prepare_model(model, template) first"

# Keywords of a call that must reach the model although they are no inputs: the template's hook drops unknown keywords.
_OF_THE_CALL = ("num_items_in_batch", "use_cache", "return_dict", "output_attentions")
known_targets: KnownOfTensors[bool] = KnownOfTensors()  # by labels: whether there is a token to predict
_hooks: WeakKeyDictionary[torch.nn.Module, list[Any]] = WeakKeyDictionary()


def prepare_model(model: Model, template: Any, *, any_family: bool = False) -> Model:
    """Prepare a model and its template to train packs in any trainer. Returns the model. Idempotent.

    Call it before the model is wrapped by DDP, FSDP or `Accelerator.prepare`, and before `PackingDataset` and
    `Collator`. The model gets attention that keeps samples apart (flash-attn stays if it was asked for), reads images
    the way its template made them, uses no cache, and has a loss of 0 for a sequence without labels. Saved weights and
    config can be loaded without this package, and `generate` works as before.

    `any_family` allows a family that ms-swift does not pack. Nothing is known of its sequences then: call
    `prove(model, template, packs)` before the first step, and train only if it holds.
    """
    _refuse_what_cannot_be_packed(template)
    let_through(template, any_family=any_family, way_in="prepare_model(model, template, any_family=True), then prove")
    attention.register()
    template.set_mode(TRAINING)
    inner: Any = unwrapped(model)
    if not attention.keeps_samples_apart(attention.name_of(inner.config)):
        inner.set_attn_implementation(attention.NAME)
    restart_at_boundaries(inner)
    template.model = inner
    for handle in _hooks.pop(inner, ()):
        handle.remove()
    _hooks[inner] = [
        inner.register_forward_pre_hook(_BeforeForward(template), with_kwargs=True),
        inner.register_forward_hook(_loss_of_no_label, with_kwargs=True),
    ]
    return model


def check_ready(template: Any, *, needs_model: bool) -> None:
    """Raise `ConfigError` for a template that makes no labels, or a model whose attention mixes samples."""
    if template is None:
        raise ConfigError("the template is None; give the one that ms-swift's get_template returns")
    mode = getattr(template, "mode", TRAINING)
    if mode != TRAINING:
        raise ConfigError(f"the template is in mode {mode!r}, in which packs have no labels to train on; {WAY_IN}")
    model = getattr(template, "model", None)
    if model is None:
        if needs_model:
            raise ConfigError(f"the template knows no model, so none is prepared for packs; {WAY_IN}")
        return
    name = attention.name_of(model.config)
    if not attention.keeps_samples_apart(name):
        raise ConfigError(f"with attention {name!r} the samples of a pack see each other; {WAY_IN}")


def refuse_flat_attention(model: Any) -> None:
    """Refuse a model whose attention does not know shared prefixes. `None` (no model yet) passes.

    Raises:
        ConfigError: The attention knows only where samples end, and would take a prefix and its branches for one
            sample.
    """
    if model is None or (name := attention.name_of(unwrapped(model).config)) == attention.NAME:
        return
    raise ConfigError(
        f"the model has attention {name!r}, which takes a prefix and its branches for one sample, so packing_share="
        "media cannot be used with it; load the model with attn_implementation='sdpa' and then call prepare_model, or "
        "leave packing_share out"
    )


def unwrapped(model: Any) -> Any:
    """Return the model inside of DDP, DeepSpeed and other wrappers."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model)


def _refuse_what_cannot_be_packed(template: Any) -> None:
    if template.task_type != "causal_lm":
        raise ConfigError(f"the template's task is {template.task_type}; packing is for causal_lm")
    if template.mode in OF_SEVERAL:
        raise ConfigError(f"the template is in mode {template.mode!r}; packing is for supervised training")


class _BeforeForward:
    """Run ms-swift's hook, which puts images into embeddings, and keep the keywords that it would drop.

    A class and not a closure, so that a model with this hook can be pickled.
    """

    def __init__(self, template: Any) -> None:
        self.template = template
        self.reads_images = template.model_meta.is_multimodal

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_generating = kwargs.get("past_key_values") is not None or kwargs.get("use_cache")
        if is_generating or not self.template.is_training or "input_ids" not in kwargs:
            return None
        of_the_call = {"use_cache": False, **{name: kwargs[name] for name in _OF_THE_CALL if name in kwargs}}
        if self.reads_images:
            args, kwargs = self.template.pre_forward_hook(model, args, kwargs)
        return args, {**kwargs, **of_the_call}


def have_targets(labels: torch.Tensor) -> bool:
    """Tell whether there is a token to predict, as the batch of the labels knows, else by asking their device."""
    known = known_targets.get(labels)
    return bool((labels[..., 1:] != NO_LABEL).any()) if known is None else known


def _loss_of_no_label(model: torch.nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
    """Set the loss to 0 if no sample of a sequence could be read: it has no label, and a mean over nothing is NaN."""
    labels = kwargs.get("labels")
    if labels is None or getattr(outputs, "loss", None) is None or have_targets(labels):
        return None
    outputs.loss = outputs.logits.float().sum() * 0.0
    return outputs
