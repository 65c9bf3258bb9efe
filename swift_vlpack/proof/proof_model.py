"""Run the model that is proved on samples, as a packed sequence or as a padded batch, and split the results.

The proof needs no trainer and no template, only an object that collates samples both ways (`Batches`):

    packed = proof_model.run(samples, packed=True)
    alone = proof_model.run(samples[:1], packed=False)

If sample 0 sees none of the others, `packed.logits[0]` equals `alone.logits[0]`, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from swift_vlpack.feed.collate import NOT_FOR_THE_MODEL, on_device
from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.feed.waiting import is_of_collective
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.proof.branches import as_trained, boundaries_of, without_extras
from swift_vlpack.proof.shards import class_of
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded

NUM_COLUMNS = 1024
"""Most words of the vocabulary whose logits are compared. They are enough, because a change in a token's hidden state
moves all its logits. Over a whole vocabulary, logits would be the largest tensor and the most expensive product."""
VISION_PARTS = ("visual", "vision", "audio", "image")
"""Words in the names of modules that are not part of the language model."""
_LONGEST_PATTERN = 1024
"""Number of tokens after which the random weights of `pulled` repeat."""


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

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Collated:
        """Split a collator's output into inputs, labels and loss weights."""
        inputs = {name: value for name, value in made.items() if name not in ("labels", *NOT_FOR_THE_MODEL)}
        return cls(inputs, made.get("labels"), made.get("loss_scale"))


class Batches(Protocol):
    """Make the inputs of a forward from samples, packed or padded."""

    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> AbstractContextManager[Collated]:
        """Yield one packed sequence, or the host's own padded batch; run the forward inside of the context."""


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
class RunResult:
    """The result of a forward, split into its samples."""

    logits: tuple[torch.Tensor, ...]  # (length, some columns of the vocabulary) each
    labels: tuple[torch.Tensor | None, ...]
    weights: tuple[torch.Tensor | None, ...]
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Gradients by the name of the parameter."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the model."""
    positions: tuple[torch.Tensor, ...] = ()  # (axes, length) each
    """Positions that the rotary embedding was given; empty if the model has none that takes positions."""
    slots: tuple[Slot, ...] = ()
    shape: tuple[int, int] = (0, 0)
    """Shape of the batch: (batch_size, num_tokens)."""

    def of_sample(self, at: int) -> RunResult:
        """Return the results of one sample of an un-packed batch, and its inputs without the padding."""
        mask = self.inputs.get("attention_mask")
        inputs = {}
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == len(self.logits):
                own = value[at : at + 1]
                if mask is not None and own.shape[:2] == (1, mask.shape[1]):
                    own = own[:, mask[at].bool()]
                inputs[name] = own
        length = len(self.logits[at])
        return RunResult(
            (self.logits[at],),
            (self.labels[at],),
            (self.weights[at],),
            {},
            inputs,
            self.positions[at : at + 1],
            (Slot(0, 0, length),),
            (1, length),
        )


@dataclass(frozen=True, slots=True)
class ProofModel:
    """A model without wrappers, and the means to run it."""

    model: Any
    batches: Batches
    is_ordinary: Callable[[int], bool]
    """Tells whether a token is plain text, which may be replaced without moving images or turns."""
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_head_cut: bool = False
    """True if the head computes only the logits that are compared (`with_cut_head`)."""
    has_own_collator: bool = False
    """True if the caller's own collator makes the batches, so that a cause may be what it hands to the model."""

    def run(
        self,
        samples: Sequence[Encoded],
        *,
        packed: bool,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> RunResult:
        """Run one forward; with `parameters` also a backward from the logits of all targets."""
        with self.batches.batch(samples, packed=packed) as batch:
            mask = batch.inputs.get("attention_mask")
            slots = tuple(batch.slots or _slots(samples, mask, packed=packed))
            with (
                cut_head(self.model) if self.is_head_cut else nullcontext(),
                rotary_positions(self.model) as positions,
                torch.set_grad_enabled(bool(parameters)),
            ):
                with self.forward_context():
                    device = next(self.model.parameters()).device
                    logits = self.model(**on_device(batch.inputs, device)).logits
                # Keep only these columns before the gradient, so that the whole logits, the largest tensor, can be
                # freed.
                logits = logits if self.is_head_cut else some_columns(logits)
                gradient = {}
                if parameters:
                    assert batch.labels is not None
                    pull = pulled(logits, batch, _places(batch.labels, slots))
                    found = torch.autograd.grad(pull, list(parameters.values()), allow_unused=True)
                    gradient = {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}
        positions = [one for one in positions if one.shape[-1] == logits.shape[1]]
        return RunResult(
            tuple(slot.of(logits.detach()) for slot in slots),
            _by_sample(batch.labels, slots),
            _by_sample(batch.weights, slots),
            gradient,
            batch.inputs,
            _positions_by_sample(positions[0], len(logits), slots) if positions else (),
            slots,
            (logits.shape[0], logits.shape[1]),
        )


def with_cut_head(proof_model: ProofModel, words: Encoded) -> ProofModel:
    """Let the head compute only the logits that are compared, if that gives the same on a few `words`.

    Saves time, because with a large vocabulary the head is most of the work of a small model. A model that computes
    logits from one another keeps its whole head, and so does a model that cannot be run on words alone.
    """
    cut = replace(proof_model, is_head_cut=True)
    try:
        whole, logits = (one.run([words], packed=False).logits[0] for one in (proof_model, cut))
    except Exception as error:  # a model that needs media may raise anything
        if is_of_collective(error):
            raise
        return proof_model
    is_same = logits.shape == whole.shape and torch.allclose(logits.float(), whole.float(), rtol=0.02, atol=0.02)
    return cut if is_same else proof_model


@contextmanager
def cut_head(model: Any) -> Iterator[None]:
    """Compute the logits of `some_columns` only; a head that is more than a linear layer stays as it is."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if class_of(head) is not torch.nn.Linear:
        yield
        return

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        step = _step(head.out_features)
        return torch.nn.functional.linear(hidden, head.weight[::step], None if head.bias is None else head.bias[::step])

    before = vars(head).get("forward")
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        vars(head).pop("forward")
        vars(head).update({} if before is None else {"forward": before})


@contextmanager
def rotary_positions(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the positions by which rotary embeddings of the language model turn queries and keys.

    The inputs do not always have these positions: for un-packed batches, the model computes them itself.
    """
    seen: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        found = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if isinstance(found, torch.Tensor) and found.dim() > 1 and not found.is_floating_point():
            seen.append(found.detach())

    rotary = [
        module
        for name, module in model.named_modules()
        if "rotary" in type(module).__name__.lower() and not any(part in name for part in VISION_PARTS)
    ]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in rotary]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _by_sample(per_token: torch.Tensor | None, slots: Sequence[Slot]) -> tuple[torch.Tensor | None, ...]:
    """Cut a per-token tensor of the batch into those of its samples."""
    return tuple(None if per_token is None else slot.of(per_token) for slot in slots)


def _positions_by_sample(positions: torch.Tensor, batch_size: int, slots: Sequence[Slot]) -> tuple[torch.Tensor, ...]:
    """Cut positions of (axes, batch, tokens), or (batch, tokens), into the samples."""
    axes = positions if positions.dim() == 3 else positions[None]
    axes = axes.expand(-1, batch_size, -1)
    return tuple(axes[:, slot.row, slot.places] for slot in slots)


def length_of(sample: Encoded) -> int:
    """Return the number of tokens of a sample."""
    return int(sample["length"])


def some_columns(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of every n-th word of the vocabulary, at most `NUM_COLUMNS` of them."""
    step = _step(logits.shape[-1])
    return logits[..., ::step].clone() if step > 1 else logits


def _step(num_words: int) -> int:
    return -(-num_words // NUM_COLUMNS)


def pulled(logits: torch.Tensor, batch: Collated, places: torch.Tensor) -> torch.Tensor:
    """Return the scalar whose gradient is compared: a weighted sum of the logits that predict targets.

    Not the loss: if a model is sure of all its targets, or was ruined, the gradient of its loss is nothing but rounding
    errors. Logits have a gradient in any state of the model. The weights depend on the place of a token in its sample
    (`places`), so the sum of a pack is that of its samples. Loss weights are included, and so are targets that wrongly
    stand in the padding.
    """
    assert batch.labels is not None
    counts = (batch.labels != NO_LABEL).to(logits.device, torch.float32)
    counts = counts if batch.weights is None else counts * batch.weights.to(logits.device)
    is_target = counts[:, 1:] != 0
    # Weights are random, because a sum with equal weights is the same if two tokens are exchanged.
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(_LONGEST_PATTERN, logits.shape[-1], generator=generator).to(logits.device)
    places = places.to(logits.device)[:, :-1][is_target] % _LONGEST_PATTERN
    of_tokens = (logits[:, :-1][is_target].float() * pattern[places]).sum(-1)
    return (of_tokens * counts[:, 1:][is_target]).sum()


def _places(labels: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
    """Number the tokens of each sample from 0, in the shape of `labels`; tokens of no sample are 0."""
    places = torch.zeros(labels.shape, dtype=torch.long)
    for slot in slots:
        places[slot.row, slot.places] = torch.arange(slot.num_prefix + slot.length)
    return places


def _slots(samples: Sequence[Encoded], mask: torch.Tensor | None, *, packed: bool) -> list[Slot]:
    """Return where samples lie by the host's rules: in one sequence, or one a row, padded on either side."""
    if packed:
        return slots_in(boundaries_of(samples))
    if mask is None or mask.dim() != 2:
        return [Slot(row, 0, length_of(sample)) for row, sample in enumerate(samples)]
    kept = mask.bool().int()
    starts, counts = kept.argmax(-1).tolist(), kept.sum(-1).tolist()
    return [Slot(row, start, length) for row, (start, length) in enumerate(zip(starts, counts, strict=True))]
