"""What the proof looks at: a model, and two ways to give it samples - as a packed row, and as the host would un-packed.

Needs no trainer and no template: whoever can make both kinds of rows can have them proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from swift_vlpack.data.model.collate import NOT_FOR_THE_MODEL, UNUSED_COLUMNS, layout, on_device, packed_row
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded

NUM_COLUMNS = 4096
"""Words of the vocabulary whose logits are compared. What changes a token's hidden state moves all of them, and the
logits of a row over a whole vocabulary are the largest tensor there is: GBs, of which the proof holds several."""


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


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, without wrappers, and how it is run."""

    model: Any
    rows: Rows
    is_ordinary: Callable[[int], bool]
    """Tokens of text, which may be exchanged without moving images or turns."""
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(
        self,
        samples: Sequence[Encoded],
        *,
        packed: bool,
        parameters: Mapping[str, torch.nn.Parameter] | None = None,
        num_targets: int = 1,
    ) -> Ran:
        """One forward; with `parameters` also a backward of the loss, for a step of so many targets."""
        with (
            self.rows.row(samples, packed=packed) as row,
            self.forward_context(),
            torch.set_grad_enabled(bool(parameters)),
        ):
            device = next(self.model.parameters()).device
            logits = self.model(**on_device(row.inputs, device)).logits
            gradient = {}
            if parameters:
                loss = sum_of_losses(logits, row.labels, row.weights) / num_targets
                found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                gradient = {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}
        parts = list(map(length_of, samples))
        cut = _packed if packed else _padded(row.inputs.get("attention_mask"))
        return Ran(
            cut(some_columns(logits.detach()), parts),
            cut(row.labels, parts) if row.labels is not None else (None,) * len(parts),
            cut(row.weights, parts) if row.weights is not None else (None,) * len(parts),
            gradient,
            row.inputs,
        )


def length_of(sample: Encoded) -> int:
    """Tokens of a sample."""
    return int(sample["length"])


def some_columns(logits: torch.Tensor) -> torch.Tensor:
    """Logits of words from all over the vocabulary, in place of all."""
    step = -(-logits.shape[-1] // NUM_COLUMNS)
    return logits[..., ::step].clone() if step > 1 else logits


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor | None, weights: torch.Tensor | None) -> torch.Tensor:
    """The losses of all targets, each weighted: what a step sums up, as ms-swift shifts and weighs it."""
    assert labels is not None
    targets = labels[:, 1:].to(logits.device)
    counts = targets != NO_LABEL
    losses = torch.nn.functional.cross_entropy(logits[:, :-1][counts].float(), targets[counts], reduction="none")
    if weights is not None:
        losses = losses * weights[:, 1:].to(logits.device)[counts]
    return losses.sum()


def _packed(row: torch.Tensor, parts: list[int]) -> tuple[torch.Tensor, ...]:
    return row[0, : sum(parts)].split(parts)  # what is behind the samples is padding


def _padded(mask: torch.Tensor | None) -> Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, ...]]:
    """Padding is on either side, as the host likes it."""

    def cut(rows: torch.Tensor, parts: list[int]) -> tuple[torch.Tensor, ...]:
        if mask is None or mask.dim() != 2:
            return tuple(row[:length] for row, length in zip(rows, parts, strict=True))
        return tuple(row[kept.bool()] for row, kept in zip(rows, mask.to(rows.device), strict=True))

    return cut
