"""Take gradients of parameters in a backward, compare them, and leave no trace on the model.

Which ones: before training the norms and biases, because every path of the model goes through some. With the trainer's
loss, all that are trained, of which embeddings and head give a few rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from swift_vlpack.proof.shards import let_go, shape_of, sharded_by, whole

VISION_PARTS = ("visual", "vision", "audio", "image")
"""Words in the names of modules that are not part of the language model."""
NUM_ROWS = 64
"""Rows of the gradients of embeddings and head that are compared: those of the most frequent tokens, because only a
token that comes twice shows whether its gradients are added up."""
_NUM_KEPT = 2**16
"""Most values that are kept of each parameter's gradient; of a larger gradient only every n-th value is compared."""
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes that hold the function of gradient checkpointing: on a layer (transformers and ms-swift), and on torch's
wrapper around a layer (FSDP)."""
_OF_VOCABULARY = {"get_input_embeddings": "embeddings", "get_output_embeddings": "head"}


class Parameters:
    """The parameters whose gradients are compared. All ranks must make it together if parameters are sharded."""

    def __init__(
        self, model: Any, *, all_trained: bool = False, has_engine: bool = False, tokens: torch.Tensor | None = None
    ) -> None:
        """Choose norms and biases, frozen or not; or, with `all_trained`, all that is trained.

        `has_engine` says that an engine (DeepSpeed) receives the gradients of parameters in the backward; it must not
        receive those of a proof. Hooks on parameters can be removed for a pass. If the engine uses another way, no
        parameters are compared. `tokens` are those of the batch, by which rows of embeddings and head are chosen.
        """
        self.model = model
        let_go(model)
        named = dict(model.named_parameters())
        self._parts = _of_vocabulary(model)
        self._rows = None if tokens is None else _most_frequent(tokens)
        if all_trained:
            chosen = [name for name, one in named.items() if one.requires_grad]
        else:
            chosen = [name for name, one in named.items() if len(shape_of(one)) == 1 and one.is_floating_point()]
        # Leave out sharded embeddings and heads: their whole gradients, of all words, would have to be gathered.
        of_vocabulary = [name for name in chosen if id(named[name]) in self._parts and sharded_by(model)]
        chosen = [name for name in chosen if name not in of_vocabulary]
        self.of_forward = whole(model, chosen)
        """The parameters by name, as a forward and backward see them: the whole ones, if they are sharded."""
        trained = [one for name, one in self.of_forward.items() if named[name].requires_grad]
        self.left_out = "gradients of head and embeddings (they are sharded)" if of_vocabulary else ""
        """Names of gradients that are not compared, with the reason."""
        if chosen and not self.of_forward:
            self.left_out = "gradients of parameters (they are sharded)"
        elif has_engine and not all(_hooks_of(one) for one in trained):
            self.left_out, self.of_forward = "gradients of parameters (an engine takes them in the backward)", {}
        elif any(one._backward_hooks for one in trained):
            self.left_out, self.of_forward = "gradients of parameters (something else takes them in the backward)", {}

    @contextmanager
    def collected(self) -> Iterator[dict[str, torch.Tensor]]:
        """Collect the gradient of each chosen parameter, and clear `.grad` at once; restore everything afterwards.

        `torch.autograd.grad` would not touch `.grad`, but does not work with reentrant checkpointing. If something else
        receives gradients in the backward, its hooks are taken away for the pass. All other parameters are frozen.
        """
        found: dict[str, torch.Tensor] = {}
        let_go(self.model)
        named = dict(self.model.named_parameters())
        before = [(one, one.grad, one.requires_grad) for one in named.values()]
        others = [(hooks, dict(hooks)) for one in self.of_forward.values() if (hooks := _hooks_of(one))]
        handles = []
        try:
            for hooks, _ in others:
                hooks.clear()
            for name, one in named.items():
                one.grad = None
                if one.requires_grad != (name in self.of_forward):
                    one.requires_grad_(name in self.of_forward)
            for name, one in self.of_forward.items():
                one.requires_grad_(True)  # FSDP2 sets it on a whole parameter only when it gathers
                hook = partial(self._take, found, name, self._parts.get(id(named.get(name))))
                handles.append(one.register_post_accumulate_grad_hook(hook))
            yield found
        finally:
            for handle in handles:
                handle.remove()
            for hooks, all_before in others:
                hooks.update(all_before)
            for one, grad, was_required in before:
                if one.requires_grad != was_required:
                    one.requires_grad_(was_required)
                one.grad = grad
            let_go(self.model)

    def _take(self, found: dict[str, torch.Tensor], name: str, part: str | None, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if part is not None and self._rows is not None:
            name, kept = f"{part}: {name}", parameter.grad[self._rows.to(parameter.grad.device)].flatten()
        else:
            kept = parameter.grad.reshape(-1)[:: -(-parameter.grad.numel() // _NUM_KEPT)]
        kept = kept.float().clone()
        # Add up, because the hook may run more than once if checkpointing runs a layer again in the backward.
        found[name] = found[name] + kept if name in found else kept
        parameter.grad = None


class ParametersInFloat32(Parameters):
    """Float32 copies of the norms and biases, in place of those in 16 bits."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        given, self.of_forward = self.of_forward, {}
        self.of_forward = {name: one.detach().float().requires_grad_(True) for name, one in given.items()}
        self.by_id = {id(one): self.of_forward[name] for name, one in given.items()}
        """The copies by the `id` of the parameter, for `Float32Mode`."""


def _most_frequent(tokens: torch.Tensor) -> torch.Tensor:
    counts = tokens.flatten().bincount()
    return counts.topk(min(NUM_ROWS, int((counts > 0).sum()))).indices


def _of_vocabulary(model: Any) -> dict[int, str]:
    """Return the ids of the weights of embeddings and head, which have a row for each word, with their names."""
    ends = [(name, getattr(model, method, lambda: None)()) for method, name in _OF_VOCABULARY.items()]
    return {id(end.weight): name for name, end in reversed(ends) if getattr(end, "weight", None) is not None}


def _hooks_of(parameter: torch.Tensor) -> dict[int, Any] | None:
    """Return the hooks that receive the gradient of a parameter: of DeepSpeed, or of an optimizer in the backward."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


@contextmanager
def run_again_in(model: torch.nn.Module, contexts: Callable[[], Any]) -> Iterator[int]:
    """Switch gradient checkpointing to torch's non-reentrant form; yield how many modules are checkpointed.

    `contexts` makes two context managers: for a layer's forward, and for its second run in the backward. The reentrant
    form has no such contexts.
    """
    # Each layer that is checkpointed keeps the function to do so, as an attribute.
    checkpointed = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in _CHECKPOINTS
        if vars(module).get(name) is not None
    ]
    # Unwrapped, because a host may have wrapped it to choose the form (ms-swift chooses the reentrant one).
    function = partial(inspect.unwrap(torch.utils.checkpoint.checkpoint), use_reentrant=False, context_fn=contexts)
    try:
        for module, name, _ in checkpointed:
            vars(module)[name] = function
        yield len(checkpointed)
    finally:
        for module, name, checkpoint in checkpointed:
            vars(module)[name] = checkpoint


def is_checkpointed(model: torch.nn.Module) -> bool:
    """Tell whether layers are run again in the backward."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True or hasattr(module, "_checkpoint_wrapped_module")
        for module in model.modules()
    )


def added(gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Add up the gradients of samples alone, to compare them with the gradient of their sequence."""
    total: dict[str, torch.Tensor] = {}
    for gradient in gradients:
        for name, grad in gradient.items():
            total[name] = total[name] + grad if name in total else grad
    return total


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return how far apart two gradients are in each part of the model, as a share of the larger.

    Over a whole part, because the gradient of a single parameter may be nothing but rounding errors, such as that of
    the bias of attention's keys.
    """
    lengths: dict[str, float] = {}
    gaps: dict[str, float] = {}
    for name in {**one, **other}:
        vision = next((part for part in VISION_PARTS if part in name), "language")
        part = name.partition(": ")[0] if ": " in name else vision
        here, there = (side.get(name, torch.zeros(())) for side in (one, other))
        lengths[part] = lengths.get(part, 0.0) + max(float((here * here).sum()), float((there * there).sum()))
        gaps[part] = gaps.get(part, 0.0) + float((here - there).square().sum())
    # A part with next to no gradient is nothing but rounding, so each part counts as at least a thousandth of the whole
    # (a millionth here, because these are squares).
    total = sum(lengths.values())
    return {part: (gaps[part] / max(length, 1e-6 * total, 1e-30)) ** 0.5 for part, length in lengths.items()}
