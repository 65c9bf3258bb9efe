"""Run one forward and backward with the trainer's own loss, and keep the results of every token.

A `Pass` holds the hidden states after the last layer, the gradients at both ends of the layers, and the gradients of
parameters. `in_training` compares passes; nothing is left on the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from swift_vlpack.proof.shards import class_of, let_go, shape_of, sharded_by, whole

NUM_KEPT = 2**16
"""Most values that are kept of each parameter's gradient; of a larger gradient only every n-th value is compared."""
_HIDDEN, _OF_LOSS, _OF_INPUTS = "hidden", "of_loss", "of_inputs"
_EMBEDDED, _OF_EMBEDDED = "embedded", "of_embedded"

ComputeLoss = Callable[[Mapping[str, Any], bool], torch.Tensor]
"""Computes the trainer's loss of collated samples, packed or not, with autocast and all that the trainer does."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The results of one pass. Per-token tensors are (num_tokens, width)."""

    loss: float
    hidden: torch.Tensor
    """Output of the last layer, from which the head computes logits."""
    of_loss: torch.Tensor | None
    """Gradient of the loss with respect to `hidden`; None without a backward."""
    of_inputs: torch.Tensor | None
    """Gradient of the loss with respect to the input of the first layer, at the end of the layers' whole backward."""
    embedded: torch.Tensor | None
    """Embeddings of the tokens, with the noise that is drawn for them."""
    of_embedded: torch.Tensor | None = None
    """Gradient of the loss with respect to `embedded`. It stands for the gradient of the embeddings' weight."""
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of trained parameters, by name; at most `NUM_KEPT` values of each."""
    has_drawn: bool = False
    """True if the pass drew random numbers from torch's generators."""

    def at(self, tokens: slice | torch.Tensor) -> Pass:
        """Return the results of some tokens, without the gradient of parameters."""
        hidden, of_loss, of_inputs, of_embedded = (
            None if one is None else one[tokens]
            for one in (self.hidden, self.of_loss, self.of_inputs, self.of_embedded)
        )
        assert hidden is not None
        return replace(self, hidden=hidden, of_loss=of_loss, of_inputs=of_inputs, of_embedded=of_embedded, gradient={})


class CannotSee(Exception):
    """The hidden states of a model cannot be captured, so nothing can be compared on its first batch."""


class Passes:
    """Runs a model with the trainer's loss, and leaves no gradient on it."""

    def __init__(
        self,
        model: Any,
        compute_loss: ComputeLoss,
        scale: Callable[[torch.Tensor], torch.Tensor],
        *,
        has_engine: bool = False,
    ) -> None:
        """Take a model and the trainer's loss.

        `scale` multiplies a loss before its backward as training does, for gradients in 16 bits. `has_engine` says that
        an engine (DeepSpeed) receives the gradients of parameters in the backward; it must not receive those of a
        proof. Hooks on parameters can be removed for a pass. If the engine uses another way, no parameters are
        compared.
        """
        self.model = model
        self.compute_loss = compute_loss
        self.scale = scale
        self.decoder = _layers_of(model)
        self.sharded_by = sharded_by(model)
        let_go(model)
        of_vocabulary = _of_vocabulary(model)
        compared = [name for name, one in _trained(model).items() if id(one) not in of_vocabulary]
        # Parameters as a forward and backward see them: the whole ones, if they are sharded.
        self.of_forward = whole(model, compared)
        self.why_no_parameters: str | None = None
        if compared and not self.of_forward:
            self.why_no_parameters = "they are sharded"
        elif has_engine and not all(map(_hooks_of, self.of_forward.values())):
            self.why_no_parameters = "an engine takes them in the backward"
        elif any(one._backward_hooks for one in self.of_forward.values()):
            self.why_no_parameters = "something else takes them in the backward"

    @property
    def is_sharded(self) -> bool:
        """Return whether parameters are sharded. All ranks must run equally many passes then."""
        return bool(self.sharded_by)

    def run(self, inputs: Mapping[str, Any], *, packed: bool, backward: bool = True, seed: int = 0) -> Pass:
        """Run one pass; equal seeds give equal random draws.

        Raises `CannotSee` if the hidden states of the model cannot be captured.
        """
        # Every pass has the same seed, so with equal lengths and grids each token draws the same numbers again.
        _seed_all(seed)
        before = _states_of_torch()
        with (
            self._parameters() as gradient,
            _seen(self.model, self.decoder) as seen,
        ):
            loss = self.compute_loss(inputs, packed)
            has_drawn = not all(map(torch.equal, before, _states_of_torch()))
            if backward and loss.requires_grad:
                self.scale(loss).backward()
        num_tokens = inputs["input_ids"].shape[-1]
        if _HIDDEN not in seen or len(seen[_HIDDEN]) != num_tokens:
            raise CannotSee(f"{type(self.decoder).__name__} gives no hidden states")
        if len(seen.get(_OF_EMBEDDED, ())) != num_tokens:  # the embeddings were called for something else, too
            seen.pop(_OF_EMBEDDED, None)
        return Pass(
            loss=float(loss.detach()),
            hidden=seen[_HIDDEN],
            of_loss=seen.get(_OF_LOSS),
            of_inputs=seen.get(_OF_INPUTS),
            embedded=seen.get(_EMBEDDED),
            of_embedded=seen.get(_OF_EMBEDDED),
            gradient=gradient,
            has_drawn=has_drawn,
        )

    @contextmanager
    def _parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """Collect the gradient of each trained parameter, and clear `.grad` at once; restore everything afterwards.

        `torch.autograd.grad` would not touch `.grad`, but does not work with reentrant checkpointing. If something else
        receives gradients in the backward, its hooks are taken away for the pass; where that cannot be done, parameters
        are frozen and nothing is collected. All others are frozen, too: weights with a row for each word
        (`_of_vocabulary`).
        """
        found: dict[str, torch.Tensor] = {}
        let_go(self.model)
        trained = _trained(self.model)
        before = {name: one.grad for name, one in trained.items()}
        handles = []
        others = [(hooks, dict(hooks)) for one in self.of_forward.values() if (hooks := _hooks_of(one))]
        try:
            for hooks, _ in others:
                hooks.clear()
            for name, parameter in trained.items():
                parameter.grad = None
                if self.why_no_parameters or name not in self.of_forward:
                    parameter.requires_grad_(False)
                else:
                    hook = partial(_take, found, name)
                    handles.append(self.of_forward[name].register_post_accumulate_grad_hook(hook))
            yield found
        finally:
            for handle in handles:
                handle.remove()
            for hooks, all_before in others:
                hooks.update(all_before)
            for name, parameter in trained.items():
                parameter.requires_grad_(True)
                parameter.grad = before[name]
            let_go(self.model)


def _layers_of(model: Any) -> torch.nn.Module:
    """Return the module around the language model's layers, without the head: around the decoder's largest stack."""
    # Wrappers of PEFT and of vision-language models each hand on to the next inner model.
    while hasattr(model, "get_decoder") and (inner := model.get_decoder()) is not model:
        model = inner
    stacks = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)}
    sizes = {name: sum(prod(shape_of(each)) for each in one.parameters()) for name, one in stacks.items()}
    layers: torch.nn.Module = model.get_submodule(max(sizes, key=sizes.__getitem__, default="").rpartition(".")[0])
    return layers


def _of_vocabulary(model: Any) -> frozenset[int]:
    """Return the ids of the weights of plain embeddings and heads, whose gradients are the largest of a backward.

    They say nothing that the gradients of each token do not: those of its embedding, and of its last hidden state.
    """
    names = ("get_input_embeddings", "get_output_embeddings")
    ends: list[Any] = [getattr(model, name, lambda: None)() for name in names]
    # Only plain classes: the backward of a model's own class may be wrong, so its gradient is compared.
    return frozenset(id(end.weight) for end in ends if class_of(end) in (torch.nn.Embedding, torch.nn.Linear))


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def _hooks_of(parameter: torch.Tensor) -> dict[int, Any] | None:
    """Return the hooks that receive the gradient of a parameter: of DeepSpeed, or of an optimizer in the backward."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _take(found: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    step = -(-parameter.grad.numel() // NUM_KEPT)
    kept = parameter.grad.reshape(-1)[::step].float().clone()
    # Add up, because the hook may run more than once if checkpointing runs a layer again in the backward.
    found[name] = found[name] + kept if name in found else kept
    parameter.grad = None


@contextmanager
def _seen(model: Any, decoder: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Capture the embeddings, the output of the layers, and the gradients at their input and output."""
    seen: dict[str, torch.Tensor] = {}

    def gradient(name: str, tensor: torch.Tensor) -> None:
        def note(grad: torch.Tensor) -> None:
            seen[name] = grad.detach()[0].clone()

        if not tensor.requires_grad:
            tensor.requires_grad_(True)  # frozen embeddings: their gradient shows the layers' backward all the same
        tensor.register_hook(note)

    def embedded(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor | None:
        seen[_EMBEDDED] = made.detach()[0].clone()
        if not torch.is_grad_enabled():
            return None
        gradient(_OF_EMBEDDED, made)
        return made.clone()  # because the model may put images into it, and a leaf cannot be changed

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("inputs_embeds")
        if given is not None:
            gradient(_OF_INPUTS, given)
        else:
            handles.append(embeddings.register_forward_hook(lambda module, args, made: gradient(_OF_INPUTS, made)))

    def after(module: Any, args: Any, made: Any) -> None:
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            return
        seen[_HIDDEN] = hidden.detach()[0].clone()
        if hidden.requires_grad:
            gradient(_OF_LOSS, hidden)

    embeddings = model.get_input_embeddings()
    handles = [
        embeddings.register_forward_hook(embedded),
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _states_of_torch() -> list[torch.Tensor]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
