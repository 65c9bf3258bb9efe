"""What the proof looks at: a model, and two ways to give it samples - as a packed row, and as the host would un-packed.

Needs no trainer and no template: whoever can make both kinds of rows can have them proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from swift_vlpack.data.model.collate import NOT_FOR_THE_MODEL, UNUSED_COLUMNS, layout, on_device, packed_row
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded

NUM_COLUMNS = 4096
"""Words of the vocabulary whose logits are compared. What changes a token's hidden state moves all of them, and the
logits of a sequence over a whole vocabulary are the largest tensor there is, and the largest product."""
VISION_PARTS = ("visual", "vision", "audio", "image")
"""Words in the names of modules that are no part of the language model."""
_LONGEST_PATTERN = 1024
"""Tokens after which the weights of `pulled` repeat."""
Cut = Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, ...]]
"""Tensors of a batch, by tokens, into those of its samples."""


@dataclass(frozen=True, slots=True)
class Row:
    """Collated samples: what the model takes, and what its loss is made of."""

    inputs: Mapping[str, Any]
    labels: torch.Tensor | None  # (num_rows, num_tokens)
    weights: torch.Tensor | None  # of the tokens in the loss; the same shape

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Row:
        """From what a collator made."""
        inputs = {name: value for name, value in made.items() if name not in ("labels", *NOT_FOR_THE_MODEL)}
        return cls(inputs, made.get("labels"), made.get("loss_scale"))


class Rows(Protocol):
    """Two ways from samples to the inputs of a forward."""

    def row(self, samples: Sequence[Encoded], *, packed: bool) -> AbstractContextManager[Row]:
        """One packed row, or the host's own padded batch; to be run inside of the context."""


class TemplateRows:
    """Both by ms-swift's template, the way that it collates in training."""

    def __init__(self, template: Any, multiple: int = 1) -> None:
        """`multiple`: rows are padded as those that are trained."""
        self.template = template
        self.multiple = multiple

    @contextmanager
    def row(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Row]:
        """The template adds to samples and takes from them, so it gets copies."""
        copies = [{name: value for name, value in sample.items() if name != UNUSED_COLUMNS} for sample in samples]
        with layout(self.template, packed=packed):
            if packed:
                yield Row.of(packed_row(self.template, copies, multiple=self.multiple))
            else:
                yield Row.of(self.template.data_collator(copies))


@dataclass(frozen=True, slots=True)
class Ran:
    """What a forward gave, cut into its samples."""

    logits: tuple[torch.Tensor, ...]  # (length, some columns of the vocabulary) each
    labels: tuple[torch.Tensor | None, ...]
    weights: tuple[torch.Tensor | None, ...]
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By the name of the parameter."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the model was handed."""
    positions: tuple[torch.Tensor, ...] = ()  # (axes, length) each
    """What the rotary embedding was asked for; empty where the model has none that takes positions."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, without wrappers, and how it is run."""

    model: Any
    rows: Rows
    is_ordinary: Callable[[int], bool]
    """Tokens of text, which may be exchanged without moving images or turns."""
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_head_cut: bool = False
    """Whether the head computes only the logits that are compared (`with_cut_head`)."""

    def run(
        self,
        samples: Sequence[Encoded],
        *,
        packed: bool,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> Ran:
        """Run one forward; with `parameters` also a backward from the logits of all targets."""
        with self.rows.row(samples, packed=packed) as row:
            parts = list(map(length_of, samples))
            mask = row.inputs.get("attention_mask")
            cut = _packed if packed else _padded(mask)
            with (
                cut_head(self.model) if self.is_head_cut else nullcontext(),
                positions_asked(self.model) as asked,
                torch.set_grad_enabled(bool(parameters)),
            ):
                with self.forward_context():
                    device = next(self.model.parameters()).device
                    logits = self.model(**on_device(row.inputs, device)).logits
                logits = logits if self.is_head_cut else some_columns(logits)
                gradient = {}
                if parameters:
                    assert row.labels is not None
                    pull = pulled(logits, row, _places(row.labels, parts, mask, packed=packed))
                    found = torch.autograd.grad(pull, list(parameters.values()), allow_unused=True)
                    gradient = {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}
        asked = [one for one in asked if one.shape[-1] == logits.shape[1]]
        return Ran(
            cut(logits.detach(), parts),
            cut(row.labels, parts) if row.labels is not None else (None,) * len(parts),
            cut(row.weights, parts) if row.weights is not None else (None,) * len(parts),
            gradient,
            row.inputs,
            _positions(asked[0], len(logits), cut, parts) if asked else (),
        )


def with_cut_head(subject: Subject, sample: Encoded) -> Subject:
    """Let the head compute only the logits that are compared, if that gives the same on a short sample.

    The head of a large vocabulary is nearly all that a small model computes. Some models do more with logits than
    transform each by itself; those keep their whole head.
    """
    cut = replace(subject, is_head_cut=True)
    whole = subject.run([sample], packed=False).logits[0]
    try:
        logits = cut.run([sample], packed=False).logits[0]
    except (RuntimeError, IndexError, ValueError):
        return subject
    is_same = logits.shape == whole.shape and torch.allclose(logits.float(), whole.float(), rtol=0.02, atol=0.02)
    return cut if is_same else subject


@contextmanager
def cut_head(model: Any) -> Iterator[None]:
    """Compute the logits of `some_columns` only; a head that is more than a linear layer stays as it is."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not torch.nn.Linear:
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
def positions_asked(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the positions by which rotary embeddings of the language model turn queries and keys.

    They are seen there because the model may compute them itself, as it does of un-packed batches.
    """
    seen: list[torch.Tensor] = []

    def asked(module: Any, args: Any, kwargs: Any) -> None:
        found = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if isinstance(found, torch.Tensor) and found.dim() > 1 and not found.is_floating_point():
            seen.append(found.detach())

    rotary = [
        module
        for name, module in model.named_modules()
        if "rotary" in type(module).__name__.lower() and not any(part in name for part in VISION_PARTS)
    ]
    handles = [module.register_forward_pre_hook(asked, with_kwargs=True) for module in rotary]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _positions(asked: torch.Tensor, batch_size: int, cut: Cut, parts: list[int]) -> tuple[torch.Tensor, ...]:
    """Cut positions of (axes, batch, tokens), or (batch, tokens), into the samples."""
    axes = asked if asked.dim() == 3 else asked[None]
    of_axes = [cut(axis.expand(batch_size, -1), parts) for axis in axes]
    return tuple(torch.stack(of_sample) for of_sample in zip(*of_axes, strict=True))


def length_of(sample: Encoded) -> int:
    """Tokens of a sample."""
    return int(sample["length"])


def some_columns(logits: torch.Tensor) -> torch.Tensor:
    """Logits of words from all over the vocabulary, in place of all."""
    step = _step(logits.shape[-1])
    return logits[..., ::step].clone() if step > 1 else logits


def _step(num_words: int) -> int:
    return -(-num_words // NUM_COLUMNS)


def pulled(logits: torch.Tensor, row: Row, places: torch.Tensor) -> torch.Tensor:
    """Add up the logits by which targets are predicted, each with a weight of its own: what a gradient is taken of.

    The loss of a model that is sure of all its targets, or was ruined, has a gradient of nothing but rounding; logits
    have one in any state of the model. Weights follow from the place of a token in its sample, so the sum of a pack is
    that of its samples. Loss weights come in, and so do targets outside of the samples, in the padding.
    """
    assert row.labels is not None
    counts = (row.labels != NO_LABEL).to(logits.device, torch.float32)
    counts = counts if row.weights is None else counts * row.weights.to(logits.device)
    is_asked = counts[:, 1:] != 0
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(_LONGEST_PATTERN, logits.shape[-1], generator=generator).to(logits.device)
    places = places.to(logits.device)[:, :-1][is_asked] % _LONGEST_PATTERN
    of_tokens = (logits[:, :-1][is_asked].float() * pattern[places]).sum(-1)
    return (of_tokens * counts[:, 1:][is_asked]).sum()


def _places(row: torch.Tensor, parts: list[int], mask: torch.Tensor | None, *, packed: bool) -> torch.Tensor:
    """Number the tokens of each sample from 0, in the shape of `row`."""
    if packed:
        return torch.cat([torch.arange(length) for length in [*parts, row.shape[1] - sum(parts)]])[None]
    if mask is None or mask.dim() != 2:
        return torch.arange(row.shape[1]).expand(row.shape)
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _packed(row: torch.Tensor, parts: list[int]) -> tuple[torch.Tensor, ...]:
    return row[0, : sum(parts)].split(parts)  # what is behind the samples is padding


def _padded(mask: torch.Tensor | None) -> Cut:
    """Padding is on either side, as the host likes it."""

    def cut(rows: torch.Tensor, parts: list[int]) -> tuple[torch.Tensor, ...]:
        if mask is None or mask.dim() != 2:
            return tuple(row[:length] for row, length in zip(rows, parts, strict=True))
        return tuple(row[kept.bool()] for row, kept in zip(rows, mask.to(rows.device), strict=True))

    return cut
