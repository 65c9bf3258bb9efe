"""The loss of each sample of a packed row, from which an evaluation adds up the batches that it would have un-packed.

A mean over packs is another number than a mean over batches of rows. So a pack is evaluated for the sum over the tokens
of each of its samples, and the number of these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers.modeling_outputs import CausalLMOutput

from swift_vlpack.data.model.row_loss import num_targets
from swift_vlpack.data.rows.contents import NO_LABEL

LossOfSample = Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Outputs, labels and weights of one sample in; the sum over its tokens out."""


class SampleLoss(NamedTuple):
    """The loss of one sample."""

    total: float
    num_tokens: int
    """Those that are predicted."""


class LossesOfRow:
    """A loss function of a trainer that notes the loss of every sample in a packed row."""

    def __init__(self, lengths: Sequence[int], of_sample: LossOfSample, kept: torch.Tensor | None = None) -> None:
        """Take the lengths of the samples, and which tokens of the row have logits (None: all)."""
        self.of_sample = of_sample
        self.samples: list[SampleLoss] = []
        ends = torch.tensor([0, *accumulate(lengths)])
        # Logits of tokens without a target are left out, so places in the row are counted in those that are there.
        self._ends = ends if kept is None else torch.cat((ends[:1], kept.cpu().long().cumsum(0)))[ends]
        self._num_behind = 0 if kept is None else 1

    def __call__(
        self, outputs: Any, labels: torch.Tensor, *, loss_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Note the samples; returns the mean over the tokens of the row."""
        totals, counts = [], []
        for of_one, of_labels, scale in self._apart(outputs, labels, loss_scale):
            counts.append(num_targets(of_labels))
            total = self.of_sample(of_one, of_labels, scale).detach().float()
            # A mean over no token is NaN, and such a sample has no part in any loss.
            totals.append(torch.where(counts[-1] > 0, total, torch.zeros_like(total)))
        if not totals:  # a pack of which no row could be read
            return outputs.logits.new_zeros(())
        both = torch.stack(totals), torch.stack(counts)
        self.samples = [SampleLoss(*one) for one in zip(*(values.tolist() for values in both), strict=True)]
        return both[0].sum() / both[1].sum()

    def _apart(
        self, outputs: Any, labels: torch.Tensor, loss_scale: torch.Tensor | None
    ) -> Iterator[tuple[CausalLMOutput, torch.Tensor, torch.Tensor | None]]:
        """Each sample as the batch of one that it would be un-packed."""
        for start, stop in pairwise(self._ends.tolist()):
            # With the logits of targets alone, the last target of a sample is at the place behind them.
            tokens = slice(start, stop + self._num_behind)
            of_labels = labels[:, tokens].clone()
            of_labels[:, :1] = NO_LABEL
            loss = None if outputs.loss is None else outputs.loss.view(-1)[start:stop]
            scale = None if loss_scale is None else loss_scale.view(-1)[tokens]
            yield CausalLMOutput(loss=loss, logits=outputs.logits[:, tokens]), of_labels, scale


class RowsOfEvaluation(list[dict[str, float]]):
    """The rows of a packed evaluation in their order, to be taken in batches as without packing."""

    def __init__(self, losses_of_ranks: Sequence[dict[int, SampleLoss]]) -> None:
        of_rows = {row: loss for of_rank in losses_of_ranks for row, loss in of_rank.items()}
        super().__init__(of_rows[row]._asdict() for row in sorted(of_rows))
