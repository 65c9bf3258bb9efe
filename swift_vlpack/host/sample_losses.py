"""Compute the loss of each sample of a packed sequence, so that evaluation can average as it does without packing.

A mean over packs differs from a mean over batches of samples. So a pack is evaluated to the summed loss of each of its
samples and the number of their targets; `RowsOfEvaluation` puts these in row order, to be batched as un-packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers.modeling_outputs import CausalLMOutput

from swift_vlpack.feed.sequence_loss import num_targets
from swift_vlpack.rows.contents import NO_LABEL

LossOfSample = Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes the outputs, labels and weights of one sample; returns the loss summed over its tokens."""


class SampleLoss(NamedTuple):
    """The loss of one sample."""

    total: float
    num_tokens: int
    """Number of tokens that are predicted: the targets."""


class LossesOfRow:
    """A loss function for a trainer that also notes the loss of every sample in a packed sequence."""

    def __init__(self, lengths: Sequence[int], of_sample: LossOfSample, kept: torch.Tensor | None = None) -> None:
        """Take the lengths of the samples; `kept` marks the tokens of the sequence that have logits (None: all)."""
        self.of_sample = of_sample
        self.samples: list[SampleLoss] = []
        ends = torch.tensor([0, *accumulate(lengths)])
        # With `kept`, translate the ends of samples from tokens of the sequence to positions among kept logits.
        self._ends = ends if kept is None else torch.cat((ends[:1], kept.cpu().long().cumsum(0)))[ends]
        self._num_behind = 0 if kept is None else 1

    def __call__(
        self, outputs: Any, labels: torch.Tensor, *, loss_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Note the loss of each sample; return the mean over the targets of the sequence."""
        totals, counts = [], []
        for of_one, of_labels, scale in self._apart(outputs, labels, loss_scale):
            counts.append(num_targets(of_labels))
            total = self.of_sample(of_one, of_labels, scale).detach().float()
            # The loss of a sample without targets may be NaN; count it as 0.
            totals.append(torch.where(counts[-1] > 0, total, torch.zeros_like(total)))
        if not totals:  # no row of the pack could be read
            return outputs.logits.new_zeros(())
        both = torch.stack(totals), torch.stack(counts)
        self.samples = [SampleLoss(*one) for one in zip(*(values.tolist() for values in both), strict=True)]
        return both[0].sum() / both[1].sum()

    def _apart(
        self, outputs: Any, labels: torch.Tensor, loss_scale: torch.Tensor | None
    ) -> Iterator[tuple[CausalLMOutput, torch.Tensor, torch.Tensor | None]]:
        """Yield each sample in the form that it has as an un-packed batch of one."""
        for start, stop in pairwise(self._ends.tolist()):
            # With `kept`, the label of a sample's last target stands one position after its last kept logit.
            tokens = slice(start, stop + self._num_behind)
            of_labels = labels[:, tokens].clone()
            of_labels[:, :1] = NO_LABEL
            loss = None if outputs.loss is None else outputs.loss.view(-1)[start:stop]
            scale = None if loss_scale is None else loss_scale.view(-1)[tokens]
            yield CausalLMOutput(loss=loss, logits=outputs.logits[:, tokens]), of_labels, scale


class RowsOfEvaluation(list[dict[str, float]]):
    """The losses of a packed evaluation, one for each row in order, to be batched as without packing."""

    def __init__(self, losses_of_ranks: Sequence[dict[int, SampleLoss]]) -> None:
        of_rows = {row: loss for of_rank in losses_of_ranks for row, loss in of_rank.items()}
        super().__init__(of_rows[row]._asdict() for row in sorted(of_rows))
