"""Evaluate with the numbers of a run without packing: `eval_loss` is a mean over batches of rows, not over packs.

By default, evaluation rows are not packed but padded, by the template that packs the training rows. Under
`eval_packing` the trainer's own loop runs twice. First it runs over packs, each of which gives the loss of each of its
samples:

    pack of rows 3, 0, 7  ->  {3: (2.5, 10 targets), 0: (0.8, 2 targets), 7: (1.1, 4 targets)}

Then it runs over these losses in the order of the rows. So the code that forms batches, shares them among ranks and
averages them is the code of a run without packing. A mean over packs would weigh the samples of a short pack as much as
those of a full one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from swift.dataset import LazyLLMDataset
from swift.trainers import Seq2SeqTrainer
from swift.utils import is_mp
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

from swift_vlpack.attention.sequence_effects import check_rope
from swift_vlpack.config import PACKS, PackingConfig
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.feed.sequence import layout
from swift_vlpack.feed.sequence_loss import num_targets
from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.host.losses import LossOfSample, is_mean, loss_of_sample
from swift_vlpack.host.ranks import gathered
from swift_vlpack.plan.registry import WINDOW
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import PackRecord
from swift_vlpack.rows.source import RowSource


def saved_validation_rows(pipeline: Any, rows: Any) -> Any:
    """Write the validation rows to `val_dataset.jsonl`, and drop the rows that ms-swift would drop without packing.

    For text models, ms-swift encodes rows before training, and deletes those that fail or are too long. For multimodal
    models, it encodes rows when they are evaluated.
    """
    if pipeline.args.streaming or pipeline.args.model_meta.is_multimodal:
        pipeline._save_val_dataset(rows)
        return rows
    _, kept = pipeline._encode_dataset(None, rows)
    return kept


def evaluation_data(rows: Any, pipeline: Any, config: PackingConfig) -> Any:
    """Return the data set that the trainer evaluates: encoded rows, or packs of them under `eval_packing`."""
    args, template = pipeline.args, pipeline.template
    if rows is None or args.predict_with_generate:
        return rows
    config = _without_loss_of_rows(config)
    encoder = RowEncoder.of(template, config)
    if not config.eval_packing:
        return LazyLLMDataset(rows, encoder.encode, strict=args.strict, random_state=args.data_seed)
    sized = with_all_lengths([RowSource(name="validation", rows=rows)], encoder, args, config.packing_cache_dir)
    packs = PlannedPackingDataset(FusionCaptionDataset(sized, template, shuffle=False), template, config)
    check_rope(pipeline.model.config, packs.sources, template.max_length, config)
    return packs


def _without_loss_of_rows(config: PackingConfig) -> PackingConfig:
    """Return options that keep every row, and keep it whole, because an evaluation averages over all rows."""
    return dataclasses.replace(
        config.without_sharing(),  # a loss of every row is cut out of the sequence, which has no prefixes then
        packing_batch=PACKS,  # an evaluation has no steps
        packing_strategy="greedy" if config.packing_strategy == WINDOW else config.packing_strategy,
        packing_drop_last=False,
        packing_overflow="keep",
        packing_stride=0,
        packing_min_len=1,
    )


class EvaluatesRows(Seq2SeqTrainer):
    """The part of the trainer that evaluates padded batches of rows, or packs with the numbers of such batches."""

    is_evaluating = False
    _pack_evaluated: PackRecord | None = None
    """The record of the pack that is evaluated now."""
    _losses_evaluated: dict[int, SampleLoss]
    """Losses by number of the row, filled while packs are evaluated."""

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **kwargs: Any) -> Any:
        """Return ms-swift's loader of evaluation rows. Packs are loaded one at a time, and none is dropped."""
        if not isinstance(dataset, Packs):
            return super()._get_dataloader(dataset, description, batch_size, **kwargs)
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super()._get_dataloader(dataset, description, 1, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate batches of rows. For packs, compute the losses of their rows first, and form batches of these."""
        if not isinstance(dataloader.dataset, Packs):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        self._losses_evaluated = {}
        gather: Any = self.gather_function  # type: ignore[has-type]
        super().evaluation_loop(dataloader, *args, **kwargs)
        self.gather_function = gather  # the loop clears it at its end
        rows: Any = LossesOfRows(gathered(self._losses_evaluated, "the losses of an evaluation"))
        # From here the trainer distributes, repeats and truncates batches exactly as it does for rows without packing.
        batches: Any = DataLoader(rows, self.args.eval_batch_size, drop_last=self.args.dataloader_drop_last)
        return super().evaluation_loop(self.accelerator.prepare(batches), *args, **kwargs)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a padded batch, a pack, or a batch of the losses that packs gave."""
        if set(inputs) == set(SampleLoss._fields):
            return self._loss_of_batch(**inputs), None, None
        record = self._pack_evaluated = getattr(inputs, "record", None)
        if record is not None:  # do not evaluate the first token of a sample, even if the template gives it a label
            inputs["labels"][:, record.boundaries.cu_seqlens[:-1]] = NO_LABEL
        self.is_evaluating = True
        try:
            with layout(self.template, packed=record is not None):
                return super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.is_evaluating, self._pack_evaluated = False, None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute ms-swift's loss of a batch, or of each sample of a pack that is evaluated."""
        if self._pack_evaluated is not None:
            return self._losses_of_samples(self._pack_evaluated, model, inputs, return_outputs)
        if self.is_evaluating and is_mean(self):
            num_items_in_batch = None  # otherwise ms-swift multiplies this rank's mean by the number of ranks
        if self.label_smoother is not None:  # ms-swift does not pass the number of items to a label smoother
            self.label_smoother.num_items = num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prepare_logits_to_keep(self, inputs: dict[str, Any]) -> None:
        """Let ms-swift drop logits without a target, but not those of a pack if one process has several GPUs.

        In that case ms-swift keeps the last logits of the sequence, which may begin in the middle of a sample.
        """
        if self._pack_evaluated is None or not is_mp():
            super().prepare_logits_to_keep(inputs)

    def _losses_of_samples(self, record: PackRecord, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Store the loss of every sample of a pack. ms-swift's own code computes the loss of each token."""
        losses = LossPerSample(record.lengths, loss_of_sample(self), inputs.get("logits_to_keep"))
        scale = inputs.get("loss_scale")
        if scale is None:  # with weights, ms-swift computes a loss for each token; without, the model takes the mean
            scale = torch.ones_like(inputs["labels"], dtype=torch.float32)
        inputs = {**inputs, "loss_scale": scale, "compute_loss_func": losses}
        inputs.pop("skip_logits", None)
        result = super().compute_loss(model, inputs, return_outputs)
        rows = (sample_id.row for sample_id in record.sample_ids)
        self._losses_evaluated.update(zip(rows, losses.samples, strict=True))
        return result

    def _loss_of_batch(self, total: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's loss of a batch of rows. The mean over ranks is the loss of a run without packing."""
        num, num_shared = num_tokens.sum(), 1
        if self.args.average_tokens_across_devices and not is_mean(self):
            num, num_shared = self.accelerator.reduce(num, reduction="sum"), self.accelerator.num_processes
        return num_shared * total.sum().float() / num


class SampleLoss(NamedTuple):
    """The loss of one sample."""

    total: float
    num_tokens: int
    """Number of targets: tokens that are predicted."""


class LossPerSample:
    """A loss function for a trainer that also stores the loss of every sample in a packed sequence."""

    def __init__(self, lengths: Sequence[int], of_sample: LossOfSample, kept: torch.Tensor | None = None) -> None:
        """Prepare for samples of these lengths. `kept` marks the tokens that have logits; None means all tokens."""
        self.of_sample = of_sample
        self.samples: list[SampleLoss] = []
        ends = torch.tensor([0, *accumulate(lengths)])
        # With `kept`, translate the ends of samples from tokens of the sequence to positions among kept logits.
        self._ends = ends if kept is None else torch.cat((ends[:1], kept.cpu().long().cumsum(0)))[ends]
        self._num_after = 0 if kept is None else 1

    def __call__(
        self, outputs: Any, labels: torch.Tensor, *, loss_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Store the loss of each sample. Returns the mean over the targets of the sequence."""
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
        """Yield outputs, labels and weights of each sample, as they would be in an un-packed batch of one."""
        for start, stop in pairwise(self._ends.tolist()):
            # With `kept`, the label of a sample's last target is one position after its last kept logit.
            tokens = slice(start, stop + self._num_after)
            of_labels = labels[:, tokens].clone()
            of_labels[:, :1] = NO_LABEL
            loss = None if outputs.loss is None else outputs.loss.view(-1)[start:stop]
            scale = None if loss_scale is None else loss_scale.view(-1)[tokens]
            yield CausalLMOutput(loss=loss, logits=outputs.logits[:, tokens]), of_labels, scale


class LossesOfRows(list[Any]):
    """The losses of a packed evaluation, one for each row in the order of the rows, to be batched like rows."""

    def __init__(self, losses_of_ranks: Sequence[dict[int, SampleLoss]]) -> None:
        of_rows = {row: loss for of_rank in losses_of_ranks for row, loss in of_rank.items()}
        super().__init__(of_rows[row]._asdict() for row in sorted(of_rows))
