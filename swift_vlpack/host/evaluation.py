"""Evaluate padded batches of rows or, under `eval_packing`, packs: then `eval_loss` is the mean over all target tokens.

By default, evaluation rows are not packed but padded, by the template that packs the training rows. A mean over packs
would weigh the tokens of a short pack more than those of a full one, so packs are weighed by their target tokens:

    rank 0: {0: (25.0, 10 targets), 2: (1.6, 2 targets)}    rank 1: {1: (4.4, 4 targets)}    eval_loss 31.0 / 16
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from swift.dataset import LazyLLMDataset
from swift.trainers import Seq2SeqTrainer

from swift_vlpack.attention.packed_sequence import to_device
from swift_vlpack.attention.sequence_effects import check_rope
from swift_vlpack.config import PACKS, PackingConfig
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.feed.sequence import layout
from swift_vlpack.feed.sequence_loss import num_targets
from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.host.losses import is_mean
from swift_vlpack.host.ranks import gathered
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
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
        config.without_sharing(),  # the positions that are no targets are found by samples, not by branches
        packing_batch=PACKS,  # an evaluation has no steps
        packing_drop_last=False,
        packing_overflow="keep",
        packing_stride=0,
        packing_min_len=1,
    )


class EvaluatesRows(Seq2SeqTrainer):
    """The part of the trainer that evaluates padded batches of rows, or packs."""

    is_evaluating = False
    _packs_evaluated: dict[int, tuple[torch.Tensor, int]]
    """By number of the pack: its mean loss with its target tokens, and samples. Ranks may evaluate a pack twice."""

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **kwargs: Any) -> Any:
        """Return ms-swift's loader of evaluation rows. Packs are loaded one at a time, and none is dropped."""
        if not isinstance(dataset, Packs):
            return super()._get_dataloader(dataset, description, batch_size, **kwargs)
        with _set(self.args, dataloader_drop_last=False):
            return super()._get_dataloader(dataset, description, 1, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate batches of rows, or packs, whose loss is then the mean over their target tokens."""
        if not isinstance(dataloader.dataset, Packs):
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._packs_evaluated = {}
        # A pack gives the mean over its own targets, not its share of those of the packs on other ranks.
        with _set(self.args, average_tokens_across_devices=False):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        evaluated = self._packs_evaluated
        # All are read at once, because a device is waited for. The mean loss of a pack without targets is NaN.
        read = torch.stack([numbers for numbers, _ in evaluated.values()]).tolist() if evaluated else []
        named = zip(evaluated.items(), read, strict=True)
        packs = {number: (loss * num if num else 0.0, num, size) for (number, (_, size)), (loss, num) in named}
        of_ranks = gathered(packs, "the losses of an evaluation")
        of_packs = {number: pack for of_rank in of_ranks for number, pack in of_rank.items()}
        total, num_tokens, num_samples = (sum(numbers) for numbers in zip(*of_packs.values(), strict=True))
        output.metrics[f"{metric_key_prefix}_loss"] = total / num_tokens if num_tokens else math.nan
        return output._replace(num_samples=num_samples)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a padded batch, or a pack."""
        record = getattr(inputs, "record", None)
        if record is not None:  # do not evaluate the first token of a sample, even if the template gives it a label
            labels = inputs["labels"]
            labels.index_fill_(1, to_device(record.boundaries.cu_seqlens[:-1], labels.device), NO_LABEL)
            num_tokens = num_targets(labels)
        self.is_evaluating = True
        try:
            with layout(self.template, packed=record is not None):
                loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.is_evaluating = False
        if record is not None:
            numbers = torch.stack([loss.float(), num_tokens.float()])
            self._packs_evaluated[record.number] = numbers, len(record.sample_ids)
        return loss, *others

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute ms-swift's loss of a batch."""
        if self.is_evaluating and is_mean(self):
            num_items_in_batch = None  # otherwise ms-swift multiplies this rank's mean by the number of ranks
        if self.label_smoother is not None:  # ms-swift does not pass the number of items to a label smoother
            self.label_smoother.num_items = num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@contextmanager
def _set(options: Any, **values: Any) -> Iterator[None]:
    """Give options these values inside the block."""
    before = {name: getattr(options, name) for name in values}
    vars(options).update(values)
    try:
        yield
    finally:
        vars(options).update(before)
