"""ms-swift's trainer for packed runs: its loader, its collator, its counters, and a loss for rows without labels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from swift.trainers import Seq2SeqTrainer
from transformers.trainer_utils import seed_worker

from swift_vlpack.core.errors import ConfigError
from swift_vlpack.core.telemetry import Telemetry
from swift_vlpack.data.collate import RECORD, Collator, layout
from swift_vlpack.data.dataset import PackingDataset
from swift_vlpack.data.planned import PlannedPackingDataset
from swift_vlpack.data.samples import PackRecord
from swift_vlpack.host.loader import PackLoader, pack_loader


class PackingTrainer(Seq2SeqTrainer):
    """Trains packs, evaluates padded batches, with one template."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        training_args = kwargs["args"]
        packs = kwargs["train_dataset"]
        if not isinstance(packs, PackingDataset):
            raise ConfigError(f"PackingTrainer trains a PackingDataset, got {type(packs).__name__}")
        self.packs: Any = packs
        self.stats = Telemetry(packing_length=packs.config.packing_length)
        num_workers = training_args.dataloader_num_workers
        super().__init__(*args, **kwargs)
        training_args.dataloader_num_workers = num_workers  # ms-swift allows iterable data one worker; ours shares rows

    def _get_data_collator(self, args: Any, template: Any) -> Collator:
        return Collator(template, padding_to=template.max_length if args.tuner_type == "longlora" else None)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:
        """The packs of this rank, without the first `skip_batches`."""
        args = self.args
        options = {
            "collate_fn": self.data_collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
            "prefetch_factor": args.dataloader_prefetch_factor if args.dataloader_num_workers > 0 else None,
            "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
            **self._maybe_multiprocessing_context(args),
        }
        return pack_loader(
            self.packs, self.accelerator.device, rank=args.process_index, num_skipped=skip_batches, **options
        )

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train one pack and count it: consumed means trained."""
        record: PackRecord = inputs.pop(RECORD)
        with layout(self.template, packed=True):
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._count(record)
        return loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a padded batch, or a pack where `eval_packing` made one."""
        record = inputs.pop(RECORD, None)
        with layout(self.template, packed=record is not None):
            return super().prediction_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """ms-swift's loss; a row without a label has the loss 0, where a mean over nothing would be NaN."""
        labels = inputs.get("labels")
        if not self.model.training or labels is None or bool((labels != -100).any()):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        unused = ("labels", "loss_scale", "channel", "text_position_ids", "compute_loss_func", "logits_to_keep")
        outputs = model(**{key: value for key, value in inputs.items() if key not in unused})
        loss = outputs.logits.float().sum() * 0.0
        return (loss, outputs) if return_outputs else loss

    def close_epoch(self) -> Telemetry:
        """This rank's account of the epoch that ends; the next begins at zero."""
        stats, self.stats = self.stats, Telemetry(packing_length=self.packs.config.packing_length)
        if isinstance(self.packs, PlannedPackingDataset) and self.args.process_index == 0:
            # The plan is the same on all ranks, so one of them accounts for it.
            names = self.packs.dataset.schedule.names
            for name, num_rows in zip(names, self.packs.dataset.schedule.num_rows_per_source, strict=True):
                stats.read(name, num_rows)
            for left_out in self.packs.left_out_by_plan():
                stats.dropped(left_out.sample_id.source, left_out.reason)
        return stats

    def num_lost_by_loader(self) -> dict[str, int]:
        """Rows that ms-swift's loader deleted, by source."""
        return {source.name: source.num_lost for source in getattr(self.packs.dataset, "sources", ())}

    def _count(self, record: PackRecord) -> None:
        samples = [(key.source, length) for key, length in zip(record.sample_ids, record.lengths, strict=True)]
        if not isinstance(self.packs, PlannedPackingDataset):
            for source, _ in samples:
                self.stats.read(source)
            for left_out in record.left_out:
                self.stats.read(left_out.sample_id.source)
        for left_out in record.left_out:
            self.stats.dropped(left_out.sample_id.source, left_out.reason)
        if not samples:
            return
        self.stats.packed(samples, num_images=record.num_images, single_long=record.single_long)
        metrics = self.custom_metrics["train"]
        metrics["pack/fill"].update(sum(record.lengths) / self.packs.config.packing_length)
        metrics["pack/samples"].update(float(len(samples)))
        metrics["pack/images"].update(float(record.num_images))
