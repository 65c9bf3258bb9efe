"""Run the model that is proved on samples, packed or alone, and keep what it makes of every token.

The one runner of both proofs. It needs an object that collates samples both ways (`Batches`), and takes the trainer's
own loss if there is a trainer:

    packed = runner.run(samples, packed=True)
    alone = runner.run(samples[:1], packed=False)

If sample 0 sees none of the others, `packed.of(0)` equals `alone.of(0)`, up to rounding. Nothing is left on the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from swift_vlpack.feed.collate import NOT_FOR_THE_MODEL, on_device
from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.proof.branches import as_trained, boundaries_of, without_extras
from swift_vlpack.proof.experts import Routes, routers_of
from swift_vlpack.proof.gradients import VISION_PARTS, Parameters
from swift_vlpack.proof.shards import class_of, shape_of
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded

_NUM_WEIGHTS = 1024
"""Number of rows of random weights in `_pulled`; labels share them."""

Hook = Callable[[Any, Any, Any, Any], Any]
ComputeLoss = Callable[[Mapping[str, Any], bool], torch.Tensor]
"""Computes the trainer's loss of collated samples, packed or not, with autocast and all that the trainer does."""


class Slot(NamedTuple):
    """The place of a sample's tokens in a batch: a row, a start and a length."""

    row: int
    start: int
    length: int
    prefix_start: int = 0
    """First token of the prefix that the sample shares with others."""
    num_prefix: int = 0
    """Tokens of that prefix; 0 if the sample shares none. They are not in `start` and `length`."""

    @property
    def tokens(self) -> slice:
        """Return the tokens in the row, without those of a shared prefix."""
        return slice(self.start, self.start + self.length)

    @property
    def first(self) -> int:
        """Return the first token of the sample in the row, which may be that of its prefix."""
        return self.prefix_start if self.num_prefix else self.start

    @property
    def prefix(self) -> slice:
        """Return the tokens of the prefix that the sample shares."""
        return slice(self.prefix_start, self.prefix_start + self.num_prefix)

    @property
    def places(self) -> slice | torch.Tensor:
        """Return the index of all tokens of the sample in the row, those of its prefix first."""
        if not self.num_prefix:
            return self.tokens
        return torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in (self.prefix, self.tokens)])

    def of(self, per_token: torch.Tensor) -> torch.Tensor:
        """Cut a tensor of (batch_size, num_tokens, ...) to the tokens of the sample."""
        return per_token[self.row, self.places]


def slots_in(boundaries: Boundaries) -> list[Slot]:
    """Return where samples lie in a packed sequence of these boundaries."""
    slots = []
    for *prefix, (start, stop) in boundaries.samples:
        prefix_start, prefix_stop = prefix[0] if prefix else (0, 0)
        slots.append(Slot(0, start, stop - start, prefix_start, prefix_stop - prefix_start))
    return slots


@dataclass(frozen=True, slots=True)
class Collated:
    """Collated samples: the inputs of the model, and the labels and weights of its loss."""

    inputs: Mapping[str, Any]
    labels: torch.Tensor | None  # (batch_size, num_tokens)
    weights: torch.Tensor | None  # of the tokens in the loss; the same shape
    slots: Sequence[Slot] = ()
    """Places of the samples, if they are not where the host puts them (`_slots`)."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """All that was collated, for the trainer's loss."""
    positions: torch.Tensor | None = None  # (axes, batch_size, num_tokens)
    """Positions that the rotary embedding was given; None if the model has none that takes positions."""

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Collated:
        """Split a collator's output into inputs, labels and loss weights."""
        inputs = {name: value for name, value in made.items() if name not in ("labels", *NOT_FOR_THE_MODEL)}
        return cls(inputs, made.get("labels"), made.get("loss_scale"), whole=made)


class Batches(Protocol):
    """Make the inputs of a forward from samples, packed or padded."""

    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> AbstractContextManager[Collated]:
        """Yield one packed sequence, or the host's own batch of one sample; run the forward inside of the context."""


class TemplateBatches:
    """Make both kinds of input with ms-swift's template, as it collates in training."""

    def __init__(self, template: Any, multiple: int = 1) -> None:
        """Take the template; packed sequences are padded to a multiple of `multiple` tokens, as in training."""
        self.template = template
        self.multiple = multiple

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        """Collate copies of the samples, because the template adds to them and takes from them."""
        with layout(self.template, packed=packed):
            if packed:
                yield Collated.of(packed_sequence(self.template, as_trained(samples), multiple=self.multiple))
            else:
                yield Collated.of(self.template.data_collator(list(map(without_extras, samples))))


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of one pass. Per-token tensors are (batch_size, num_tokens, width)."""

    given: Collated
    """The samples as they were collated, with their places and positions."""
    states: torch.Tensor
    """Hidden states after the last layer, from which the head computes logits."""
    dtype: torch.dtype
    """The coarsest data type that the model computes in."""
    of_states: torch.Tensor | None = None
    """Gradient of the trainer's loss with respect to `states`; None without a backward."""
    embedded: torch.Tensor | None = None
    """Embeddings of the tokens, with the noise that is drawn for them."""
    of_embedded: torch.Tensor | None = None
    """Gradient with respect to the embeddings, at the end of the layers' whole backward."""
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of parameters, by name; some values of each (`gradients.Parameters`)."""
    routes: torch.Tensor | None = None  # (batch_size, num_tokens, choices)
    """Numbers of the experts that each token was sent to, in all layers; None without experts."""
    has_drawn: bool = False
    """True if the pass drew random numbers from torch's generators."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the places of the samples."""
        return self.given.slots

    def of(self, at: int) -> torch.Tensor:
        """Return the hidden states of a sample."""
        return self.slots[at].of(self.states)

    def rerouted(self, at: int, other: Ran, there: int) -> torch.Tensor:
        """Mark the tokens of a sample that other experts computed in another pass."""
        length = len(self.of(at))
        if self.routes is None or other.routes is None or self.routes.shape[-1] != other.routes.shape[-1]:
            return torch.zeros(length, dtype=torch.bool, device=self.states.device)
        return (self.slots[at].of(self.routes) != other.slots[there].of(other.routes)).any(dim=-1)


class CannotSee(Exception):
    """The hidden states of a model cannot be captured, so nothing can be compared."""


@dataclass
class Runner:
    """A model without wrappers, and the means to run it."""

    model: Any
    batches: Batches
    is_ordinary: Callable[[int], bool]
    """Tells whether a token is plain text, which may be replaced without moving images or turns."""
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    has_own_collator: bool = False
    """True if the caller's own collator makes the batches, so that a cause may be what it hands to the model."""
    loss: ComputeLoss | None = None
    """The trainer's loss, if there is a trainer; else a backward begins at the hidden states (`_pulled`)."""
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
    """Multiplies a loss before its backward as training does, for gradients in 16 bits."""

    @cached_property
    def decoder(self) -> torch.nn.Module:
        """Return the module around the language model's layers, without the head."""
        return _layers_of(self.model)

    def run(
        self, samples: Sequence[Encoded], *, packed: bool, parameters: Parameters | None = None, seed: int = 0
    ) -> Ran:
        """Run one forward; with `parameters` also a backward. Equal seeds give equal random draws.

        Raises `CannotSee` if the hidden states of the model cannot be captured.
        """
        device = next(self.model.parameters()).device
        _seed_all(seed)  # so that with equal lengths and grids each token draws the same numbers again
        before = random_states()
        with self.batches.batch(samples, packed=packed) as batch, torch.set_grad_enabled(parameters is not None):
            slots = tuple(batch.slots or _slots(samples, batch.inputs.get("attention_mask"), packed=packed))
            seen = _Seen(batch.inputs["input_ids"].shape)
            collected = nullcontext(dict[str, torch.Tensor]()) if parameters is None else parameters.collected()
            with collected as gradient, hooked(self._hooks(seen)):
                if self.loss is not None:
                    loss = self.loss(batch.whole, packed)
                else:
                    with _without_head(self.model), self.forward_context():
                        self.model(**on_device(batch.inputs, device))
                    loss = torch.zeros(()) if parameters is None else _pulled(seen.live, batch)
                has_drawn = not all(map(torch.equal, before, random_states()))
                if seen.states is None:
                    raise CannotSee(f"{type(self.decoder).__name__} gives no hidden states")
                if parameters is not None and loss.requires_grad:
                    self.scale(loss).backward()
        weights = next((one for one in self.model.parameters() if one.is_floating_point()), seen.states)
        return Ran(
            given=replace(batch, slots=slots, positions=seen.positions),
            states=seen.states,
            dtype=coarsest([weights.dtype, seen.dtype, seen.states.dtype]),
            of_states=None if self.loss is None else seen.of_states,
            embedded=seen.embedded,
            of_embedded=seen.of_embedded,
            gradient=gradient,
            routes=seen.routes.together(seen.shape),
            has_drawn=has_drawn,
        )

    def _hooks(self, seen: _Seen) -> Iterator[tuple[torch.nn.Module, Hook]]:
        yield self.model.get_input_embeddings(), seen.note_embedded
        yield self.decoder, seen.note_states
        if (head := getattr(self.model, "get_output_embeddings", lambda: None)()) is not None:
            yield head, seen.note_head
        linear = (one for one in self.decoder.modules() if isinstance(one, torch.nn.Linear))
        yield from ((one, seen.note_dtype) for one in islice(linear, 1))
        for name, module in self.model.named_modules():
            if "rotary" in type(module).__name__.lower() and not any(part in name for part in VISION_PARTS):
                yield module, seen.note_positions
        yield from ((router, seen.routes.note) for router in routers_of(self.model))


class _Seen:
    """Collect by hooks, in one pass, the embeddings, the output of the layers, and the gradients at both."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.routes = Routes()
        self.dtype = torch.float32
        self.live: torch.Tensor | None = None
        self.states: torch.Tensor | None = None
        self.of_states: torch.Tensor | None = None
        self.embedded: torch.Tensor | None = None
        self.of_embedded: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy; not if embeddings were called for something else, too."""
        if tensor.shape[:2] == self.shape:
            setattr(self, name, tensor.detach().clone())

    def note_embedded(self, module: Any, args: Any, kwargs: Any, made: torch.Tensor) -> torch.Tensor | None:
        """Keep the embeddings, and their gradient, which shows the layers' backward even if they are frozen."""
        self.note("embedded", made)
        if not torch.is_grad_enabled():
            return None
        if not made.requires_grad:
            made.requires_grad_(True)
        made.register_hook(partial(self.note, "of_embedded"))
        return made.clone()  # because the model may put images into it, and a leaf cannot be changed

    def note_states(self, module: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Keep the hidden states, from which the head computes logits, and their gradient."""
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if isinstance(hidden, torch.Tensor) and hidden.shape[:2] == self.shape:
            self.live = hidden
            self.note("states", hidden)
            if hidden.requires_grad:
                hidden.register_hook(partial(self.note, "of_states"))

    def note_head(self, module: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Keep the hidden states that a head was given, of layers that hand on something else."""
        if self.states is None and args:
            self.note_states(module, (), {}, args[0])

    def note_dtype(self, module: Any, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        """Keep the type of a matrix product, as autocast and engines make it."""
        self.dtype = made.dtype

    def note_positions(self, module: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Keep the positions by which queries and keys are turned, as (axes, batch_size, num_tokens).

        The inputs do not always have these positions: for un-packed batches, the model computes them itself.
        """
        found = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        is_whole = isinstance(found, torch.Tensor) and found.dim() > 1 and not found.is_floating_point()
        if self.positions is None and is_whole and found.shape[-1] == self.shape[1]:
            found = found.detach() if found.dim() == 3 else found.detach()[None]
            self.positions = found.expand(-1, self.shape[0], -1)


@contextmanager
def hooked(hooks: Iterable[tuple[torch.nn.Module, Hook]]) -> Iterator[None]:
    """Call these with (module, args, kwargs, made) after the forwards of modules."""
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the data type with the fewest bits of precision; float32 for types that are not computed in."""
    known = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def length_of(sample: Encoded) -> int:
    """Return the number of tokens of a sample."""
    return int(sample["length"])


# -- the model --------------------------------------------------------------------------------------------------------


def _layers_of(model: Any) -> torch.nn.Module:
    """Return the module around the language model's layers, without the head: around the decoder's largest stack."""
    # Wrappers of PEFT and of vision-language models each hand on to the next inner model.
    while hasattr(model, "get_decoder") and (inner := model.get_decoder()) is not model:
        model = inner
    stacks = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)}
    sizes = {name: sum(prod(shape_of(each)) for each in one.parameters()) for name, one in stacks.items()}
    layers: torch.nn.Module = model.get_submodule(max(sizes, key=sizes.__getitem__, default="").rpartition(".")[0])
    return layers


@contextmanager
def _without_head(model: Any) -> Iterator[None]:
    """Compute one column of the logits only: those of a whole vocabulary would be the largest tensor of a pass.

    A head that is more than a linear layer stays as it is.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if class_of(head) is not torch.nn.Linear:
        yield
        return
    before = vars(head).get("forward")
    vars(head)["forward"] = lambda hidden: hidden[..., :1].clone()
    try:
        yield
    finally:
        vars(head).pop("forward")
        vars(head).update({} if before is None else {"forward": before})


def _pulled(states: torch.Tensor | None, batch: Collated) -> torch.Tensor:
    """Return the scalar whose gradient is compared without a trainer: a weighted sum of the states before targets.

    Not a loss: if a model is sure of all its targets, or was ruined, the gradient of its loss is nothing but rounding
    errors. The weights depend on the target, so the sum of a pack is that of its samples. Loss weights are included,
    and so are targets that wrongly stand in the padding.
    """
    assert batch.labels is not None
    if states is None:
        raise CannotSee("the layers give no hidden states")
    labels = batch.labels.to(states.device)[:, 1:]
    counts = (labels != NO_LABEL).float()
    counts = counts if batch.weights is None else counts * batch.weights.to(states.device)[:, 1:]
    # Weights are random, because a sum with equal weights is the same if two tokens are exchanged.
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(_NUM_WEIGHTS, states.shape[-1], generator=generator).to(states.device)
    is_target = counts != 0
    of_tokens = (states[:, :-1][is_target].float() * weights[labels[is_target] % _NUM_WEIGHTS]).sum(-1)
    return (of_tokens * counts[is_target]).sum()


def _slots(samples: Sequence[Encoded], mask: torch.Tensor | None, *, packed: bool) -> list[Slot]:
    """Return where samples lie by the host's rules: in one sequence, or one a row, padded on either side."""
    if packed:
        return slots_in(boundaries_of(samples))
    if mask is None or mask.dim() != 2:
        return [Slot(row, 0, length_of(sample)) for row, sample in enumerate(samples)]
    kept = mask.bool().int()
    starts, counts = kept.argmax(-1).tolist(), kept.sum(-1).tolist()
    return [Slot(row, start, length) for row, (start, length) in enumerate(zip(starts, counts, strict=True))]


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> list[torch.Tensor]:
    """Return the states of torch's random generators."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
